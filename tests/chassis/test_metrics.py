"""Metrics in Prometheus' text format, and the small server that tells them, whatever comes in."""

import asyncio
import re
from collections.abc import Iterator

import pytest

from chassis import probes
from chassis.config import ConfigError
from chassis.metrics import Family, Histogram, counter, gauge, histogram, render
from chassis.probes import Probes, serve

SAMPLE = re.compile(r'([a-z_:][a-z0-9_:]*)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\[\\n"])*",?)*)\})? (\S+)')


def parse(text: str) -> dict[str, float]:
    """Samples by name and labels; every line is one, or a comment that came before them."""
    assert text.endswith("\n")
    samples: dict[str, float] = {}
    typed: set[str] = set()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in typed and kind in ("counter", "gauge", "histogram")
            typed.add(name)
        elif not line.startswith("# HELP "):
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            assert match[1] in typed or re.sub("_(bucket|sum|count)$", "", match[1]) in typed
            key = line.rpartition(" ")[0]
            assert key not in samples, "a sample told twice"
            samples[key] = float(match[3])
    return samples


def test_counters_and_gauges() -> None:
    text = render(
        [counter("a_total", "How many").add(3, kind="x").add(0.5, kind="y"), gauge("b", "B").add(2)]
    )
    assert text.splitlines() == [
        "# HELP a_total How many",
        "# TYPE a_total counter",
        'a_total{kind="x"} 3',
        'a_total{kind="y"} 0.5',
        "# HELP b B",
        "# TYPE b gauge",
        "b 2",
    ]
    assert render([counter("none_total", "Nothing yet")]) == ""


def test_whatever_a_label_holds_it_stays_one() -> None:
    name = 'a"b\\c\nd{}'
    samples = parse(render([gauge("g", "two\nlines").add(1, model=name)]))
    assert samples == {'g{model="a\\"b\\\\c\\nd{}"}': 1}


def test_histograms_are_cumulative() -> None:
    h = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5):
        h.observe(value)
    h.observe(7.0, times=2)
    samples = parse(render([histogram("h_seconds", "H").add(h, model="m")]))
    assert samples == {
        'h_seconds_bucket{model="m",le="0.1"}': 2,
        'h_seconds_bucket{model="m",le="1"}': 3,
        'h_seconds_bucket{model="m",le="+Inf"}': 5,
        'h_seconds_sum{model="m"}': pytest.approx(14.65),
        'h_seconds_count{model="m"}': 5,
    }


# ---- the server


class Told:
    def __init__(self) -> None:
        self.ready = False

    def families(self) -> Iterator[Family]:
        yield gauge("g", "G").add(1)


async def ask(address: str, data: bytes) -> bytes:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        return await reader.read()
    finally:
        writer.close()


def get(path: str, method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


def test_it_tells_metrics_and_whether_it_lives_and_is_ready() -> None:
    async def main() -> None:
        told = Told()
        async with serve("127.0.0.1:0", Probes(lambda: told.ready, told.families)) as address:
            answer = (await ask(address, get("/metrics"))).decode()
            head, body = answer.split("\r\n\r\n", 1)
            assert head.startswith("HTTP/1.1 200 ") and "version=0.0.4" in head
            samples = parse(body)
            assert samples["g"] == 1 and samples["process_cpu_seconds_total"] > 0
            assert samples["process_resident_memory_bytes"] > 1 << 20
            assert (await ask(address, get("/live"))).startswith(b"HTTP/1.1 200 ")
            assert (await ask(address, get("/ready"))).startswith(b"HTTP/1.1 503 ")
            told.ready = True
            assert (await ask(address, get("/ready?verbose"))).startswith(b"HTTP/1.1 200 ")
            head_only = await ask(address, get("/live", "HEAD"))
            assert head_only.endswith(b"\r\n\r\n") and b"Content-Length: 5" in head_only

    asyncio.run(main())


@pytest.mark.parametrize(
    ("data", "begins"),
    [
        (get("/"), b"HTTP/1.1 404 "),
        (get("/metrics", "POST"), b"HTTP/1.1 405 "),
        (b"\xff\xfe\x00\r\n\r\n", b"HTTP/1.1 400 "),
        (b"GET /live SSH/2\r\n\r\n", b"HTTP/1.1 400 "),
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n", b""),
        (b"GET /live HTTP/1.1\r\nhalf a head", b""),
    ],
)
def test_bad_requests_are_answered_or_let_go(
    data: bytes, begins: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "TIMEOUT_S", 0.1)

    async def main() -> None:
        told = Told()
        async with serve("127.0.0.1:0", Probes(lambda: True, told.families)) as address:
            try:
                answer = await ask(address, data)
            except ConnectionResetError:
                answer = b""
            assert answer.startswith(begins) and (begins or not answer)
            assert (await ask(address, get("/live"))).startswith(b"HTTP/1.1 200 ")

    asyncio.run(main())


def test_idle_connections_keep_nobody_out_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "TIMEOUT_S", 0.1)

    async def main() -> None:
        told = Told()
        async with serve("127.0.0.1:0", Probes(lambda: True, told.families)) as address:
            host, _, port = address.rpartition(":")
            idle = [await asyncio.open_connection(host, int(port)) for _ in range(2 * probes.CONNECTIONS_MAX)]
            for reader, _ in idle:
                assert await reader.read() == b""
            assert (await ask(address, get("/live"))).startswith(b"HTTP/1.1 200 ")
            for _, writer in idle:
                writer.close()

    asyncio.run(main())


def test_a_port_that_is_taken_stops_nobody() -> None:
    async def main() -> None:
        told = Probes(lambda: True, Told().families)
        async with serve("127.0.0.1:0", told) as address, serve(address, told) as second:
            assert second == ""
            assert (await ask(address, get("/live"))).startswith(b"HTTP/1.1 200 ")

    asyncio.run(main())


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:x", "127.0.0.1:70000", "256.1.1.1:0"])
def test_a_bad_address_is_named(address: str) -> None:
    async def main() -> None:
        async with serve(address, Probes(lambda: True, Told().families)):
            pass

    with pytest.raises(ConfigError, match="metrics_address"):
        asyncio.run(main())
