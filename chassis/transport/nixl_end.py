"""The poller's side of one link: its agent, the writes under way and their deadlines, what arrives.

Rules: all of it runs on the poller's thread, but for the constructor; what happened is told to the loop.
A write that fails, or is not done by its deadline, is the end of the link. After `close` this end writes
nothing; whether the peer still might is for the quarantine.
"""

from collections.abc import Callable
from dataclasses import dataclass

from chassis.transport.nixl_agent import Agent, AgentError
from chassis.transport.nixl_slots import Staging
from chassis.transport.nixl_wire import Place
from chassis.transport.registered import Memory, MemoryRange


@dataclass(slots=True)
class _Writing:
    handle: object
    deadline: float
    done: Callable[[], None]


class End:
    """`tell_notes`: what came; `tell_written`: slots whose credit was back before; `tell_broken`: why."""

    def __init__(
        self,
        agent: Agent,
        write_timeout_s: float,
        *,
        tell_notes: Callable[[list[bytes]], None],
        tell_written: Callable[[int], None],
        tell_broken: Callable[[str], None],
    ) -> None:
        self._agent = agent
        self._write_timeout_s = write_timeout_s
        self._tell_notes = tell_notes
        self._tell_written = tell_written
        self._tell_broken = tell_broken
        self._writing: list[_Writing] = []
        self._open = True

    @property
    def under_way(self) -> bool:
        return bool(self._writing)

    def poll(self, now: float) -> bool:
        """Whether something happened."""
        if not self._open:
            return False
        try:
            notes = self._agent.notifications()
            happened = self._look_at_writes(now)
        except Exception as error:  # also the library's own: one link ends, the thread goes on
            self._break(error)
            return True
        if notes:
            self._tell_notes(notes)
        return happened or bool(notes)

    def _look_at_writes(self, now: float) -> bool:
        happened = False
        for writing in list(self._writing):
            if self._agent.done(writing.handle):
                self._writing.remove(writing)
                self._agent.release(writing.handle)
                writing.done()
                happened = True
            elif now > writing.deadline:
                raise AgentError(f"a write was not done in {self._write_timeout_s:g} s")
        return happened

    def write(self, now: float, slot: int, staging: Staging, size: int, place: Place, note: bytes) -> None:
        def done() -> None:
            staging.busy = False  # before `wanted` is read: the loop does it the other way round
            if staging.wanted:
                self._tell_written(slot)

        self.write_from(now, MemoryRange(staging.region, 0, size), place, note, done)

    def write_from(
        self, now: float, source: MemoryRange, place: Place, note: bytes, done: Callable[[], None]
    ) -> None:
        """`done`: called here once `source` has been read and written."""

        def work() -> None:
            handle = self._agent.write(source, place, note)
            self._writing.append(_Writing(handle, now + self._write_timeout_s, done))

        self._try(work)

    def notify(self, note: bytes) -> None:
        self._try(lambda: self._agent.notify(note))

    def connect(self, metadata: bytes) -> None:
        self._try(lambda: self._agent.connect(metadata))

    def register(self, region: Memory) -> None:
        self._try(lambda: self._agent.register([region]))

    def extend(self, region: Memory, tell: Callable[[bytes], None]) -> None:
        """Registers a new place for the peer to write into, and tells what it needs for that."""

        def work() -> None:
            self._agent.register([region])
            tell(self._agent.metadata_of(region))

        self._try(work)

    def _try(self, work: Callable[[], None]) -> None:
        if self._open:
            try:
                work()
            except Exception as error:
                self._break(error)

    def _break(self, error: Exception) -> None:
        """Nothing more happens here but `close`."""
        self._open = False
        self._tell_broken(str(error) if isinstance(error, AgentError) else f"{type(error).__name__}: {error}")

    def close(self) -> bool:
        """Whether it is certain that none of our writes is under way."""
        self._open = False
        certain = True
        for writing in self._writing:
            try:
                self._agent.release(writing.handle)
            except AgentError:
                certain = False
        self._writing.clear()
        self._agent.close()
        return certain
