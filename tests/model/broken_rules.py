"""Rules that look right and are not, and rules left out. Each must be caught, or nothing is checked.

They are subclasses of the real core and of the toy gateway: production code knows no switch.
"""

from dataclasses import dataclass, field

from batcher import events as e
from batcher.audience import Parts
from batcher.holding import State
from batcher.ownership import Ownership
from batcher.tenure import Tenure
from chassis.ids import AckToken, Attempt
from chassis.messages.chunk import Finish, Part
from chassis.messages.ownership import Refused
from chassis.messages.request import Cancel, Claim, Record, Terminal
from chassis.messages.sampling import TokenLogprobs
from tests.model.toy_gateway import ToyGateway


def core(tenure: type[Tenure]) -> type[Ownership]:
    return type("Broken", (Ownership,), {"tenure": tenure})


# ---- of the batcher ----------------------------------------------------------------------------------


@dataclass(slots=True)
class AcksBeforeTheRecord(Tenure):
    def _write_terminal(self) -> None:
        self.turn.out.append(e.Ack(self.token))
        Tenure._write_terminal(self)


@dataclass(slots=True)
class AcksBeforeItsReceipt(Tenure):
    def _settle_up(self, record: Terminal, leaves_as: str) -> None:
        self.turn.out.append(e.Ack(self.token))
        Tenure._settle_up(self, record, leaves_as)


@dataclass(slots=True)
class TakesAnUnknownReceiptForWritten(Tenure):
    def _on_receipt(self, outcome: e.Write) -> None:
        Tenure._on_receipt(self, e.Write.STORED)


@dataclass(slots=True)
class WritesNoReceiptOfAnothersEnd(Tenure):
    def _on_terminal(self, record: Terminal) -> None:
        if record.boot == self.turn.boot:
            Tenure._on_terminal(self, record)
        else:
            self.leave("ended elsewhere", ack=True)


@dataclass(slots=True)
class FinishesBeforeTheRecord(Tenure):
    def _write_terminal(self) -> None:
        Tenure._write_terminal(self)
        finish = Finish(self.id, self.attempt, len(self.ids), self.digest, self.why or list(State)[0])  # type: ignore[arg-type]
        for gateway in self.audience.next_index:
            self.turn.out.append(e.SendParts(gateway, (), (finish,)))


@dataclass(slots=True)
class SendsBeforeTheClaim(Tenure):
    def on_tokens(self, ids: tuple[int, ...], parts: Parts, told: TokenLogprobs | None = None) -> None:
        Tenure.on_tokens(self, ids, parts, told)
        if self.state is State.CLAIMING:
            self._send_parts()


@dataclass(slots=True)
class TakesUnknownForStored(Tenure):
    def on_write_done(self, event: e.WriteDone) -> None:
        if event.outcome is e.Write.UNKNOWN:
            event = e.WriteDone(
                event.now, event.request_id, event.call, e.Write.STORED, self.expected_seq + 1
            )
        Tenure.on_write_done(self, event)


@dataclass(slots=True)
class NeverAcksWhatEnded(Tenure):
    def _on_terminal(self, record: Terminal) -> None:
        self.leave("ended elsewhere")


@dataclass(slots=True)
class ClaimsWhatWasCancelled(Tenure):
    def _on_verified(self, record: Record | None, seq: int) -> None:
        if isinstance(record, Cancel):
            record = Claim(self.attempt, self.turn.boot)
            self.wanted = Attempt(self.attempt + 1)
        Tenure._on_verified(self, record, seq)


@dataclass(slots=True)
class GoesOnWhenFenced(Tenure):
    def _on_verified(self, record: Record | None, seq: int) -> None:
        if isinstance(record, Claim) and record.boot != self.turn.boot:
            record = Claim(Attempt(max(self.attempt, record.attempt)), self.turn.boot)
        Tenure._on_verified(self, record, seq)


@dataclass(slots=True)
class StartsFromThePromptAtTakeover(Tenure):
    def on_takeover_answered(self, event: e.TakeoverAnswered) -> None:
        if event.ids is not None:
            event = e.TakeoverAnswered(
                event.now, event.request_id, event.gateway, event.attempt, (), event.minimum
            )
        Tenure.on_takeover_answered(self, event)

    def on_heard(self, message: object, reply: int | None) -> None:
        if not isinstance(message, Refused):
            Tenure.on_heard(self, message, reply)  # type: ignore[arg-type]


@dataclass(slots=True)
class KeepsItsOutputOverALostClaim(Tenure):
    def lose_claim(self) -> None:
        self.claimed, self.attempt = False, Attempt(0)


@dataclass(slots=True)
class NeverTiresOfSilence(Tenure):
    def _on_state_timer(self) -> None:
        if self.state is State.ASKING:
            self._enter(State.ASKING, self.call)
        else:
            Tenure._on_state_timer(self)


