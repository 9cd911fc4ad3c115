"""Memory of closed links that a peer might still write into, kept until it can't.

Over RDMA and TCP a late write can't land once the receiver's agent is gone: its registration, or the worker
that would have taken it, went with it. Over shared memory the peer's process copies by address (CMA), so what
it was lent stays ours until the peer has said that it let go, or its process has ended. Above `BYTES_MAX` no
new link is made.
"""

import contextlib
import os
import select
from collections.abc import Sequence
from dataclasses import dataclass

from chassis.transport.registered import Memory

BYTES_MAX = 1 << 30


def pid_namespace() -> int:
    """Names the namespace that this process' pid belongs to; 0: not known."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


class Process:
    """Another process, held by a descriptor: a pid that is used again is not it."""

    def __init__(self, pid: int) -> None:
        self._fd: int | None = None
        self._gone = False
        self._own = pid == os.getpid()
        if not self._own:
            try:
                self._fd = os.pidfd_open(pid)
            except ProcessLookupError:
                self._gone = True
            except OSError:
                pass  # never known to be gone

    @property
    def gone(self) -> bool:
        if not self._gone and self._fd is not None:
            ended = select.poll()
            ended.register(self._fd, select.POLLIN)
            self._gone = bool(ended.poll(0))
        return self._gone

    def forget(self) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = None


@dataclass(frozen=True, slots=True)
class _Held:
    regions: Sequence[Memory]
    peer: Process


class Quarantine:
    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}
        self._last = 0

    @property
    def bytes(self) -> int:
        return sum(region.capacity for held in self._held.values() for region in held.regions)

    @property
    def full(self) -> bool:
        self._look()
        return self.bytes >= BYTES_MAX

    def hold(self, regions: Sequence[Memory], peer: Process) -> int:
        """Returns the number under which it is let go."""
        self._look()
        self._last += 1
        self._held[self._last] = _Held(regions, peer)
        return self._last

    def let_go(self, number: int) -> None:
        held = self._held.pop(number, None)
        if held is not None:
            held.peer.forget()

    def _look(self) -> None:
        for number in [number for number, held in self._held.items() if held.peer.gone]:
            self.let_go(number)
