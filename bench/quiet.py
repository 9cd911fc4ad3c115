"""How much of the processors others used during a measurement: what a figure is worth."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def _busy_s() -> float:
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    values = [int(f) for f in fields]
    idle = values[3] + values[4]
    return (sum(values[:8]) - idle) / _TICKS


def _tree_s(root: int) -> float:
    """Processor time of a process and all its descendants that live, and of those it has reaped."""
    children: dict[int, list[int]] = {}
    used: dict[int, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:
            continue
        fields = text[text.rindex(")") + 2 :].split()
        pid, parent = int(path.parent.name), int(fields[1])
        children.setdefault(parent, []).append(pid)
        used[pid] = sum(int(f) for f in fields[11:15]) / _TICKS
    total, stack = 0.0, [root]
    while stack:
        pid = stack.pop()
        total += used.get(pid, 0.0)
        stack.extend(children.get(pid, ()))
    return total


@dataclass(slots=True)
class Others:
    """`cores`: how many the processes outside the watched tree used, on average."""

    cores: float = 0.0


@contextmanager
def watch_others(root: int | None = None) -> Iterator[Others]:
    """Others are all but the process `root` (None: this one) and what it started."""
    root = os.getpid() if root is None else root
    others = Others()
    start, busy, own = time.perf_counter(), _busy_s(), _tree_s(root)
    yield others
    seconds = time.perf_counter() - start
    others.cores = max(0.0, (_busy_s() - busy) - (_tree_s(root) - own)) / max(seconds, 1e-9)


def resident_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise LookupError(f"process {pid} has no VmRSS")
