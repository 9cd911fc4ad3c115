"""Pure. What is to be done for a batch next, by what is known of it.

    validating -> in_progress -> finalizing -> completed | expired
    validating -> failed            validating, in_progress -> cancelling -> cancelled

Rules: the record names its driver, and is written only over the record that was read, so that of two drivers
one learns that it is none. A request has its one answer in ANSWERS, and only that counts: whatever is
published twice, closed twice or cancelled late changes nothing. Files are written when every request has one.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import islice

from chassis.messages.batches import Batch, BatchState, Problem, Tally
from chassis.messages.jobs import CANCELLED, EXPIRED
from gateway.batches.events import (
    Answered,
    AnswerSeen,
    Close,
    Effect,
    Event,
    Leave,
    Load,
    Loaded,
    Offer,
    Offered,
    Save,
    Seen,
    Tick,
    Write,
    Written,
)

OFFERED_LEN_MAX = 1024  # without an answer, of one batch
OFFER_LEN = 64  # at a time
CLOSE_LEN = 256
TALLY_INTERVAL_S = 2  # between records that only count


@dataclass(slots=True)
class Driving:
    driver: str
    _now: int = 0
    _batch: Batch | None = None
    _loaded: Loaded | None = None
    _answered: bytearray = field(default_factory=bytearray)
    _answered_len: int = 0
    _offered: dict[int, None] = field(default_factory=dict)  # and not answered
    _next: int = 0  # all below are offered or answered
    _tally: Tally = field(default_factory=Tally)
    _tally_at: int = 0
    _written: Written | None = None
    _mine: bool = False

    def handle(self, event: Event) -> list[Effect]:
        """What is next, all that is known considered: of several events at once only the last one's effects
        are to be performed."""
        self._now = event.now
        match event:
            case Seen(_, batch):
                self._batch = batch
            case Loaded():
                self._loaded = event
                self._answered = bytearray(event.total)
                self._take(event.answers)
            case Answered(_, answers):
                self._take(answers)
            case Offered(_, indexes):
                self._offered.update((i, None) for i in indexes if not self._answered[i])
            case Written():
                self._written = event
            case Tick():
                pass
        return self._plan()

    def check(self) -> None:
        """What holds after every event."""
        assert self._answered_len == sum(self._answered)
        assert not any(self._answered[i] for i in self._offered)
        assert len(self._offered) <= OFFERED_LEN_MAX
        assert self._tally.completed + self._tally.failed == self._answered_len

    @property
    def _total(self) -> int:
        return len(self._answered)

    def _take(self, answers: Iterable[AnswerSeen]) -> None:
        tally = self._tally
        for a in answers:
            if a.index >= self._total or self._answered[a.index]:
                continue
            self._answered[a.index] = 1
            self._answered_len += 1
            self._offered.pop(a.index, None)
            tally = Tally(
                tally.completed + a.ok,
                tally.failed + (not a.ok),
                tally.input_tokens + a.input_tokens,
                tally.cached_tokens + a.cached_tokens,
                tally.output_tokens + a.output_tokens,
            )
        self._tally = tally

    # ---- what is next --------------------------------------------------------------------------------

    def _plan(self) -> list[Effect]:
        batch, now = self._batch, self._now
        assert batch is not None, "Seen comes first"
        if batch.state.over:
            return [Leave(over=True)]
        if batch.driver != self.driver:
            # once it was ours and is no more, somebody took it over
            return [Leave(over=False)] if self._mine else [Save(replace(batch, driver=self.driver))]
        self._mine = True
        if self._loaded is None:
            return [Load()]
        if self._loaded.problems:
            return [Save(self._refused(batch, self._loaded.problems))]
        if batch.state is BatchState.VALIDATING:
            begun = replace(batch, total=self._total, model=self._loaded.model, in_progress_at=now)
            return [Save(replace(begun, state=BatchState.IN_PROGRESS))]
        if batch.state is BatchState.IN_PROGRESS:
            return self._run(batch)
        if self._answered_len < self._total:
            code = CANCELLED if batch.state is BatchState.CANCELLING else EXPIRED
            return self._count(batch) or [self._close(code)]
        return [Write()] if self._written is None else [Save(self._ended(batch, self._written))]

    def _run(self, batch: Batch) -> list[Effect]:
        now = self._now
        if self._answered_len == self._total:
            return [self._finalize(batch, BatchState.COMPLETED)]
        if now >= batch.expires_at:
            return [self._finalize(batch, BatchState.EXPIRED)]
        if more := self._more():
            return [Offer(more, batch.expires_at - now)]
        return self._count(batch)

    def _finalize(self, batch: Batch, ending: BatchState) -> Save:
        state = BatchState.FINALIZING
        return Save(replace(batch, state=state, ending=ending, finalizing_at=self._now, tally=self._tally))

    def _more(self) -> tuple[int, ...]:
        """The next requests to offer."""
        while self._next < self._total and (self._answered[self._next] or self._next in self._offered):
            self._next += 1
        room = min(OFFER_LEN, OFFERED_LEN_MAX - len(self._offered))
        wanted = (
            i for i in range(self._next, self._total) if not self._answered[i] and i not in self._offered
        )
        return tuple(islice(wanted, room))

    def _count(self, batch: Batch) -> list[Effect]:
        if batch.tally == self._tally or self._now < self._tally_at + TALLY_INTERVAL_S:
            return []
        self._tally_at = self._now
        return [Save(replace(batch, tally=self._tally, total=self._total))]

    def _close(self, code: str) -> Close:
        """What waits before what may run: who runs may be done meanwhile."""
        waiting = (i for i in range(self._total) if not self._answered[i] and i not in self._offered)
        first = tuple(islice(waiting, CLOSE_LEN))
        running = () if len(first) == CLOSE_LEN else tuple(islice(self._offered, CLOSE_LEN - len(first)))
        return Close(first + running, code, running)

    def _refused(self, batch: Batch, problems: tuple[Problem, ...]) -> Batch:
        now = self._now
        if batch.state is BatchState.CANCELLING:
            return replace(batch, state=BatchState.CANCELLED, cancelled_at=now)
        return replace(batch, state=BatchState.FAILED, failed_at=now, problems=problems)

    def _ended(self, batch: Batch, written: Written) -> Batch:
        now = self._now
        done = replace(
            batch,
            total=self._total,
            tally=self._tally,
            output_file_id=written.output_file_id,
            error_file_id=written.error_file_id,
        )
        if batch.state is BatchState.CANCELLING:
            return replace(done, state=BatchState.CANCELLED, cancelled_at=now)
        if batch.ending is BatchState.EXPIRED:
            return replace(done, state=BatchState.EXPIRED, expired_at=now)
        return replace(done, state=BatchState.COMPLETED, completed_at=now)
