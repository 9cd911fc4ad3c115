"""What this machine takes before any of our work: the bounds of the time that Shoal adds to a first token.

A wake-up of a waiting process, a synced write, and what Python costs when it ran a moment ago against when
it waited: on a shared machine a core that idles finds its caches taken.
"""

import asyncio
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from bench.results_file import Sample, table, write
from chassis.messages.pipeline import SlotStart, build_step, read_step
from chassis.messages.request import Sampling
from shard_worker.inputs import MakeTables, TableLimits, portable_tables
from shard_worker.native.library import native
from shard_worker.native.tables import native_tables

ROUNDS = 5
REPEATS = 30
IDLE_S = 0.03
RECORD_BYTES = 1024


def _waiting(times: int, what: Callable[[], object], idle_s: float) -> float:
    """Median seconds of a call that follows `idle_s` of waiting."""
    taken = []
    for _ in range(times):
        time.sleep(idle_s)
        begun = time.perf_counter()
        what()
        taken.append(time.perf_counter() - begun)
    return median(taken)


def _hop() -> float:
    """Half of an echo by a process whose event loop waits: one wake-up and two small calls of the system."""
    here, there = socket.socketpair()
    child = os.fork()
    if child == 0:
        here.close()
        try:
            asyncio.run(_echo(there))
        finally:
            os._exit(0)
    there.close()
    try:
        return _waiting(REPEATS, lambda: here.recv(here.send(b"x")), IDLE_S) / 2
    finally:
        here.close()
        os.waitpid(child, 0)


async def _echo(end: socket.socket) -> None:
    end.setblocking(False)
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(end, 64):
        await loop.sock_sendall(end, data)


def _synced_write(folder: Path) -> float:
    with (folder / "log").open("wb", buffering=0) as file:

        def append() -> None:
            file.write(bytes(RECORD_BYTES))
            os.fsync(file.fileno())

        return _waiting(REPEATS, append, IDLE_S)


def _first_step(make_tables: MakeTables, idle_s: float) -> float:
    """A worker's Python before it computes a prompt of 128 tokens."""
    header = build_step(
        1, 1, slots=[0], num_tokens=[128], starts=[0], flags=[3], output_index=[0], table_lens=[9],
        token_ids=list(range(128)), table=list(range(9)), fresh=[SlotStart(Sampling(), 5)],
        trace_parent=bytes(25),
    )  # fmt: skip
    limits = TableLimits(
        slots_max=64, block_size_tokens=16, num_blocks=4096, context_len_max=2048, step_tokens_max=512,
        vocab_size=49152,
    )  # fmt: skip
    tables = make_tables(limits, True, 4)
    return _waiting(REPEATS, lambda: tables.take(read_step(header)), idle_s)


def main() -> None:
    taken: dict[str, list[float]] = {}
    kinds: dict[str, MakeTables] = {"": portable_tables}
    if (library := native()) is not None:
        kinds["native_"] = native_tables(library)
    with tempfile.TemporaryDirectory(dir=".") as folder:  # where a broker's files would be, not in memory
        for _ in range(ROUNDS):
            for name, seconds in (
                ("floor.hop_us", _hop()),
                ("floor.synced_write_us", _synced_write(Path(folder))),
                *((f"floor.worker_{kind}hot_us", _first_step(make, 0.0)) for kind, make in kinds.items()),
                *((f"floor.worker_{kind}idle_us", _first_step(make, IDLE_S)) for kind, make in kinds.items()),
            ):
                taken.setdefault(name, []).append(1e6 * seconds)
    values = {name: Sample(tuple(us), "us") for name, us in taken.items()}
    sys.stdout.write(table([["bound", "value"], *([n, str(s)] for n, s in values.items())]) + "\n")
    write("floor", values, {"idle_s": IDLE_S})
