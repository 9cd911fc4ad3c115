"""Random lives of streams: whatever comes in whatever order, each index is told once, and one end.

Owners here may lie about everything but their texts' digests, and so may the log.
"""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from chassis.ids import Attempt, BootId
from chassis.messages.chunk import Chunk, Finish, Part, extend_digest
from chassis.messages.ownership import AttachKind, TakeoverAnswer, TakeoverQuestion
from chassis.messages.request import Cancel, Claim, Reason, Terminal
from gateway.events import (
    Accept,
    AskOwner,
    AttachAnswered,
    CancelWanted,
    CancelWritten,
    ChunkArrived,
    ClientGone,
    Effect,
    End,
    Event,
    Fail,
    LetGo,
    MessageRead,
    Pass,
    Publish,
    Published,
    PublishRequest,
    ReadMessage,
    ReadRecord,
    RecordRead,
    Resume,
    Submit,
    TakeoverAsked,
    Tell,
    Tick,
    Write,
    WriteCancel,
)
from gateway.stream import State
from gateway.streams import Streams
from tests.gateway.test_streams import DIGEST, KEYED, LASTING, PLAIN, G, R

BOOTS = (BootId("a"), BootId("b"), BootId("c"))
TEXTS = ((1, 2, 3, 4, 5, 6), (1, 2, 3, 9, 9, 9), (8, 8, 8, 8, 8, 8))


class Life:
    """Feeds one core at random and watches what every client is told."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.core = Streams(G)
        self.now = 0.0
        self.pending: list[Effect] = []
        self.told: dict[int, list[int]] = {}
        self.base: dict[int, int] = {}
        self.over: set[int] = set()
        self.gone: set[int] = set()
        self.accepted: set[int] = set()
        self.client = 0
        self.minimum = 0
        self.attempts = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.feed(self.draw())
        self.feed(LetGo(self.now))
        assert not len(self.core)
        assert set(self.told) - self.gone <= self.over, "a client waits for ever"

    def feed(self, event: Event) -> None:
        for effect in self.core.handle(event):
            self.watch(effect)
        self.core.check()
        stream = self.core._table.streams.get(R)
        if stream is None:
            self.minimum = 0  # who comes next starts from the record
        elif stream.state is State.OPEN:
            assert stream.min_attempt >= self.minimum
            self.minimum = stream.min_attempt

    def watch(self, effect: Effect) -> None:
        match effect:
            case Accept(client):
                assert client not in self.over and client not in self.accepted
                self.accepted.add(client)
            case Pass(client, first_index, ids):
                assert client in self.accepted and client not in self.over and ids
                assert first_index == self.base[client] + len(self.told[client]), "an index missing or twice"
                self.told[client] += ids
            case End(client):
                assert client in self.accepted and client not in self.over
                self.over.add(client)
            case Fail(client):
                assert client not in self.over
                self.over.add(client)
            case Tell(message=TakeoverAnswer(attempt=attempt, ids=ids)) if ids is not None:
                assert attempt >= self.minimum, "an older owner was let in"
            case PublishRequest() | ReadRecord() | ReadMessage() | AskOwner() | WriteCancel():
                self.pending.append(effect)
            case _:
                pass

    def draw(self) -> Event:
        rng = self.rng
        self.now += rng.choice((0.0, 0.01, 0.3, 2.0))
        kind = rng.random()
        if self.pending and kind < 0.45:
            return self.complete(self.pending.pop(rng.randrange(len(self.pending))))
        if kind < 0.75:
            return self.chunk()
        if kind < 0.82:
            return TakeoverAsked(self.now, TakeoverQuestion(R, self.attempt(), rng.choice(BOOTS)))
        if kind < 0.90:
            return Tick(self.now)
        if kind < 0.92:
            gone = rng.randint(1, self.client + 1)
            self.gone.add(gone)
            return ClientGone(self.now, gone, R)
        if kind < 0.93:
            return CancelWanted(self.now, R, "t", 1)
        self.client += 1
        self.told[self.client], self.base[self.client] = [], 0
        if rng.random() < 0.5:
            return Submit(self.now, self.client, rng.choice((PLAIN, KEYED, LASTING)))
        held = rng.choice(TEXTS)[: rng.randint(0, 4)]
        self.base[self.client] = len(held)
        return Resume(self.now, self.client, R, "t", held)

    def attempt(self) -> Attempt:
        return Attempt(self.rng.randint(1, 4))

    def chunk(self) -> Event:
        rng = self.rng
        text = rng.choice(TEXTS)[: rng.randint(1, 6)]
        first = rng.randint(0, len(text))
        part = Part(R, self.attempt(), first, text[first:], extend_digest(0, text))
        finish = Finish(R, self.attempt(), len(text), extend_digest(0, text), rng.choice(list(Reason)))
        finishes = (finish,) if rng.random() < 0.1 else ()
        return ChunkArrived(self.now, Chunk(rng.choice(BOOTS), rng.randint(1, 9), (part,), finishes))

    def complete(self, effect: Effect) -> Event:
        rng, now = self.rng, self.now
        match effect:
            case PublishRequest(call, request):
                return Published(now, request.id, call, rng.choice(list(Publish)))
            case ReadRecord(request_id, call):
                boot, reason = rng.choice(BOOTS), rng.choice(list(Reason))
                text = rng.choice(TEXTS)[: rng.randint(0, 6)]
                record = rng.choice(
                    (
                        None,
                        Claim(self.attempt(), boot, DIGEST),
                        Cancel(self.attempt(), boot, "x"),
                        Cancel(Attempt(0), BootId(""), "x"),
                        Terminal(self.attempt(), boot, reason, text, tenant="t", model="m"),
                    )
                )
                failed = rng.random() < 0.1
                return RecordRead(now, request_id, call, None if failed else record, 1, failed)
            case ReadMessage(request_id, call):
                found = rng.choice((None, PLAIN, LASTING))
                return MessageRead(now, request_id, call, found, 0.0, 100, rng.random() < 0.1)
            case AskOwner(request_id, call):
                return AttachAnswered(now, request_id, call, rng.choice((None, *AttachKind)))
            case WriteCancel(request_id, call):
                return CancelWritten(now, request_id, call, rng.choice(list(Write)))
            case _:
                raise AssertionError(effect)


@given(st.integers(0, 1 << 32))
@settings(deadline=None, derandomize=True, max_examples=150)
def test_each_index_once_in_order_and_one_end(seed: int) -> None:
    Life(seed).run(120)


def test_timers_never_spin_and_never_sleep_for_ever() -> None:
    """While a stream is open something will wake it; a tick at that time moves the timer on."""
    for seed in range(100):
        life = Life(seed)
        for _ in range(60):
            life.feed(life.draw())
            timer = life.core.next_timer()
            waits = any(s.state is not State.PUBLISHING for s in life.core._table.streams.values())
            in_flight = life.pending
            assert timer is not None or not waits or in_flight
            if timer is not None and timer <= life.now:
                life.feed(Tick(life.now))
                later = life.core.next_timer()
                assert later is None or later > life.now
