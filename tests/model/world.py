"""The real `Ownership` of two batchers in a world of toys: broker, schedulers, two gateways, one client.

Whatever is in flight may arrive in any order; time passes only when somebody lets it. `actions` lists
what may happen next, `apply` does it and checks the invariants S1 to S8; `settle` lets a fair end come.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from batcher import events as e
from batcher.ownership import Ownership, State
from chassis.ids import AckToken, Attempt, BootId, GatewayId, RequestId
from chassis.messages.ownership import Attach, CancelAsk, Detached, Refused
from chassis.messages.request import (
    Cancel,
    Claim,
    Limits,
    Reason,
    Record,
    Request,
    Sampling,
    Terminal,
    Timings,
    Usage,
)
from tests.model.toy_gateway import Client, Ids, ToyGateway

R = RequestId("r1")
LOSSY = {"ask", "owner answer", "takeover?", "takeover answer", "part", "finish", "attach", "attach answer"}
LOSSY |= {"take", "cancel ask", "detached", "refused", "ack", "nak"}
TAKE = -1  # in place of a call: the answer is to one who gives
NOT_FOR_IT = {"write", "read", "late write", "receipt", "late receipt"}  # though it names who sent it
TO_GATEWAY = {"takeover?", "part", "finish", "attach answer"}


class Bad(Exception):
    """An invariant does not hold."""


class Action(NamedTuple):
    label: str
    kind: str  # fair, fault, recovery or client
    method: str
    args: tuple[object, ...] = ()

    @property
    def sort(self) -> str:
        """Which thing fails, and how: there are many more losses than deaths."""
        if self.method != "lose_item":
            return self.method + str(self.args[1:])
        return self.label[: self.label.index(">")] + str(self.args[1])


@dataclass(slots=True)
class Item:
    """Something in flight. `to` is a boot, a gateway or the broker."""

    kind: str
    to: str
    args: tuple[object, ...]


@dataclass(slots=True)
class Message:
    token: AckToken
    stored_at: float
    hold_until: float = 0.0
    count: int = 0


@dataclass(slots=True)
class Process:
    name: str
    boot: BootId
    core: Ownership
    up: bool = True
    stopped: bool = False
    connected: bool = True
    hung: bool = False
    waiting: bool = False
    sequence: list[int] | None = None
    run_serial: int = 0
    born_at: float = 0.0  # of the message, as its age told
    answered: set[tuple[str, int]] = field(default_factory=set)

    @property
    def reachable(self) -> bool:
        return self.up and self.connected


@dataclass(frozen=True)
class Setting:
    tokens: int = 2
    same: bool = False  # every run makes the same tokens
    honour_old: bool = True  # old ack tokens work
    keyed: bool = True
    window_s: float = 0.0
    timeout_s: float = 0.0
    batchers: int = 2
    core: type[Ownership] = Ownership
    gateway: type[ToyGateway] = ToyGateway
    fence: bool = True  # writes are conditional
    ask_all: bool = True  # a takeover question goes to all gateways


class World:
    def __init__(self, setting: Setting, rng: random.Random) -> None:
        self.setting, self.rng = setting, rng
        self.now = 1000.0
        self.keyed, self.window_s = setting.keyed, setting.window_s
        self.deadline: float | None = None
        self.items: list[Item] = []
        self.message: Message | None = None
        self.log: list[tuple[int, Record]] = []
        self.sequence, self.serial = 0, 0
        self.replies: dict[int, tuple[str, int]] = {}
        self.accepted = self.cancel_asked = self.gave_up = self.deadline_cancel = False
        self.may_diverge = self.partitioned = False
        self.last_served = self.now
        self.closed: list[str] = []
        self.letters = 0
        self.receipts: list[Terminal] = []
        self.request = Request(
            id=R,
            tenant="t",
            gateway=GatewayId("g"),
            model="fake",
            prompt_ids=(1,),
            seed=0,
            sampling=Sampling(),
            limits=Limits(max_tokens=setting.tokens),
            timeout_ms=round(setting.timeout_s * 1000),
            resume_window_ms=round(setting.window_s * 1000),
        )
        self.processes = {name: self._process(name) for name in "ab"[: setting.batchers]}
        self.client = Client()
        self.gateways = {name: setting.gateway(name, self) for name in "gh"}
        self.gateways["g"].publish()

    def _process(self, name: str) -> Process:
        self.serial += 1
        boot = BootId(f"{name}{self.serial}")
        return Process(name, boot, self.setting.core(boot))

    def boots(self) -> list[str]:
        return [p.boot for p in self.processes.values()]

    def _at(self, boot: str) -> Process | None:
        return next((p for p in self.processes.values() if p.boot == boot and p.up), None)

    # ---- what is in flight -------------------------------------------------------------------------

    def post(self, kind: str, to: str, *args: object) -> None:
        self.items.append(Item(kind, to, args))

    def deliverable(self, item: Item) -> bool:
        if item.kind in TO_GATEWAY:
            return self.gateways[item.to].state != "attaching" or item.kind == "attach answer"
        process = self._at(item.to)
        return process is None or not process.stopped or item.kind in NOT_FOR_IT

    def fair(self) -> list[Action]:
        """What happens when nothing fails, the oldest first and time last."""
        found = [
            Action(f"{item.kind} > {item.to}", "fair", "deliver_item", (k,))
            for k, item in enumerate(self.items)
            if self.deliverable(item)
        ]
        for name, p in self.processes.items():
            if p.up and not p.stopped and not p.hung:
                if p.waiting:
                    found.append(Action(f"{name} admits", "fair", "admit", (name,)))
                if p.sequence is not None:
                    found.append(Action(f"{name} steps", "fair", "step", (name,)))
                if p.connected and self.message is not None and self.message.hold_until <= self.now:
                    found.append(Action(f"broker delivers to {name}", "fair", "deliver_message", (name,)))
        if self._next_timer() is not None:
            found.append(Action("time passes", "fair", "advance"))
        return found

    def faults(self) -> list[Action]:
        found: list[Action] = []
        for k, item in enumerate(self.items):
            label = f"{item.kind} > {item.to}"
            if item.kind in LOSSY:
                found.append(Action(f"{label} lost", "fault", "lose_item", (k, "lost")))
            elif item.kind in ("write", "receipt", "publish", "cancel write"):
                hows = ("lost", "unanswered", "late")
                found += [Action(f"{label} {how}", "fault", "lose_item", (k, how)) for how in hows]
            elif item.kind == "read":
                found.append(Action(f"{label} failed", "fault", "lose_item", (k, "lost")))
        for name, p in self.processes.items():
            if p.up:
                found += self._process_faults(name, p)
        for name, gateway in self.gateways.items():
            if self.client.at == name and gateway.state in ("open", "publishing", "attaching"):
                found.append(Action(f"{name} dies", "fault", "gateway_dies", (name,)))
        return found

    def _process_faults(self, name: str, p: Process) -> Iterable[Action]:
        yield Action(f"{name} killed", "fault", "kill", (name, False))
        yield Action(f"{name} killed with its buffers", "fault", "kill", (name, True))
        if p.stopped:
            return
        yield Action(f"{name} stopped", "fault", "set_flag", (name, "stopped", True))
        if p.connected:
            yield Action(f"{name} partitioned", "fault", "set_flag", (name, "connected", False))
        if p.waiting and p.connected and len(self.processes) > 1:
            yield Action(f"{name} gives it away", "fault", "give_away", (name,))
        if not p.hung:
            yield Action(f"{name} hangs", "fault", "set_flag", (name, "hung", True))
            yield Action(f"{name} drains", "fault", "drain", (name,))
            if p.sequence is not None:
                yield Action(f"{name} loses a worker", "fault", "lose_worker", (name,))
            if p.connected and self.message is not None:
                yield Action(f"broker delivers to {name} early", "fault", "deliver_message", (name,))

    def recoveries(self) -> list[Action]:
        found: list[Action] = []
        for name, p in self.processes.items():
            if not p.up:
                found.append(Action(f"{name} restarts", "recovery", "restart", (name,)))
                continue
            if p.stopped:
                found.append(Action(f"{name} wakes", "recovery", "set_flag", (name, "stopped", False)))
                continue
            if not p.connected:
                found.append(Action(f"{name} healed", "recovery", "set_flag", (name, "connected", True)))
            if p.hung:
                found.append(Action(f"{name} turns again", "recovery", "set_flag", (name, "hung", False)))
        return found

    def wishes(self) -> list[Action]:
        found: list[Action] = []
        client = self.client
        if client.at is not None:
            if self.gateways[client.at].state == "open":
                if not self.cancel_asked:
                    found.append(Action("client cancels", "client", "client_cancels"))
                found.append(Action("client leaves", "client", "client_leaves"))
        elif self.gateways["h"].state == "off":
            if client.told is None and self.accepted:
                found.append(Action("client resumes", "client", "client_resumes"))
            elif client.told == ("unavailable", ()) and self.keyed:
                found.append(Action("client tries again", "client", "client_retries"))
        return found

    def power_cut(self) -> None:
        """The last record is lost, and its sequence is used again: what the broker must not do."""
        self.log.pop()
        self.sequence = self.log[-1][0] if self.log else 0

    def actions(self) -> list[Action]:
        return self.fair() + self.faults() + self.recoveries() + self.wishes()

    def _next_timer(self) -> float | None:
        times = [p.core.next_timer() for p in self.processes.values() if p.up and not p.stopped]
        times += [g.next_timer() for g in self.gateways.values()]
        if self.message is not None and self.message.hold_until > self.now:
            times.append(self.message.hold_until)
        return min((t for t in times if t is not None), default=None)

    def apply(self, action: Action) -> None:
        getattr(self, action.method)(*action.args)
        self.check()

    # ---- time --------------------------------------------------------------------------------------

    def advance(self) -> None:
        at = self._next_timer()
        assert at is not None
        self.now = max(self.now, at)
        for p in list(self.processes.values()):
            timer = p.core.next_timer()
            if p.up and not p.stopped and timer is not None and timer <= self.now:
                self.tell(p, e.Tick(self.now))
        for gateway in self.gateways.values():
            timer = gateway.next_timer()
            if timer is not None and timer <= self.now:
                gateway.tick()

    # ---- arrivals ----------------------------------------------------------------------------------

    def deliver_item(self, k: int) -> None:
        item = self.items.pop(k)
        getattr(self, "_on_" + item.kind.replace(" ", "_").replace("?", "_question"))(item.to, *item.args)

    def lose_item(self, k: int, how: str) -> None:
        item = self.items.pop(k)
        match item.kind:
            case "write":
                call, record, expected = item.args
                self.post("write done", item.to, call, e.Write.UNKNOWN, 0)
                if how == "unanswered":
                    self._append(record, expected)  # type: ignore[arg-type]
                elif how == "late":
                    self.post("late write", item.to, record, expected)
            case "receipt":
                call, record = item.args
                self.post("write done", item.to, call, e.Write.UNKNOWN, 0)
                if how == "unanswered":
                    self._write_receipt(record)  # type: ignore[arg-type]
                elif how == "late":
                    self.post("late receipt", item.to, record)
            case "cancel write":
                if how == "unanswered":
                    self._append(*item.args)  # type: ignore[arg-type]
                elif how == "late":
                    self.post("late write", "broker", *item.args)
            case "publish":
                self.post("published", item.to, "timed out")
                if how == "unanswered":
                    self._store()
                elif how == "late":
                    self.post("late publish", "broker")
            case "read":
                self.post("read done", item.to, item.args[0], None, 0, True)
            case "take":
                self.post("take answer", str(item.args[0]), False)

    def _store(self) -> bool:
        if self.message is not None:
            return False
        self.message = Message(AckToken(""), self.now)
        if self.setting.timeout_s and self.deadline is None:
            self.deadline = self.now + self.setting.timeout_s
        return True

    def _on_publish(self, gateway: str) -> None:
        self.post("published", gateway, "stored" if self._store() else "taken")

    def _on_late_publish(self, _: str) -> None:
        self._store()

    def _on_published(self, gateway: str, how: str) -> None:
        self.gateways[gateway].published(how)

    def _last(self) -> tuple[int, Record | None]:
        return self.log[-1] if self.log else (0, None)

    def _append(self, record: Record, expected: int) -> int:
        """0: refused."""
        seq, last = self._last()
        if seq != expected and (self.setting.fence or isinstance(last, Terminal)):
            return 0
        if isinstance(last, Terminal):
            raise Bad("S2: a record was written over the terminal record")
        if isinstance(record, Claim):
            if isinstance(last, Cancel):
                raise Bad("S5: a claim follows a cancel")
            if record.left:
                if not isinstance(last, Claim) or (last.attempt, last.boot) != (record.attempt, record.boot):
                    raise Bad("another's claim was left")
            elif last is not None and record.attempt <= last.attempt:
                raise Bad("the attempt does not grow")
        if isinstance(record, Terminal):
            self._check_terminal(record)
        self.sequence += 1
        self.log.append((self.sequence, record))
        return self.sequence

    def _on_write(self, boot: str, call: int, record: Record, expected: int) -> None:
        seq = self._append(record, expected)
        self.post("write done", boot, call, e.Write.STORED if seq else e.Write.REFUSED, seq)

    def _on_late_write(self, _: str, record: Record, expected: int) -> None:
        self._append(record, expected)

    def _write_receipt(self, record: Terminal) -> bool:
        """False: there is one."""
        if self._last()[1] != record:
            raise Bad("S8: a receipt of something else than the terminal record")
        if self.receipts:
            return False
        self.receipts.append(record)
        return True

    def _on_receipt(self, boot: str, call: int, record: Terminal) -> None:
        done = e.Write.STORED if self._write_receipt(record) else e.Write.REFUSED
        self.post("write done", boot, call, done, 0)

    def _on_late_receipt(self, _: str, record: Terminal) -> None:
        self._write_receipt(record)

    def _on_write_done(self, boot: str, call: int, outcome: e.Write, seq: int) -> None:
        p = self._at(boot)
        if p is not None:
            outcome = outcome if p.connected else e.Write.UNKNOWN
            self.tell(p, e.WriteDone(self.now, R, call, outcome, seq if outcome is e.Write.STORED else 0))

    def _on_read(self, boot: str, call: int) -> None:
        seq, record = self._last()
        self.post("read done", boot, call, record, seq, False)

    def _on_read_done(self, boot: str, call: int, record: Record | None, seq: int, failed: bool) -> None:
        p = self._at(boot)
        if p is not None:
            self.tell(p, e.ReadDone(self.now, R, call, record, seq, failed or not p.connected))

    def _on_ask(self, boot: str, asker: str, call: int, attempt: int, token: str, cancelled: bool) -> None:
        p = self._at(boot)
        if p is None:
            self.post("owner answer", asker, call, False, False)
        elif p.connected:
            self.serial += 1
            self.replies[self.serial] = (asker, call)
            event = e.OwnerAsked(self.now, R, Attempt(attempt), AckToken(token), cancelled, self.serial)
            self.tell(p, event)

    def _on_owner_answer(self, boot: str, call: int, mine: bool, answered: bool) -> None:
        self._hears(boot, e.OwnerAnswered(self.now, R, call, mine, answered))

    def _on_take(self, boot: str, giver: str, token: str, age_s: float) -> None:
        p = self._at(boot)
        if p is None or not p.connected:
            self.post("take answer", giver, False)
            return
        self.serial += 1
        self.replies[self.serial] = (giver, TAKE)
        p.born_at = self.now - age_s if not p.core.holds(R) else p.born_at
        self.tell(p, e.TakeAsked(self.now, self.request, AckToken(token), age_s, self.serial))

    def _on_take_answer(self, boot: str, taken: bool) -> None:
        self._hears(boot, e.TakeAnswered(self.now, R, taken))

    def _hears(self, boot: str, event: e.OwnershipEvent) -> None:
        p = self._at(boot)
        if p is not None and p.connected:
            self.tell(p, event)

    def _on_takeover_question(self, gateway: str, attempt: int, boot: str) -> None:
        self.gateways[gateway].takeover_asked(attempt, boot)

    def _on_takeover_answer(
        self, boot: str, gateway: str, attempt: int, ids: Ids | None, minimum: int | None
    ) -> None:
        p = self._at(boot)
        if p is not None and p.connected:
            if p.core.state(R) is State.TAKEOVER:
                p.answered.add((gateway, attempt))
            least = None if minimum is None else Attempt(minimum)
            event = e.TakeoverAnswered(self.now, R, GatewayId(gateway), Attempt(attempt), ids, least)
            self.tell(p, event)

    def _on_part(self, gateway: str, boot: str, part: object) -> None:
        self.gateways[gateway].part(boot, part)  # type: ignore[arg-type]

    def _on_finish(self, gateway: str, boot: str, finish: object) -> None:
        self.gateways[gateway].finish(finish)  # type: ignore[arg-type]

    def _on_attach(self, boot: str, gateway: str, attempt: int, held: Ids) -> None:
        p = self._at(boot)
        if p is not None and p.connected:
            self.serial += 1
            self.replies[self.serial] = (gateway, 0)
            message = Attach(R, Attempt(attempt), GatewayId(gateway), held)
            self.tell(p, e.Heard(self.now, message, self.serial))

    def _on_attach_answer(self, gateway: str, kind: str) -> None:
        self.gateways[gateway].attach_answered(kind)

    def _on_cancel_ask(self, boot: str) -> None:
        self._hears(boot, e.Heard(self.now, CancelAsk(R)))

    def _on_detached(self, boot: str, gateway: str) -> None:
        self._hears(boot, e.Heard(self.now, Detached(R, GatewayId(gateway))))

    def _on_refused(
        self, boot: str, gateway: str, attempt: int, minimum: int | None, differs: Ids | None
    ) -> None:
        least = None if minimum is None else Attempt(minimum)
        message = Refused(R, GatewayId(gateway), Attempt(attempt), least, differs)
        self._hears(boot, e.Heard(self.now, message))

    def _on_ack(self, _: str, token: str) -> None:
        if self.message is not None and (self.setting.honour_old or token == self.message.token):
            self.message = None

    def _on_nak(self, _: str, token: str, delay_s: float) -> None:
        if self.message is not None and token == self.message.token:
            self.message.hold_until = self.now + delay_s

    def _on_gateway_read(self, gateway: str) -> None:
        self.post("gateway read done", gateway, self._last()[1], self.message is not None)

    def _on_gateway_read_done(self, gateway: str, record: Record | None, message: bool) -> None:
        self.gateways[gateway].read_done(record, message)

    def _on_cancel_read(self, gateway: str) -> None:
        seq, record = self._last()
        self.post("cancel read done", gateway, record, seq)

    def _on_cancel_read_done(self, gateway: str, record: Record | None, seq: int) -> None:
        self.gateways[gateway].cancel_read_done(record, seq)

    def _on_cancel_write(self, _: str, record: Record, expected: int) -> None:
        self._append(record, expected)

    # ---- processes ---------------------------------------------------------------------------------

    def deliver_message(self, name: str) -> None:
        p, m = self.processes[name], self.message
        assert m is not None
        self.serial += 1
        m.token, m.count, m.hold_until = AckToken(f"t{self.serial}"), m.count + 1, self.now + 1.0
        count = 1 if self.rng.random() < 0.3 else m.count  # the count is only a hint
        p.born_at = m.stored_at if not p.core.holds(R) else p.born_at
        self.tell(p, e.Delivered(self.now, self.request, m.token, count, self.now - m.stored_at))

    def kill(self, name: str, buffers_too: bool) -> None:
        p = self.processes[name]
        p.up, p.core = False, self.setting.core(p.boot)
        if buffers_too:
            mine = {"write", "receipt", "read", "ask", "takeover?", "part", "finish", "ack", "nak"}
            self.items = [i for i in self.items if not (i.kind in mine and p.boot in (i.to, *i.args))]

    def restart(self, name: str) -> None:
        self.processes[name] = self._process(name)

    def set_flag(self, name: str, flag: str, value: bool) -> None:
        p = self.processes[name]
        setattr(p, flag, value)
        if flag == "connected" and not value:
            self.partitioned = True
        if flag == "hung":
            self.tell(p, e.PipelineChanged(self.now, alive=not value))

    def drain(self, name: str) -> None:
        p = self.processes[name]
        self.tell(p, e.Drain(self.now))
        p.hung = True  # until a pipeline stands again

    def admit(self, name: str) -> None:
        p = self.processes[name]
        p.waiting, p.sequence = False, []
        p.run_serial = self._new_serial()
        self.tell(p, e.Admitted(self.now, R))

    def _new_serial(self) -> int:
        self.serial += 1
        return self.serial

    def step(self, name: str) -> None:
        p = self.processes[name]
        assert p.sequence is not None
        whole = len(p.sequence) >= self.setting.tokens
        if not whole:
            index = len(p.sequence)
            p.sequence.append(index if self.setting.same else 100 * p.run_serial + index)
            whole = len(p.sequence) >= self.setting.tokens
            if not whole or self.rng.random() < 0.5:
                self.tell(p, e.TokensMade(self.now, (R,), ((p.sequence[-1],),)))
        if whole and p.sequence is not None:
            ids, p.sequence = tuple(p.sequence), None
            self.tell(p, e.Ended(self.now, R, Reason.STOP, ids, None, Usage(1, 0, len(ids)), Timings()))

    def give_away(self, name: str) -> None:
        other = next(p for p in self.processes.values() if p.name != name)
        self.tell(self.processes[name], e.GiveAway(self.now, R, other.boot))

    def lose_worker(self, name: str) -> None:
        self.tell(self.processes[name], e.WorkersDied(self.now, (R,)))

    def tell(self, p: Process, event: e.OwnershipEvent) -> None:
        before = p.core.state(R)
        attempt = p.core.attempt(R)
        effects = p.core.handle(event)
        p.core.check()
        if before is State.TAKEOVER and p.core.state(R) in (State.RUNNING, State.WRITING, State.CLAIMING):
            there = [g.name for g in self.gateways.values() if g.state in ("open", "attaching")]
            asked = there if self.setting.ask_all else [name for name in there if name == "g"]
            if not there or any((name, attempt) not in p.answered for name in asked):
                self.may_diverge = True
        for effect in effects:
            self._perform(p, effect)

    def _perform(self, p: Process, effect: e.OwnershipEffect) -> None:
        match effect:
            case e.Enqueue():
                assert not p.waiting and p.sequence is None
                p.waiting = True
            case e.Run():
                assert not p.waiting and p.sequence is None
                p.sequence, p.run_serial = list(effect.output_ids), self._new_serial()
            case e.Stop():
                p.waiting, p.sequence = False, None
            case e.Closed():
                self.closed.append(effect.why)
            case e.DeadLetter():
                self.letters += 1
            case e.Count():
                pass
            case e.Append():
                self._check_append(p, effect)
                if p.connected:
                    self.post("write", p.boot, effect.call, effect.record, effect.expected_seq)
                else:
                    self.post("write done", p.boot, effect.call, e.Write.UNKNOWN, 0)
                    if self.rng.random() < 0.3:
                        self.post("late write", p.boot, effect.record, effect.expected_seq)
            case e.WriteReceipt():
                if p.connected:
                    self.post("receipt", p.boot, effect.call, effect.record)
                else:
                    self.post("write done", p.boot, effect.call, e.Write.UNKNOWN, 0)
                    if self.rng.random() < 0.3:
                        self.post("late receipt", p.boot, effect.record)
            case e.ReadLast():
                if p.connected:
                    self.post("read", p.boot, effect.call)
                else:
                    self.post("read done", p.boot, effect.call, None, 0, True)
            case _ if p.connected:
                self._send(p, effect)

    def _send(self, p: Process, effect: e.OwnershipEffect) -> None:
        match effect:
            case e.AskOwner():
                rest = effect.call, effect.attempt, effect.token, effect.cancelled
                self.post("ask", effect.boot, p.boot, *rest)
            case e.AskTakeover():
                for gateway in self.gateways if self.setting.ask_all else "g":
                    self.post("takeover?", gateway, effect.attempt, p.boot)
            case e.AnswerOwner():
                asker, call = self.replies.pop(effect.reply)
                if call == TAKE:
                    self.post("take answer", asker, effect.mine)
                else:
                    self.post("owner answer", asker, call, effect.mine, True)
            case e.Give():
                self.post("take", effect.boot, p.boot, effect.token, effect.age_s)
            case e.AnswerAttach():
                gateway, _ = self.replies.pop(effect.reply)
                self.post("attach answer", gateway, effect.kind.value)
            case e.SendParts():
                for part in effect.parts:
                    if not any(c.attempt == part.attempt and c.boot == p.boot for c in self._claims()):
                        raise Bad("a part left before its claim was stored")
                    self.post("part", effect.gateway, p.boot, part)
                for finish in effect.finishes:
                    if not isinstance(self._last()[1], Terminal):
                        raise Bad("S1: finished before the record")
                    self.post("finish", effect.gateway, p.boot, finish)
            case e.Ack():
                if not isinstance(self._last()[1], Terminal):
                    raise Bad("S3: acknowledged before the record")
                self.post("ack", "broker", effect.token)
            case e.Nak():
                self.post("nak", "broker", effect.token, effect.delay_s)
            case e.Progress():
                m = self.message
                if m is not None and m.count and (self.setting.honour_old or m.token in effect.tokens):
                    m.hold_until = max(m.hold_until, self.now + 1.0)

    def _claims(self) -> list[Claim]:
        return [record for _, record in self.log if isinstance(record, Claim)]

    # ---- the client --------------------------------------------------------------------------------

    def client_cancels(self) -> None:
        self.cancel_asked = True
        assert self.client.at is not None
        self.gateways[self.client.at].cancel()

    def client_leaves(self) -> None:
        assert self.client.at is not None
        self.gateways[self.client.at].client_gone()
        self._client_lost()

    def gateway_dies(self, name: str) -> None:
        self.gateways[name].state, self.gateways[name].cancel_at = "dead", None
        self._client_lost()

    def _client_lost(self) -> None:
        self.client.at = None
        if self.client.ids and self.rng.random() < 0.5:
            self.client.ids = self.client.ids[:-1]  # the last one was still on its way

    def client_resumes(self) -> None:
        self.client.at = "h"
        self.gateways["h"].resume(self.client.ids)

    def client_retries(self) -> None:
        self.client.at, self.client.told = "h", None
        self.gateways["h"].publish()

    def tell_client(self, gateway: ToyGateway, told: str, ids: Ids) -> None:
        if self.client.at == gateway.name:
            self.client.at, self.client.told = None, (told, ids)

    # ---- what must hold ----------------------------------------------------------------------------

    def _check_append(self, p: Process, effect: e.Append) -> None:
        """The rows of a terminal record's timings sum to its age."""
        record = effect.record
        if isinstance(record, Terminal) and record.boot == p.boot:
            t = record.timings
            rows = t.queued_us + t.waiting_us + t.prefill_us + t.decode_us + t.interrupted_us
            age_us = (self.now - p.born_at) * 1e6
            if abs(rows - age_us) > 5:
                raise Bad(f"the ledger's rows sum to {rows}, not {age_us}")

    def _check_terminal(self, record: Terminal) -> None:
        served = any(g.serves and self.client.at == g.name for g in self.gateways.values())
        self.last_served = self.now if served else self.last_served
        wished = self.cancel_asked or self.gave_up or self.deadline_cancel
        if record.reason is Reason.CANCELLED and not wished and served and not self.partitioned:
            raise Bad("S5: cancelled, though served and nobody cancelled")
        if record.reason is Reason.DEADLINE and (self.deadline is None or self.now < self.deadline):
            raise Bad("ended before its deadline")
        if record.reason is Reason.STOP and len(record.output_ids) != self.setting.tokens:
            raise Bad("S1: a stop that is not whole")

    def check(self) -> None:
        last = self._last()[1]
        terminal = last if isinstance(last, Terminal) else None
        if self.accepted and self.message is None and terminal is None:
            raise Bad("S3: an accepted request has neither message nor terminal record")
        if self.accepted and self.message is None and not self.receipts:
            raise Bad("S8: the message went before the receipt")
        holders = [g.ids for g in self.gateways.values() if g.state in ("open", "attaching")]
        client = self.client
        if client.at is None:
            holders.append(client.ids)
        if self.setting.same:
            for ids in holders + ([terminal.output_ids] if terminal else []):
                if ids != tuple(range(len(ids))):
                    raise Bad("S1: not the text")
        told = client.told[0] if client.told is not None else ""
        if told == "diverged" and (self.setting.same or not self.may_diverge):
            raise Bad("S2: diverged, though every takeover question was answered")
        if told in ("stop", "cancelled", "deadline", "failed"):
            if terminal is None or terminal.reason.value != told:
                raise Bad("S1: told something else than the terminal record says")
            if told == "stop" and client.ids != terminal.output_ids:
                raise Bad("S1: finished with other ids")
        if terminal is not None and not self.may_diverge:
            for ids in holders:
                n = min(len(ids), len(terminal.output_ids))
                if ids[:n] != terminal.output_ids[:n]:
                    raise Bad("S2: the terminal record contradicts what the client holds")

    # ---- a fair end --------------------------------------------------------------------------------

    def settle(self, steps_max: int = 4000) -> None:
        """No more faults; everybody recovers; all that is possible happens, oldest first."""
        for name, p in list(self.processes.items()):
            if not p.up:
                self.restart(name)
            for flag, good in (("stopped", False), ("connected", True), ("hung", False)):
                if getattr(p, flag) is not good and p.up:
                    self.set_flag(name, flag, good)
        end = self.now + 120.0
        for _ in range(steps_max):
            fair = self.fair()
            if not fair or self.quiet() or self.now > end:
                break
            self.apply(fair[0])
        if not self.quiet():
            states = {name: p.core.state(R).value for name, p in self.processes.items()}
            gateways = {name: g.state for name, g in self.gateways.items()}
            raise Bad(f"S3/S4/S6: it does not end: {states} {gateways} {self.message} {self._last()}")
        if self.receipts != [record for _, record in self.log if isinstance(record, Terminal)]:
            raise Bad(f"S8: receipts {self.receipts}, the log ends with {self._last()}")

    def quiet(self) -> bool:
        busy = any(len(p.core) for p in self.processes.values())
        return not (busy or self.items or self.message or any(g.busy for g in self.gateways.values()))
