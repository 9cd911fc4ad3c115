"""Drives one `Ownership` by hand: gives it events, remembers what it asked for, checks it after each."""

from typing import TypeVar

from batcher import events as e
from batcher.ownership import Ownership, OwnershipConfig, State
from chassis.ids import AckToken, Attempt, BootId, GatewayId, RequestId
from chassis.messages.chunk import Finish, Part
from chassis.messages.ownership import Attach, CancelAsk, Detached, Refused
from chassis.messages.request import (
    Claim,
    Limits,
    Reason,
    Record,
    Request,
    Sampling,
    Timings,
    Usage,
)

ME, OTHER = BootId("me"), BootId("other")
R = RequestId("r1")
G, H = GatewayId("g"), GatewayId("h")
E = TypeVar("E")


def request(
    request_id: str = R,
    timeout_ms: int = 0,
    resume_window_ms: int = 0,
    gateway: str = G,
    max_tokens: int = 64,
    stream_interval: int = 0,
) -> Request:
    return Request(
        id=RequestId(request_id),
        tenant="t",
        gateway=GatewayId(gateway),
        model="fake",
        prompt_ids=(1, 2, 3),
        seed=7,
        sampling=Sampling(),
        limits=Limits(max_tokens=max_tokens),
        timeout_ms=timeout_ms,
        resume_window_ms=resume_window_ms,
        body_digest=b"body",
        stream_interval=stream_interval,
    )


