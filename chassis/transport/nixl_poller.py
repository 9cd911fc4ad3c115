"""The one thread that touches NIXL agents: NIXL has nothing to wait on, so it looks, and sleeps.

While something is under way it looks every `NAP_S`, right after something happened without a pause for
`SPIN_S` (a spin longer than that would cost other processes their core); after `HOT_S` of silence it sleeps
in the kernel until it is woken, by work from the loop or by a peer's ring on the control connection, and
looks every `IDLE_S` in any case. The loop hears from it by `call_soon_threadsafe`.
"""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Protocol

SPIN_S = 20e-6
NAP_S = 50e-6
HOT_S = 10e-3
IDLE_S = 5e-3


class Polled(Protocol):
    def poll(self, now: float) -> bool:
        """Whether something happened. Raises nothing."""

    @property
    def under_way(self) -> bool:
        """Whether something is waited for."""


class Poller:
    """`submit` and `stop` may be called from any thread; `add` and `remove` only by work it does."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._polled: list[Polled] = []
        self._thread: threading.Thread | None = None
        self._hot_until = 0.0
        self._spin_until = 0.0

    def submit(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="nixl", daemon=True)
            self._thread.start()
        self._work.put(work)

    def wake(self) -> None:
        """Something is about to arrive."""
        self.submit(_nothing)

    def add(self, polled: Polled) -> None:
        self._polled.append(polled)

    def remove(self, polled: Polled) -> None:
        if polled in self._polled:
            self._polled.remove(polled)

    def stop(self) -> threading.Thread | None:
        """What was submitted before is still done. Returns the thread to wait for."""
        if self._thread is not None:
            self._work.put(None)
        return self._thread

    def _run(self) -> None:
        while True:
            now = self._clock()
            happened = [polled.poll(now) for polled in list(self._polled)]
            if any(happened):
                self._hot_until, self._spin_until = now + HOT_S, now + SPIN_S
            try:
                work = self._next(now)
                while True:
                    if work is None:
                        return
                    work()
                    work = None  # while we sleep it would keep a link that is gone
                    self._hot_until = now + HOT_S
                    work = self._work.get_nowait()
            except Empty:
                pass

    def _next(self, now: float) -> Callable[[], None] | None:
        """Raises Empty."""
        if not self._polled:
            return self._work.get()
        if now < self._spin_until:
            return self._work.get_nowait()
        under_way = now < self._hot_until or any(polled.under_way for polled in self._polled)
        return self._work.get(timeout=NAP_S if under_way else IDLE_S)


def _nothing() -> None:
    pass
