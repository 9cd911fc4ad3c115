"""`shoal usage`: sums of receipts in a stream, by tenant, model, day and the rest."""

import argparse
import asyncio
import json
import random
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from chassis import usage_subjects
from chassis.ids import Attempt, BootId, RequestId
from chassis.memory_broker import MemoryBroker
from chassis.memory_bus import MemoryBus
from chassis.messages.request import Reason, Terminal, Timings, Usage
from chassis.messages.usage import Receipt, build_receipt, receipt_of
from shoal import usage_words
from shoal.usage import GROUPS, Summary

DAY_MS = 86_400_000
NOON = round(datetime(2026, 12, 1, 12, tzinfo=UTC).timestamp() * 1000)


def receipt(number: int, tenant: str = "acme", model: str = "m", at_ms: int = NOON, **more: Any) -> Receipt:
    end = Terminal(
        attempt=Attempt(1),
        boot=BootId("b"),
        reason=more.pop("reason", Reason.STOP),
        output_ids=(),
        usage=more.pop("usage", Usage(10, 4, 3)),
        timings=Timings(queued_us=500, waiting_us=500, stage_compute_us=more.pop("stages", (7_000,))),
        tenant=tenant,
        model=model,
        accepted_ms=at_ms - 1,
        **more,
    )
    return receipt_of(RequestId(f"r{number}"), end)


def told(words: Sequence[str], receipts: Sequence[Receipt], garbage: Sequence[str] = ()) -> str:
    """What the command says of a stream that holds these."""

    async def ask() -> str:
        broker = MemoryBroker(wall_ns=lambda: (NOON + DAY_MS) * 1_000_000)  # when all were stored
        bus = MemoryBus(broker, "a")
        try:
            for r in receipts:
                subject = usage_subjects.receipt(r.tenant, r.model, r.request_id)
                await bus.append(subject, build_receipt(r), expected_seq=0)
            for subject in garbage:
                await bus.append(subject, b"\xff\xff")
            shown = await usage_words.look(bus, parsed(*words))
        finally:
            await bus.close()
        return usage_words.render(shown, parsed(*words))

    return asyncio.run(ask())


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    usage_words.add_words(parser)
    return parser.parse_args(words)


def objects(*words: str, receipts: Sequence[Receipt]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in told([*words, "--json"], receipts).splitlines()]


FOUR = [
    receipt(1),
    receipt(2, model="other", reason=Reason.CANCELLED, stages=(1_000, 2_000)),
    receipt(3, tenant="b.c", key="laptop"),
    receipt(4, at_ms=NOON + DAY_MS, stages=(1_000, 2_000)),
]


def test_sums_by_tenant_and_model() -> None:
    rows = objects(receipts=FOUR)
    assert [(r["tenant"], r["model"], r["requests"]) for r in rows] == [
        ("acme", "m", 2),
        ("acme", "other", 1),
        ("b.c", "m", 1),
    ]
    assert (rows[0]["prompt_tokens"], rows[0]["cached_tokens"], rows[0]["output_tokens"]) == (20, 8, 6)
    assert rows[0]["queued_us"] == 2_000
    assert rows[0]["stage_compute_us"] == [8_000, 2_000], "pipelines may have different numbers of stages"


@pytest.mark.parametrize(
    ("by", "names"),
    [
        ("day", ["2026-12-01", "2026-12-02"]),
        ("key", ["", "laptop"]),
        ("reason", ["cancelled", "stop"]),
        ("priority", ["0"]),
    ],
)
def test_sums_by_the_rest(by: str, names: list[str]) -> None:
    rows = objects("--by", by, receipts=FOUR)
    assert [row[by] for row in rows] == names
    assert sum(row["requests"] for row in rows) == 4


def test_only_of_a_time_a_tenant_a_model() -> None:
    def count(*words: str) -> int:
        return sum(row["requests"] for row in objects("--by", "", *words, receipts=FOUR))

    assert count() == 4
    assert count("--since", "2026-12-02") == 1 and count("--until", "2026-12-02") == 3
    assert count("--since", "2026-12-01T12:00:00", "--until", "2026-12-01T12:00:00.001") == 3
    assert count("--tenant", "acme") == 3 and count("--tenant", "acme", "--model", "m") == 2
    assert count("--tenant", "b.c") == 1 and count("--tenant", "b") == 0


def test_the_table_and_its_last_line() -> None:
    lines = told([], FOUR).splitlines()
    assert lines[0].split()[:4] == ["tenant", "model", "requests", "in"]
    assert [line.split()[0] for line in lines[1:]] == ["acme", "acme", "b.c", "all"]
    assert lines[-1].split()[1:5] == ["4", "40", "16", "12"]
    assert told([], []) == "no receipts"


def test_names_do_not_steer_the_terminal() -> None:
    assert "\x1b" not in told([], [receipt(1, tenant="\x1b[2Jevil\r")])


def test_lines_for_a_spreadsheet() -> None:
    lines = told(["--csv", "--by", "tenant"], [*FOUR, receipt(5, tenant='a,"b')]).splitlines()
    assert lines[0].startswith("tenant,requests,prompt_tokens") and lines[0].endswith("compute_us")
    assert lines[1].startswith('"a,""b",1,10,4,3') and lines[2].endswith(",13000")


def test_what_is_no_receipt_is_counted_and_told() -> None:
    text = told([], FOUR, ["shoal.use.acme.m.junk"])
    assert text.splitlines()[-1] == "no receipts, though in their stream: 1 messages"
    assert "4" in text.splitlines()[-2].split()


@pytest.mark.parametrize("words", [["--by", "colour"], ["--since", "yesterday"], ["--since", "99999999999d"]])
def test_wrong_words_are_refused_by_name(words: list[str]) -> None:
    with pytest.raises((argparse.ArgumentError, argparse.ArgumentTypeError), match=words[0]):
        parsed(*words)


def test_what_is_ago_counts_from_now() -> None:
    now_ms = datetime.now(UTC).timestamp() * 1000
    assert abs(parsed("--since", "90m").since - (now_ms - 5_400_000)) < 60_000
    assert parsed("--since", "999999999d").since == 0


def test_sums_are_those_of_the_parts_whatever_the_groups() -> None:
    rng = random.Random(7)
    receipts = [
        receipt(
            i,
            tenant=rng.choice("abc"),
            model=rng.choice("xy"),
            usage=Usage(rng.randrange(99), 0, rng.randrange(99)),
            stages=tuple(rng.randrange(1000) for _ in range(rng.randrange(4))),
        )
        for i in range(300)
    ]
    whole = Summary(())
    for r in receipts:
        whole.add(r)
    for by in [("tenant",), ("tenant", "model", "day"), tuple(GROUPS)]:
        parts = Summary(by)
        for r in receipts:
            parts.add(r)
        for name in ("requests", "prompt_tokens", "output_tokens", "queued_us"):
            whole_sum = getattr(whole.all, name)
            assert sum(getattr(sums, name) for sums in parts.groups.values()) == whole_sum
            assert getattr(parts.all, name) == whole_sum
        computed = sum(sum(sums.stage_compute_us) for sums in parts.groups.values())
        assert computed == sum(whole.all.stage_compute_us)