@dataclass(slots=True)
class CountsWithoutAsking(Tenure):
    def on_time(self) -> None:
        self.audience.ask_at = None
        if (at := self.wake_at()) is not None and at <= self.turn.now:
            Tenure.on_time(self)


@dataclass(slots=True)
class LiftsItsAttempt(Tenure):
    """The draft: the gateway's last attempt + 1, without another claim."""

    def on_takeover_answered(self, event: e.TakeoverAnswered) -> None:
        if event.minimum is not None and self.state is State.TAKEOVER:
            self.attempt = Attempt(event.minimum + 1)
            self._ask_takeover()
        else:
            Tenure.on_takeover_answered(self, event)


@dataclass(slots=True)
class TakesSilenceForACancel(Tenure):
    def _window_ends(self, least_s: float) -> float:
        return self.turn.now


class FencedGoesOnAcking(Ownership):
    def handle(self, event: e.OwnershipEvent) -> list[e.OwnershipEffect]:
        before = {held.id: held.token for held in self._held.values()}
        out = super().handle(event)
        zombies: dict[str, AckToken] = self.__dict__.setdefault("zombies", {})
        for effect in out:
            if isinstance(effect, e.Closed) and effect.why in ("fenced", "owned elsewhere"):
                zombies[effect.request_id] = before[effect.request_id]
        if zombies and isinstance(event, e.Tick):
            out.append(e.Progress(tuple(zombies.values())))
        return out

    def next_timer(self) -> float | None:
        timer = super().next_timer()
        zombie = self._turn.now + 0.25 if self.__dict__.get("zombies") else None
        return min((t for t in (timer, zombie) if t is not None), default=None)


# ---- of the gateway ----------------------------------------------------------------------------------


class MinimumNotRaised(ToyGateway):
    def takeover_asked(self, attempt: int, boot: str) -> None:
        minimum = self.minimum
        super().takeover_asked(attempt, boot)
        self.minimum = minimum


class NoDigest(ToyGateway):
    def part(self, boot: str, part: Part) -> None:
        self.minimum = max(self.minimum, (part.attempt, boot))
        end = part.first_index + len(part.ids)
        if self.state == "open" and part.first_index <= len(self.ids) < end:
            self._pass_on(part.ids[len(self.ids) - part.first_index :])

    def finish(self, finish: Finish) -> None:
        if self.state == "open" and finish.length == len(self.ids):
            self._close(finish.reason.value)


class AttachesWithoutMinimum(ToyGateway):
    def read_done(self, record: Record | None, message: bool) -> None:
        attaching, before = self.state == "attaching", self.minimum
        super().read_done(record, message)
        if attaching and self.state == "open":
            self.minimum = before


class CancelsDespiteItsKey(ToyGateway):
    def published(self, how: str) -> None:
        super().published(how)
        if how == "timed out":
            self.cancel_at = self.world.now


class CountsTheWindowItself(ToyGateway):
    def client_gone(self) -> None:
        super().client_gone()
        self.cancel_at = self.world.now + self.world.window_s


@dataclass(frozen=True)
class Rule:
    """`faults`: words of the faults that show it soonest; none: any."""

    name: str
    fixed: dict[str, object] = field(default_factory=dict)
    faults: tuple[str, ...] = ()


DIFFER: dict[str, object] = {"same": False, "batchers": 2, "timeout_s": 0.0}

RULES = (
    Rule("acks before the record", {"core": core(AcksBeforeTheRecord)}),
    Rule("acks before the receipt", {"core": core(AcksBeforeItsReceipt)}),
    Rule(
        "takes an unknown receipt for written", {"core": core(TakesAnUnknownReceiptForWritten)}, ("receipt",)
    ),
    Rule(
        "writes no receipt of another's end",
        {"core": core(WritesNoReceiptOfAnothersEnd)},
        ("killed", "early", "stopped"),
    ),
    Rule("finishes before the record", {"core": core(FinishesBeforeTheRecord)}),
    Rule("sends before the claim is stored", {"core": core(SendsBeforeTheClaim)}),
    Rule("takes unknown for stored", {"core": core(TakesUnknownForStored)}, ("write",)),
    Rule("never acknowledges what ended", {"core": core(NeverAcksWhatEnded)}),
    Rule("claims what was cancelled", {"core": core(ClaimsWhatWasCancelled)}),
    Rule("starts from the prompt at takeover", {"core": core(StartsFromThePromptAtTakeover), "same": False}),
    Rule("keeps its output over a lost claim", {"core": core(KeepsItsOutputOverALostClaim)}),
    Rule("never tires of silence", {"core": core(NeverTiresOfSilence)}),
    Rule("claims without reading", {"fence": False}),
    Rule("goes on when fenced", {"core": core(GoesOnWhenFenced), **DIFFER}, ("stopped", "killed", "early")),
    Rule("minimum not raised", {"gateway": MinimumNotRaised, **DIFFER}, ("killed", "stopped")),
)
