"""The services of a stage of several ranks: the leader, which is the worker that others know, and a follower.

The leader stands in no registry before all its ranks are here. A rank that is lost crashes it: whoever
started it starts it again, and with it all ranks. A follower is known to nobody but its leader. Who has lost
another ends within a limit that the kernel keeps, whatever still waits for the lost one.
"""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from chassis import log
from chassis.metrics import Family, counter, gauge
from chassis.ports import Ports
from shard_worker.config import Config
from shard_worker.meters import ObservedWorker
from shard_worker.ranks.executor import LeaderExecutor
from shard_worker.ranks.follower import Follower
from shard_worker.ranks.leader import Followers, RankLost
from shard_worker.ranks.processes import RankProcesses

END_GRACE_S = 5.0
LEAVE_S = 1.0  # for a follower that has lost its leader to say how it ends
END_WITHIN_S = 10.0  # of who has lost another rank


class LeaderWorker(ObservedWorker):
    def __init__(
        self,
        config: Config,
        ports: Ports,
        executor: LeaderExecutor,
        *more: Any,
        followers: Followers,
        processes: RankProcesses | None,
        measure: Callable[[LeaderExecutor, Sequence[str]], None],
    ) -> None:
        """`processes`: those that it has started itself; `measure`: what layers take, with the others on
        these hosts; raises LoadFailed."""
        super().__init__(config, ports, executor, *more)
        self._measure = measure
        self._leader, self._followers, self._processes = executor, followers, processes
        self._join_s = config.rank_join_ms / 1000
        self._ranks_changed = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self._followers.when_changed(lambda: _wake(loop, self._ranks_changed))
        self._followers.when_changed(self._end_if_lost)
        if self._processes is not None:
            self._followers.when_changed(self._kill_if_lost)
            self._processes.watch(self._followers.lose)
        self._followers.admit(self._facts.digest, self._leader.settings, self._leader.device)
        try:
            if await self._all_here():
                self._leader.ready()
                await self._compute.call(lambda: self._measure(self._leader, self._followers.hosts))
                self._facts = self._leader.facts
                self._registration.take(self._facts)
                async with asyncio.TaskGroup() as group:
                    watching = group.create_task(self._watch(), name="ranks")
                    await super().run()
                    watching.cancel()
        finally:
            self._followers.close()
            if self._processes is not None:
                await asyncio.to_thread(self._processes.end, END_GRACE_S)

    async def _all_here(self) -> bool:
        """False: drained meanwhile. Raises RankLost."""
        try:
            async with asyncio.timeout(self._join_s):
                while not self._followers.whole:
                    self._ranks_changed.clear()
                    if self._followers.cause:
                        raise RankLost(self._followers.cause)
                    await self._ranks_changed.wait()
                    if self._drained.is_set():
                        return False
        except TimeoutError:
            missing = self._followers.missing()
            raise RankLost(f"ranks {missing} have not joined within {self._join_s:g} s") from None
        log.info("all ranks are here", ranks=self._followers.ranks)
        return True

    async def _watch(self) -> None:
        while not self._followers.cause:
            self._ranks_changed.clear()
            await self._ranks_changed.wait()
        raise RankLost(self._followers.cause)

    def _end_if_lost(self) -> None:
        if self._followers.cause:
            end_within(END_WITHIN_S)

    def _kill_if_lost(self) -> None:
        if self._followers.cause and self._processes is not None:
            self._processes.kill()

    async def drain(self) -> None:
        await super().drain()
        self._ranks_changed.set()


class FollowerService:
    """`Observed`: runs until its leader goes."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._ended = asyncio.Event()

    @property
    def ready(self) -> bool:
        return self._follower.joined

    def metrics(self) -> Iterator[Family]:
        yield gauge("shoal_rank_joined", "Its leader has all ranks").add(self._follower.joined)
        yield counter("shoal_rank_steps_total", "Steps that it took part in").add(self._follower.num_steps)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        failed: list[BaseException] = []
        self._follower.when_lost(lambda: self._lost(loop))

        def follow() -> None:
            try:
                self._follower.follow()
            except BaseException as error:
                failed.append(error)
            _wake(loop, self._ended)

        threading.Thread(target=follow, name="follow", daemon=True).start()
        try:
            await self._ended.wait()
        finally:
            self._follower.stop()
        if failed:
            raise failed[0]

    def _lost(self, loop: asyncio.AbstractEventLoop) -> None:
        """The thread that follows may be where nothing wakes it: in the making of connections."""
        end_within(END_WITHIN_S)
        _call(loop, lambda: loop.call_later(LEAVE_S, self._ended.set))

    async def drain(self) -> None:
        """It is the leader who drains: until it goes it needs all its ranks."""
        if self._follower.joined:
            await self._ended.wait()
        self._follower.stop()


def end_within(seconds: float) -> None:
    """The kernel ends this process by SIGALRM if it has not ended itself by then; asked again, no later."""
    left, _ = signal.getitimer(signal.ITIMER_REAL)
    if not left:
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _wake(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    _call(loop, event.set)


def _call(loop: asyncio.AbstractEventLoop, do: Callable[[], object]) -> None:
    try:
        loop.call_soon_threadsafe(do)
    except RuntimeError:  # the loop is closed: nobody waits
        pass