class Rig:
    def __init__(self, config: OwnershipConfig | None = None, boot: BootId = ME, **fields: object) -> None:
        self.core = Ownership(boot, config)
        self.boot = boot
        self.now = 100.0
        self.request = request(**fields)  # type: ignore[arg-type]
        self.out: list[e.OwnershipEffect] = []
        self.seen: list[e.OwnershipEffect] = []
        self.calls: dict[type, int] = {}
        self.seq = 0
        self.tokens = 0
        self.read_at = 0.0

    # ---- events ------------------------------------------------------------------------------------

    def do(self, event: e.OwnershipEvent) -> list[e.OwnershipEffect]:
        self.out = self.core.handle(event)
        self.core.check()
        self.seen += self.out
        for effect in self.out:
            if isinstance(effect, e.Append | e.WriteReceipt | e.ReadLast | e.AskOwner):
                self.calls[type(effect)] = effect.call
            if isinstance(effect, e.ReadLast):
                self.read_at = self.now
        return self.out

    def deliver(self, count: int = 1, age_s: float = 0.5, request: Request | None = None) -> None:
        self.tokens += 1
        token = AckToken(f"t{self.tokens}")
        self.do(e.Delivered(self.now, request or self.request, token, count, age_s))

    def wait(self, seconds: float) -> list[e.OwnershipEffect]:
        """Ticks whenever the core wants one; returns all effects."""
        end, effects = self.now + seconds, []
        while (at := self.core.next_timer()) is not None and at <= end:
            self.now = max(self.now, at)
            effects += self.do(e.Tick(self.now))
        self.now = end
        return effects

    def admit(self) -> None:
        self.do(e.Admitted(self.now, R))

    def stored(self) -> None:
        self.seq += 1
        self.do(e.WriteDone(self.now, R, self.calls[e.Append], e.Write.STORED, self.seq))

    def receipt(self, outcome: e.Write = e.Write.STORED) -> None:
        self.do(e.WriteDone(self.now, R, self.calls[e.WriteReceipt], outcome, 0))

    def refused(self, outcome: e.Write = e.Write.REFUSED) -> None:
        self.do(e.WriteDone(self.now, R, self.calls[e.Append], outcome, 0))

    def read(self, record: Record | None) -> None:
        """The read finds `record` as a new last one (or none)."""
        self.seq = 0 if record is None else self.seq + 1
        self.read_same(record)

    def read_same(self, record: Record | None, failed: bool = False) -> None:
        self.do(e.ReadDone(self.now, R, self.calls[e.ReadLast], record, self.seq, failed))

    def answer(self, mine: bool, answered: bool = False) -> None:
        self.do(e.OwnerAnswered(self.now, R, self.calls[e.AskOwner], mine, answered))

    def make(self, *ids: int) -> None:
        self.do(e.TokensMade(self.now, (R,), (ids,)))

    def end(self, *ids: int, reason: Reason = Reason.STOP, byte_cut: int | None = None) -> None:
        usage, timings = Usage(3, 1, len(ids)), Timings(decode_us=5)
        self.do(e.Ended(self.now, R, reason, ids, byte_cut, usage, timings))

    def yes(self, *ids: int, gateway: GatewayId = G) -> None:
        self.do(e.TakeoverAnswered(self.now, R, gateway, self.asked().attempt, ids, None))

    def no(self, minimum: int) -> None:
        self.do(e.TakeoverAnswered(self.now, R, G, self.asked().attempt, None, Attempt(minimum)))

    def hear(self, message: Attach | CancelAsk | Detached | Refused, reply: int | None = None) -> None:
        self.do(e.Heard(self.now, message, reply))

    def attach(self, *held: int, gateway: GatewayId = H, attempt: int = 1) -> None:
        self.hear(Attach(R, Attempt(attempt), gateway, held), reply=9)

    def cancel(self) -> None:
        self.hear(CancelAsk(R, "client"))

    def owner_asked(self, attempt: int = 1, cancelled: bool = False) -> None:
        self.tokens += 1
        self.do(e.OwnerAsked(self.now, R, Attempt(attempt), AckToken(f"t{self.tokens}"), cancelled, 5))

    # ---- ways into each state ----------------------------------------------------------------------

    def waiting(self) -> "Rig":
        self.deliver()
        return self

    def reading(self) -> "Rig":
        self.deliver(count=2)
        return self

    def asking(self, record: Record | None = None) -> "Rig":
        self.reading().read(record or Claim(Attempt(1), OTHER))
        return self

    def claiming(self) -> "Rig":
        self.waiting().admit()
        return self

    def reclaiming(self) -> "Rig":
        self.asking().answer(mine=False, answered=True)
        return self

    def takeover(self) -> "Rig":
        """At attempt 2, after attempt 1 of another boot."""
        self.reclaiming().stored()
        return self

    def running(self, *ids: int) -> "Rig":
        self.claiming().stored()
        if ids:
            self.make(*ids)
        return self

    def verifying(self, *ids: int) -> "Rig":
        self.running(*ids).deliver(count=2)
        return self

    def writing(self, *ids: int) -> "Rig":
        self.running(*ids).end(*ids)
        return self

    def finishing(self, *ids: int) -> "Rig":
        self.writing(*ids).stored()
        return self

    def writing_unclaimed(self) -> "Rig":
        self.waiting().cancel()
        return self

    def leaving(self, *ids: int) -> "Rig":
        self.running(*ids).do(e.Drain(self.now))
        return self

    # ---- what it wanted ----------------------------------------------------------------------------

    @property
    def state(self) -> State:
        return self.core.state(R)

    def at(self, state: State) -> bool:
        return self.state is state

    def of(self, kind: type[E]) -> list[E]:
        """Effects of this kind of the last event."""
        return [effect for effect in self.out if isinstance(effect, kind)]

    def one(self, kind: type[E]) -> E:
        (effect,) = self.of(kind)
        return effect

    def asked(self) -> e.AskTakeover:
        return [effect for effect in self.seen if isinstance(effect, e.AskTakeover)][-1]

    def parts(self, gateway: GatewayId = G) -> list[Part]:
        return [p for s in self.of(e.SendParts) if s.gateway == gateway for p in s.parts]

    def finishes(self, gateway: GatewayId = G) -> list[Finish]:
        return [f for s in self.of(e.SendParts) if s.gateway == gateway for f in s.finishes]

    def dropped(self) -> bool:
        """The last event had no row: nothing but a count came of it."""
        return [type(effect) for effect in self.out] == [e.Count]
