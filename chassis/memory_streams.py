"""Pure. Streams and durable consumers in memory, with the semantics of a JetStream broker.

Rules: sequences are the stream's and are never used twice; a conditional write is taken only if it names
the subject's last sequence; a work queue forgets a message only for an acknowledgement. Order is that of
sequences, never of a set. Time comes with the call. What is first in order is found at once, however many
went before it: a plain dict would walk over the places of those that are gone.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from chassis.bus import Appended, Headers, Lag, Stored
from chassis.errors import StreamFull, SubjectTaken, WrongSequence
from chassis.stream_layout import ConsumerLayout, Discard, Retention, StreamLayout
from chassis.subjects import is_pattern, matches

CLOCK_GRAIN_S = 1e-6
IDS_LEN_MAX = 1 << 16  # message ids that a stream remembers, and no more than
IDS_PER_MSG = 4  # so many times what it may hold: beyond it the oldest are forgotten early


@dataclass(frozen=True, slots=True)
class _Known:
    """A message id that the stream remembers."""

    message_id: str
    seq: int
    until_s: float


def _nothing(subject: str) -> bool:
    return False


class MemoryStream:
    """`pinned`: which subjects a full stream must not forget to make room; there is no such thing on disk."""

    def __init__(self, layout: StreamLayout) -> None:
        self.layout = layout
        self.last_seq = 0
        self.consumers: dict[str, MemoryConsumer] = {}
        self.pinned: Callable[[str], bool] = _nothing
        self._messages: OrderedDict[int, Stored] = OrderedDict()  # in order of sequence
        self._subjects: dict[str, list[int]] = {}
        self._appended_s: dict[int, float] = {}
        self._bytes = 0
        self._ids: OrderedDict[str, _Known] = OrderedDict()  # in order of time
        self._ids_len_max = min(IDS_LEN_MAX, IDS_PER_MSG * layout.msgs_max or IDS_LEN_MAX)
        self._patterns = [(_literal(pattern), pattern) for pattern in layout.subjects]

    def takes(self, subject: str) -> bool:
        return any(subject.startswith(first) and matches(p, subject) for first, p in self._patterns)

    def holds(self, subject: str) -> bool:
        """Whether a message of just this subject is stored."""
        return subject in self._subjects

    def append(
        self,
        subject: str,
        data: bytes,
        headers: Headers,
        expected_seq: int | None,
        message_id: str | None,
        now_s: float,
        wall_ns: int,
    ) -> Appended:
        """Raises WrongSequence, SubjectTaken, StreamFull."""
        self.expire(now_s)
        if message_id is not None and (known := self._ids.get(message_id)) is not None:
            return Appended(known.seq, duplicate=True)
        seqs = self._subjects.get(subject)
        subject_seq = seqs[-1] if seqs else 0
        if expected_seq is not None and expected_seq != subject_seq:
            raise WrongSequence(f"{subject}: last is {subject_seq}, expected {expected_seq}")
        self._make_room(subject, len(data))
        self.last_seq += 1
        seq = self.last_seq
        self._messages[seq] = Stored(subject, data, seq, wall_ns, headers)
        self._appended_s[seq] = now_s
        self._subjects.setdefault(subject, []).append(seq)
        self._bytes += len(data)
        if message_id is not None and self.layout.duplicate_window_s > 0:
            self._ids[message_id] = _Known(message_id, seq, now_s + self.layout.duplicate_window_s)
            if len(self._ids) > self._ids_len_max:
                self._ids.popitem(last=False)
        for consumer in self.consumers.values():
            consumer.offer(seq, subject)
        return Appended(seq, duplicate=False)

    def _make_room(self, subject: str, size: int) -> None:
        layout = self.layout
        held = self._subjects.get(subject)
        replaced: Stored | None = None
        if held and 0 < layout.msgs_per_subject_max <= len(held):
            if layout.discard_new_per_subject:
                raise SubjectTaken(subject)
            replaced = self._messages[held[0]]
        if layout.bytes_max and size > layout.bytes_max:
            raise StreamFull(f"{layout.name}: {size} bytes")
        if layout.discard is Discard.NEW and self._is_full(size, replaced):
            raise StreamFull(layout.name)
        if replaced is not None:  # only now: a refused one leaves what there was
            self.remove(replaced.seq)
        while self._is_full(size):
            oldest = next((m.seq for m in self._messages.values() if not self.pinned(m.subject)), None)
            if oldest is None:
                raise StreamFull(f"{layout.name}: it may forget nothing of what it holds")
            self.remove(oldest)

    def _is_full(self, size: int, replaced: Stored | None = None) -> bool:
        """For one more of `size` bytes, without the one that it would replace."""
        msgs, held_bytes = len(self._messages), self._bytes
        if replaced is not None:
            msgs, held_bytes = msgs - 1, held_bytes - len(replaced.data)
        by_count = 0 < self.layout.msgs_max <= msgs
        return by_count or 0 < self.layout.bytes_max < held_bytes + size

    @property
    def num_bytes(self) -> int:
        return self._bytes

    def get(self, seq: int) -> Stored | None:
        return self._messages.get(seq)

    def last(self, subject: str, now_s: float, records_behind: int = 0) -> Stored | None:
        """The newest message of a subject (wildcards allowed), or one that a stale reader would see."""
        self.expire(now_s)
        if is_pattern(subject):
            seqs = sorted(s for name, held in self._subjects.items() if matches(subject, name) for s in held)
        else:
            seqs = self._subjects.get(subject, [])
        return self._messages[seqs[-1 - records_behind]] if len(seqs) > records_behind else None

    def read(self, subject: str, start_seq: int, count_max: int, now_s: float) -> list[Stored]:
        self.expire(now_s)
        return self._matching(subject, start_seq, count_max)

    def _matching(self, subject: str, start_seq: int, count_max: int) -> list[Stored]:
        if not is_pattern(subject):
            seqs = self._subjects.get(subject, [])
            first = bisect_left(seqs, start_seq)
            return [self._messages[seq] for seq in seqs[first : first + count_max]]
        found: list[Stored] = []
        for message in self._messages.values():
            if len(found) == count_max:
                break
            if message.seq >= start_seq and matches(subject, message.subject):
                found.append(message)
        return found

    def purge(self, subject: str) -> None:
        for message in self._matching(subject, 1, len(self._messages)):
            self.remove(message.seq)

    def remove(self, seq: int) -> None:
        message = self._messages.pop(seq)
        del self._appended_s[seq]
        self._bytes -= len(message.data)
        held = self._subjects[message.subject]
        held.remove(seq)
        if not held:
            del self._subjects[message.subject]
        for consumer in self.consumers.values():
            consumer.forget(seq)

    def expire(self, now_s: float) -> None:
        if self.layout.age_max_s:
            while self._messages:
                oldest = next(iter(self._messages))
                if self._appended_s[oldest] + self.layout.age_max_s > now_s:
                    break
                self.remove(oldest)
        while self._ids:
            known = next(iter(self._ids.values()))
            if known.until_s > now_s:
                break
            del self._ids[known.message_id]

    def forget_ids(self) -> None:
        """What a broker may do when it restarts."""
        self._ids.clear()

    def messages(self) -> Iterator[Stored]:
        return iter(self._messages.values())

    def check(self) -> None:
        """Invariants."""
        assert list(self._messages) == sorted(self._messages)
        assert list(self._messages) == list(self._appended_s)
        assert sorted(s for held in self._subjects.values() for s in held) == list(self._messages)
        assert self._bytes == sum(len(m.data) for m in self._messages.values())
        if self.layout.msgs_per_subject_max:
            assert all(len(h) <= self.layout.msgs_per_subject_max for h in self._subjects.values())
        for consumer in self.consumers.values():
            consumer.check()


def _literal(pattern: str) -> str:
    """What every subject of a pattern begins with."""
    return pattern.partition("*")[0].partition(">")[0]


@dataclass(slots=True)
class _Held:
    """A message that somebody has. `due_s`: when it is given to someone else."""

    count: int
    serial: int  # of its last delivery
    due_s: float


@dataclass(frozen=True, slots=True)
class Given:
    message: Stored
    count: int
    serial: int
    due_s: float


class MemoryConsumer:
    """Gives each message to one at a time, again after `ack_wait_s`, until it is acknowledged."""

    def __init__(self, layout: ConsumerLayout, stream: MemoryStream) -> None:
        self.layout = layout
        self.serial = 0  # of deliveries
        self._stream = stream
        self._fresh: OrderedDict[int, None] = OrderedDict()  # given to nobody yet
        self._again: OrderedDict[int, None] = OrderedDict()  # held messages whose holder lost them, in order
        self._held: dict[int, _Held] = {}
        for message in stream.messages():
            self.offer(message.seq, message.subject)

    def offer(self, seq: int, subject: str) -> None:
        if matches(self.layout.filter, subject):
            self._fresh[seq] = None

    def forget(self, seq: int) -> None:
        """The stream no longer has it."""
        self._held.pop(seq, None)
        self._again.pop(seq, None)
        self._fresh.pop(seq, None)

    def give(self, now_s: float, ack_wait_s: float) -> Given | None:
        """The next message, if any: those to be delivered again come first."""
        if self._again:
            seq, _ = self._again.popitem(last=False)
            held = self._held[seq]
            held.count += 1
        else:
            if not self._fresh or len(self._held) >= self.layout.ack_pending_max:
                return None
            seq, _ = self._fresh.popitem(last=False)
            held = self._held[seq] = _Held(count=1, serial=0, due_s=0.0)
        held.due_s = now_s + ack_wait_s
        self.serial += 1
        held.serial = self.serial
        message = self._stream.get(seq)
        assert message is not None
        return Given(message, held.count, held.serial, held.due_s)

    @property
    def has_any(self) -> bool:
        return bool(self._again or self._fresh)

    @property
    def lag(self) -> Lag:
        return Lag(len(self._fresh), len(self._held))

    def due_s(self, seq: int) -> float | None:
        """When a held message will be given again; None if it is not held, or waits already."""
        held = self._held.get(seq)
        return None if held is None or seq in self._again else held.due_s

    def ack(self, seq: int) -> None:
        if seq not in self._held:
            return
        self.forget(seq)
        if self._stream.layout.retention is Retention.WORK_QUEUE:
            self._stream.remove(seq)

    def progress(self, seq: int, until_s: float) -> None:
        held = self._held.get(seq)
        if held is not None and seq not in self._again:
            held.due_s = until_s

    def take_back(self, seq: int, now_s: float) -> bool:
        """Gives a held message to the next who asks, if its time is over."""
        due_s = self.due_s(seq)
        if due_s is None or due_s > now_s + CLOCK_GRAIN_S:
            return False
        self._again[seq] = None
        return True

    def take_back_all(self, *, forget_counts: bool) -> None:
        for seq in sorted(self.held()):
            self._again[seq] = None
            if forget_counts:
                self._held[seq].count -= 1

    def held(self) -> list[int]:
        return [seq for seq in self._held if seq not in self._again]

    def last_serial(self, seq: int) -> int | None:
        """Which delivery is the message's newest; None when nobody holds it."""
        held = self._held.get(seq)
        return None if held is None else held.serial

    def check(self) -> None:
        assert all(seq in self._held for seq in self._again)
        assert all(self._stream.get(seq) is not None for seq in self._fresh)
        assert all(self._stream.get(seq) is not None for seq in self._held)
        assert len(self._held) <= self.layout.ack_pending_max
