"""The broker under a seed: a seeded chance for its habits, and a note of every record it stores."""

import random
from collections.abc import Callable

from chassis import subjects
from chassis.bus import Appended, Headers, Message, Stored
from chassis.habits import Fate, Habits, Restart, Settle
from chassis.ids import Attempt, BootId, GatewayId, RequestId
from chassis.job_subjects import answer_of
from chassis.memory_broker import MemoryBroker
from chassis.memory_streams import MemoryStream
from chassis.messages import BadMessage
from chassis.messages.ownership import TakeoverAnswer, parse_to_batcher
from chassis.messages.request import (
    Cancel,
    Claim,
    Record,
    Terminal,
    parse_record,
    parse_request,
)
from tests.sim.options import Options

BEHIND_S = 0.2
TO_BATCHER = subjects.owner(BootId("x")).removesuffix("x")


class SimBroker(MemoryBroker):
    def __init__(
        self,
        habits: Habits,
        wall_ns: Callable[[], int],
        note: Callable[[str], None],
        fail: Callable[[str], None],
    ) -> None:
        super().__init__(habits, wall_ns)
        self._note = note
        self._fail = fail
        self.stored: dict[RequestId, None] = {}  # requests, ever
        self.granted: dict[tuple[GatewayId, RequestId], Attempt] = {}  # takeovers that gateways said yes to
        self.when_ended: Callable[[str], None] = lambda _: None  # told who wrote a terminal record
        self._requests = self.streams[subjects.REQUESTS]
        self._forget = self._requests.remove
        self._requests.remove = self._remove  # type: ignore[method-assign]
        self._jobs = self.streams[subjects.JOBS]
        self._forget_job = self._jobs.remove
        self._jobs.remove = self._remove_job  # type: ignore[method-assign]

    def publish(self, sender: str, message: Message) -> None:
        if message.subject.startswith(TO_BATCHER):
            match parse_to_batcher(message.data):
                case TakeoverAnswer(request_id, gateway, attempt, ids) if ids is not None:
                    self.granted[gateway, request_id] = attempt
        super().publish(sender, message)

    def _remove(self, seq: int) -> None:
        """A request's message goes only once its end is stored, or for a claim of another body."""
        message = self._requests.get(seq)
        assert message is not None
        said = subjects.parse_request(message.subject)
        assert said is not None
        record = self._last_record(said.request_id)
        other = isinstance(record, Claim) and record.body_digest != _body_digest(message.data)
        if not isinstance(record, Terminal) and not other:
            self._fail(f"{message.subject} is acknowledged before its end: {record}")
        self._forget(seq)

    def _remove_job(self, seq: int) -> None:
        """A job goes only once it has an answer."""
        message = self._jobs.get(seq)
        assert message is not None
        if self.streams[subjects.ANSWERS].last(answer_of(message.subject), self.now_s) is None:
            self._fail(f"{message.subject} is acknowledged before its answer")
        self._forget_job(seq)

    def _last_record(self, request_id: RequestId) -> Record | None:
        last = self.streams[subjects.RESULTS].last(subjects.result(request_id), self.now_s)
        return parse_record(last.data) if last is not None else None

    def is_over(self, request_id: RequestId) -> bool:
        """Its terminal record is stored."""
        return isinstance(self._last_record(request_id), Terminal)

    def _store(
        self,
        stream: MemoryStream,
        subject: str,
        data: bytes,
        headers: Headers,
        expected_seq: int | None,
        message_id: str | None,
    ) -> Appended:
        appended = super()._store(stream, subject, data, headers, expected_seq, message_id)
        if stream.layout.name in (subjects.JOBS, subjects.ANSWERS):
            self._note(f"{subject} {appended.seq} of {len(data)} bytes")
        elif stream.layout.name == subjects.RESULTS:
            self._note(f"{subject} {appended.seq}: {_told(data)}")
            if isinstance(record := parse_record(data), Terminal):
                self.when_ended(record.boot)
        elif (request := subjects.parse_request(subject)) is not None:
            self.stored[request.request_id] = None
        return appended

    def last(self, sender: str, stream: str, subject: str) -> Stored | None:
        """A reader may be behind what was stored just now, never behind older records."""
        assert isinstance(self.habits, SimHabits)
        newest = self.stream(stream).last(subject, self.now_s)
        fresh = newest is not None and self._wall_ns() - newest.stored_at_ns < BEHIND_S * 1e9
        behind = int(fresh and self.habits.unlucky(self.habits.options.stale_read))
        return self.stream(stream).last(subject, self.now_s, behind)

    def expire(self, prefix: str) -> None:
        """Registry entries end without a word to who watches, as at the end of their time to live."""
        stream = self.streams[subjects.REGISTRY]
        for stored in list(stream.messages()):
            if subjects.registry_key(stored.subject).startswith(prefix):
                stream.remove(stored.seq)


def _body_digest(data: bytes) -> bytes | None:
    """None of what is no request."""
    try:
        return parse_request(data).body_digest
    except BadMessage:
        return None


def _told(data: bytes) -> str:
    match parse_record(data):
        case Claim(attempt, boot, _, worker_deaths, batcher_deaths, left):
            return f"{'left' if left else 'claim'} {attempt} {boot} deaths {worker_deaths}+{batcher_deaths}"
        case Cancel(attempt, boot, reason):
            return f"cancel {attempt} {boot} {reason}"
        case Terminal(attempt, boot, reason, output_ids):
            return f"terminal {attempt} {boot} {reason.value} {len(output_ids)}"


class SimHabits(Habits):
    """Bad while `calm` is False; a perfect broker with delays after that."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.rng = random.Random(f"broker {options.seed}")
        self.calm = False

    def delay(self) -> float:
        return self.rng.random() * self.options.delay_s

    def unlucky(self, chance: float) -> bool:
        return not self.calm and chance > 0 and self.rng.random() < chance

    def core_delay_s(self, sender: str, receiver: str, subject: str) -> float | None:
        return None if self.unlucky(self.options.core_loss) else self.delay()

    def call(self, sender: str, what: str, subject: str) -> Fate:
        there, back = self.delay(), self.delay()
        if what in ("subscribe", "watch", "ensure"):
            return Fate(there, back)
        if self.unlucky(self.options.call_loss):
            return Fate(None, None)
        if what == "append":
            if self.unlucky(self.options.answer_loss):
                return Fate(there, None)
            if self.unlucky(self.options.late_write):
                return Fate(2.0 + 2.0 * self.rng.random(), back)
        return Fate(there, back)

    def settle_delay_s(self, sender: str, kind: Settle, subject: str) -> float | None:
        return None if self.unlucky(self.options.settle_loss) else self.delay()

    def honours(self, kind: Settle, subject: str, newest: bool) -> bool:
        return newest or self.calm or self.options.honours_old

    def ack_wait_s(self, consumer: str, subject: str, ack_wait_s: float) -> float:
        return 0.05 if self.unlucky(self.options.early_redelivery) else ack_wait_s

    def count(self, subject: str, count: int) -> int:
        return 1 if self.unlucky(self.options.early_redelivery) else count

    def watch_delay_s(self, receiver: str, key: str) -> float:
        return self.delay()

    def restart(self) -> Restart:
        one, two, three = (self.rng.random() < 0.5 for _ in range(3))
        return Restart(redelivers_all=one, forgets_counts=two, forgets_ids=three)

    def cut_notice_s(self, name: str) -> float:
        return self.rng.choice((0.5, 4.0))

    def survives_cut(self, name: str) -> bool:
        return self.rng.random() < 0.5
