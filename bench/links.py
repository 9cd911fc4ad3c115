"""What a link costs between two processes of this machine, by kind: through the interface that services use.

Latency is a frame there and an empty one back; throughput is frames after one another, four under way.
The other process is this file again. Both run the services' own event loop, in host memory.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from statistics import median
from typing import cast

from bench.results_file import Sample, table, write
from chassis import log
from chassis.ids_source import id_source
from chassis.service import loop_factory
from chassis.transport.choice import ChosenTransport
from chassis.transport.interface import Link, LinkOptions
from chassis.transport.kinds import Kind, Links

KINDS: tuple[Kind, ...] = ("tcp", "unix", "nixl+tcp", "nixl+shm")
SIZES = {"64k": (64 << 10, 200), "1m": (1 << 20, 60), "16m": (16 << 20, 10)}  # bytes, frames a turn
OPTIONS = LinkOptions(slots=4, slot_bytes=16 << 20, send_timeout_s=30.0)
ANSWER, SINK, LAST = b"answer", b"sink", b"last"


def _transport(kind: Kind) -> ChosenTransport:
    return ChosenTransport(Links(kinds=(kind,)), id_source(time.time_ns), asyncio.get_running_loop().time)


async def _answer(link: Link) -> None:
    while True:
        frame = await link.receive()
        wanted = frame.header != SINK
        frame.release()
        if wanted:
            await link.send(b"here")


async def _peer(kind: Kind) -> None:
    accepted: asyncio.Queue[Link] = asyncio.Queue()
    address = await _transport(kind).listen("tcp://127.0.0.1:0", accepted.put_nowait, OPTIONS)
    sys.stdout.write(address + "\n")
    sys.stdout.flush()
    await _answer(await accepted.get())


@asynccontextmanager
async def _link(kind: Kind) -> AsyncIterator[Link]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.links", kind, stdout=asyncio.subprocess.PIPE
    )
    transport = _transport(kind)
    try:
        assert process.stdout is not None
        address = (await process.stdout.readline()).decode().strip()
        yield await transport.dial(address, b"bench", OPTIONS, timeout_s=10.0)
    finally:
        await transport.close()
        process.kill()
        await process.wait()


async def _round_trip_s(link: Link, payload: memoryview) -> float:
    begun = time.perf_counter()
    await link.send(ANSWER, payload)
    (await link.receive()).release()
    return time.perf_counter() - begun


async def _stream_s(link: Link, payload: memoryview, frames: int) -> float:
    begun = time.perf_counter()
    for i in range(frames):
        await link.send(LAST if i + 1 == frames else SINK, payload)
    (await link.receive()).release()
    return time.perf_counter() - begun


async def measure(kinds: tuple[Kind, ...], rounds: int) -> dict[str, Sample]:
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for kind in kinds:
            async with _link(kind) as link:
                for name, (size, frames) in SIZES.items():
                    payload = memoryview(bytes(range(256)) * (size // 256))
                    for _ in range(5):
                        await _round_trip_s(link, payload)
                    trips = [await _round_trip_s(link, payload) for _ in range(frames)]
                    stream_s = await _stream_s(link, payload, frames)
                    found.setdefault(f"{kind}.{name}.latency_us", []).append(median(trips) * 1e6)
                    found.setdefault(f"{kind}.{name}.mb_s", []).append(frames * size / stream_s / 1e6)
    return {n: Sample(tuple(v), "us" if n.endswith("us") else "MB/s") for n, v in found.items()}


async def main(rounds: int) -> None:
    samples = await measure(KINDS, rounds)
    rows = [["link", "frame", "latency", "throughput"]]
    for kind in KINDS:
        for name in SIZES:
            figures = [str(samples[f"{kind}.{name}.{what}"]) for what in ("latency_us", "mb_s")]
            rows.append([kind, name, *figures])
    sys.stdout.write(table(rows) + "\n")
    write("links", samples, {"slots": OPTIONS.slots})


if __name__ == "__main__":
    log.bind(level="off")
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_peer(cast(Kind, sys.argv[1])))
