"""Pure. Who is not let into the waiting room, or not left there, and what is told to who asked.

A queue that is full refuses at once; so does a deadline that cannot be met, with the estimate. Only what is
known refuses: while the pace is not measured yet everybody may try.
"""

from dataclasses import dataclass

from batcher.pace import Pace
from batcher.queueing import Queueing, TimeoutAction
from batcher.sequence import Sequence
from batcher.waiting import WaitingRoom
from chassis.messages.request import Reason

SURE = 1.25  # the estimate must miss the deadline by so much
RETRY_MIN_MS = 100


@dataclass(frozen=True, slots=True)
class Refusal:
    reason: Reason
    why: str
    retry_ms: int = 0  # when a retry may help; 0: not said


class Door:
    def __init__(self, queueing: Queueing, waiting: WaitingRoom, pace: Pace) -> None:
        self._queueing = queueing
        self._waiting = waiting
        self._pace = pace

    def full(self, priority: int) -> bool:
        """No more of a priority may wait."""
        bound = self._queueing.of(priority).max_queue_size
        return bound > 0 and self._waiting.at(self._queueing.level(priority)) >= bound

    def refuses(self, sequence: Sequence, now: float) -> Refusal | None:
        """A fresh one that is not in the room yet."""
        level = sequence.place.level
        if self.full(sequence.request.priority):
            bound = self._queueing.of(sequence.request.priority).max_queue_size
            why = f"the queue of priority {level} is full: {bound} requests wait"
            return Refusal(Reason.REFUSED, why, self._retry_ms(self._pace.wait_s(sequence.place.charge)))
        return self._too_late(sequence, now)

    def _too_late(self, sequence: Sequence, now: float) -> Refusal | None:
        if sequence.deadline is None or not self._queueing.refuse_late or not len(self._waiting):
            return None
        wait_s = self._pace.wait_s(self._waiting.work_ahead(sequence))
        if wait_s is None:
            return None
        limits = sequence.request.limits
        endless = limits.ignore_eos and not limits.stop and not limits.stop_token_ids
        least = limits.max_tokens if endless else max(1, limits.min_tokens)
        needs_s = wait_s + self._pace.service_s(sequence.prompt_len, least)
        left_s = sequence.deadline - now
        if needs_s <= SURE * left_s:
            return None
        why = f"its deadline in {left_s:.1f} s cannot be met: it would take about {needs_s:.1f} s"
        return Refusal(Reason.DEADLINE, why, self._retry_ms(needs_s - left_s))

    def timed_out(self, sequence: Sequence) -> Refusal | None:
        """It waited longer than its policy allows. None: it goes behind the others."""
        if self._queueing.of(sequence.request.priority).timeout_action is TimeoutAction.DELAY:
            return None
        return Refusal(Reason.REFUSED, "it waited in the queue for longer than it may", RETRY_MIN_MS)

    @staticmethod
    def _retry_ms(seconds: float | None) -> int:
        return max(RETRY_MIN_MS, round(1000 * seconds)) if seconds is not None else RETRY_MIN_MS
