"""A log line is one JSON object with what is bound, and nothing of another task's."""

import asyncio
import contextvars
from typing import Any

import orjson

from chassis import log
from chassis.trace import TraceContext


def lines_of(do: Any) -> list[dict[str, Any]]:
    out: list[bytes] = []

    def run() -> None:
        log.bind(write=out.append, wall_ns=lambda: 7, service="s", boot="b")
        do()

    contextvars.copy_context().run(run)
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in out)
    return [orjson.loads(line) for line in out]


def test_a_line_carries_what_is_bound_and_its_fields() -> None:
    context = TraceContext(b"\x01" * 16, b"\x02" * 8)
    lines = lines_of(lambda: log.info("stood", epoch=3, trace=context, raw=b"\xff"))
    assert lines == [
        {
            "time_ns": 7,
            "level": "info",
            "event": "stood",
            "service": "s",
            "boot": "b",
            "epoch": 3,
            "trace_id": "01" * 16,
            "span_id": "02" * 8,
            "raw": "ff",
        }
    ]


def test_levels() -> None:
    def some() -> None:
        log.debug("unseen")
        log.bind(level="debug")
        log.debug("seen")
        log.bind(level="off")
        log.error("unseen")

    assert [line["event"] for line in lines_of(some)] == ["seen"]


def test_an_exception_is_one_line_with_its_stack() -> None:
    def fail() -> None:
        try:
            raise ValueError("no\nnewline")
        except ValueError as error:
            log.exception("broke", error)

    (line,) = lines_of(fail)
    assert line["error"] == "ValueError: no\nnewline"
    assert "test_log.py" in line["stack"]


def test_what_cannot_be_json_is_text() -> None:
    (line,) = lines_of(lambda: log.info("odd", thing={1: ValueError("x")}))
    assert line["thing"] == {"1": "x"}


def test_tasks_keep_their_own_names() -> None:
    out: list[bytes] = []

    async def service(name: str) -> None:
        log.bind(write=out.append, service=name)
        await asyncio.sleep(0)
        log.info("here")

    async def both() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(service("a"))
            group.create_task(service("b"))

    asyncio.run(both())
    assert [orjson.loads(line)["service"] for line in out] == ["a", "b"]
