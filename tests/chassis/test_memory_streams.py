"""The in-memory stream against the few things that the ownership protocol must be able to rely on."""

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from chassis.errors import StreamFull, SubjectTaken, WrongSequence
from chassis.memory_streams import MemoryConsumer, MemoryStream
from chassis.stream_layout import ConsumerLayout, Discard
from chassis.subjects import LAYOUT, RESULTS

REQUESTS_LAYOUT = replace(LAYOUT[0], msgs_max=4, duplicate_window_s=5.0)
NAMES = st.sampled_from([f"shoal.req.m.5.{n}" for n in "abcdef"])


class WorkQueue(RuleBasedStateMachine):
    """A model of what is stored: a message goes only when it is acknowledged."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.stream = MemoryStream(REQUESTS_LAYOUT)
        self.consumer = MemoryConsumer(ConsumerLayout("REQUESTS", "c", "shoal.req.m.5.*"), self.stream)
        self.stream.consumers["c"] = self.consumer
        self.stored: dict[str, int] = {}
        self.ids: dict[str, tuple[int, float]] = {}
        self.due_s: dict[int, float] = {}  # of what somebody holds
        self.counts: dict[int, int] = {}
        self.delivered: set[int] = set()
        self.last_seq = 0

    @rule(name=NAMES, use_id=st.booleans())
    def append(self, name: str, use_id: bool) -> None:
        message_id = name if use_id else None
        try:
            got = self.stream.append(name, b"x", {}, None, message_id, self.now_s, 0)
        except SubjectTaken:
            assert name in self.stored
            return
        except StreamFull:
            assert name not in self.stored and len(self.stored) == 4
            return
        known = self.ids.get(name)
        if use_id and known is not None and known[1] > self.now_s:
            assert got.duplicate and got.seq == known[0]
            return
        assert not got.duplicate and got.seq == self.last_seq + 1
        assert name not in self.stored and len(self.stored) < 4
        self.last_seq = got.seq
        self.stored[name] = got.seq
        if use_id:
            self.ids[name] = (got.seq, self.now_s + 5.0)

    @rule()
    def give(self) -> None:
        given = self.consumer.give(self.now_s, 1.0)
        if given is None:
            assert all(self.due_s.get(seq, -1) >= 0 for seq in self.stored.values())
            return
        seq = given.message.seq
        assert self.stored[given.message.subject] == seq
        assert seq not in self.due_s
        self.counts[seq] = self.counts.get(seq, 0) + 1
        assert given.count == self.counts[seq]
        self.due_s[seq] = self.now_s + 1.0
        self.delivered.add(seq)

    @rule(seconds=st.sampled_from([0.3, 0.7, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        for seq, due_s in list(self.due_s.items()):
            taken = self.consumer.take_back(seq, self.now_s)
            assert taken == (due_s <= self.now_s + 1e-6)
            if taken:
                del self.due_s[seq]

    @precondition(lambda self: self.stored)
    @rule(data=st.data())
    def progress(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.stored.values())))
        self.consumer.progress(seq, self.now_s + 1.0)
        if seq in self.due_s:
            self.due_s[seq] = self.now_s + 1.0

    @precondition(lambda self: self.stored)
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.stored)))
        seq = self.stored[name]
        self.consumer.ack(seq)
        if seq in self.delivered:  # it was delivered once: an old token counts too
            del self.stored[name]
            self.due_s.pop(seq, None)

    @rule(forget_counts=st.booleans())
    def broker_restarts(self, forget_counts: bool) -> None:
        self.consumer.take_back_all(forget_counts=forget_counts)
        if forget_counts:
            for seq in self.due_s:
                self.counts[seq] -= 1
        self.due_s.clear()

    @invariant()
    def holds(self) -> None:
        self.stream.check()
        assert {m.subject: m.seq for m in self.stream.messages()} == self.stored
        assert sorted(self.consumer.held()) == sorted(self.due_s)


class Log(RuleBasedStateMachine):
    """A conditional write is taken exactly if it names the subject's last sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = MemoryStream(replace(LAYOUT[1], msgs_max=0, age_max_s=10.0))
        self.last: dict[str, int] = {}
        self.at_s: dict[str, float] = {}
        self.now_s = 0.0
        self.taken: set[int] = set()

    @rule(name=st.sampled_from(["shoal.res.a", "shoal.res.b"]), expected=st.integers(0, 8) | st.none())
    def append(self, name: str, expected: int | None) -> None:
        last = self.last.get(name, 0) if self.at_s.get(name, -99.0) + 10.0 > self.now_s else 0
        if expected is not None and expected > 4:
            expected = last
        try:
            seq = self.stream.append(name, b"", {}, expected, None, self.now_s, 0).seq
        except WrongSequence:
            assert expected is not None and expected != last
            return
        assert expected in (None, last)
        assert seq not in self.taken
        self.taken.add(seq)
        self.last[name], self.at_s[name] = seq, self.now_s
        stored = self.stream.last(name, self.now_s)
        assert stored is not None and stored.seq == seq

    @rule()
    def wait(self) -> None:
        self.now_s += 4.0

    @invariant()
    def holds(self) -> None:
        self.stream.check()


limits = settings(deadline=None, derandomize=True, max_examples=25, stateful_step_count=30)
TestWorkQueue = WorkQueue.TestCase
TestWorkQueue.settings = limits
TestLog = Log.TestCase
TestLog.settings = limits


def test_old_is_discarded_where_the_layout_says_so() -> None:
    layout = replace(LAYOUT[1], name="OLD", discard=Discard.OLD, msgs_max=2, bytes_max=10)
    stream = MemoryStream(layout)
    for i in range(3):
        stream.append(f"shoal.res.{i}", b"1234", {}, None, None, 0.0, 0)
    assert [m.seq for m in stream.messages()] == [2, 3]
    stream.append("shoal.res.3", b"12345678", {}, None, None, 0.0, 0)
    assert [m.seq for m in stream.messages()] == [4]
    stream.check()


def test_a_stale_reader_sees_what_was() -> None:
    stream = MemoryStream(next(s for s in LAYOUT if s.name == RESULTS))
    for data in (b"1", b"2"):
        stream.append("shoal.res.a", data, {}, None, None, 0.0, 0)
    read = [stream.last("shoal.res.a", 0.0, behind) for behind in range(3)]
    assert [m.data if m else None for m in read] == [b"2", b"1", None]
