"""Pure. Who owns a request: every request this batcher holds, by the tables of the ownership protocol.

Only the last record of a request's log counts. While the pipeline is alive everything held is kept from
redelivery; after a sleep longer than the broker's patience the records are read before anything else.
What no row names is dropped and counted.
"""

from dataclasses import replace

from batcher import events as e
from batcher.actions import OwnershipConfig as OwnershipConfig
from batcher.actions import Turn
from batcher.alarms import Alarms
from batcher.holding import State as State
from batcher.tenure import Tenure
from chassis.ids import AckToken, Attempt, BootId, GatewayId, RequestId
from chassis.messages.chunk import Part
from chassis.messages.ownership import Attach, AttachKind
from chassis.messages.request import Request, Terminal

PROGRESS_LANES = 8


class Ownership:
    """`handle` is the one entry; `next_timer` says when it wants the next Tick."""

    tenure: type[Tenure] = Tenure

    def __init__(self, boot: BootId, config: OwnershipConfig | None = None) -> None:
        self._config = config or OwnershipConfig()
        self._turn = Turn(boot, self._config)
        self._held: dict[RequestId, Tenure] = {}
        self._alarms = Alarms()
        self._alive = True
        self._draining = False
        self._progress_at = 0.0
        self._lane = 0
        self._numbers = 0  # of the tenures begun

    # ---- seen from outside -------------------------------------------------------------------------

    @property
    def boot(self) -> BootId:
        return self._turn.boot

    def __len__(self) -> int:
        return len(self._held)

    def holds(self, request_id: RequestId) -> bool:
        return request_id in self._held

    def state(self, request_id: RequestId) -> State:
        held = self._held.get(request_id)
        return State.NONE if held is None else held.state

    def attempt(self, request_id: RequestId) -> Attempt | None:
        """Of the claim held; None while there is none."""
        held = self._held.get(request_id)
        return held.attempt if held is not None and held.claimed else None

    def gateways(self) -> tuple[GatewayId, ...]:
        """Who must hear that this batcher lives: the gateways of all requests it owns."""
        served: dict[GatewayId, None] = {}
        for held in self._held.values():
            if held.claimed:
                served.update(dict.fromkeys(held.audience.next_index))
        return tuple(served)

    def counts(self) -> dict[State, int]:
        """How many requests are in each state."""
        counts = dict.fromkeys(State, 0)
        for held in self._held.values():
            counts[held.state] += 1
        return counts

    def oldest_waiting_at(self, now: float) -> float:
        """When the broker stored the oldest of those that wait; now, if none does."""
        stored = [h.delivered_at - h.age_s for h in self._held.values() if h.state is State.WAITING]
        return min(stored, default=now)

    def next_timer(self) -> float | None:
        if not self._held:
            return None
        alarm = self._alarms.next()
        return self._progress_at if alarm is None else min(alarm, self._progress_at)

    def check(self) -> None:
        assert len(self._held) <= self._config.held_len_max
        for request_id, held in self._held.items():
            assert held.id == request_id
            held.check()
            assert self._alarms.at(request_id) == held.wake_at()

    # ---- the one entry -----------------------------------------------------------------------------

    def handle(self, event: e.OwnershipEvent) -> list[e.OwnershipEffect]:
        out: list[e.OwnershipEffect] = []
        self._turn.out = out
        self._notice_pause(event)
        match event:
            case e.TokensMade():
                self._on_tokens(event)
            case e.Tick():
                self._on_tick()
            case e.Delivered():
                self._on_delivered(event)
            case e.TakeAsked():
                self._on_take_asked(event)
            case e.WorkersDied():
                for request_id in event.request_ids:
                    held = self._held.get(request_id)
                    if held is not None:
                        held.on_worker_death()
                        self._settle(held)
            case e.PipelineChanged():
                self._on_pipeline(event)
            case e.Drain():
                self._on_drain()
            case e.Heard():
                held = self._held.get(event.message.request_id)
                self._on_one(event, held)
            case _:
                self._on_one(event, self._held.get(event.request_id))
        return out

    def amend(self, request_id: RequestId, record: Terminal) -> None:
        """The record being written was completed with the scheduler's account of a stopped sequence."""
        held = self._held.get(request_id)
        if held is not None and isinstance(held.writing, Terminal):
            held.writing = record
            held.account = record.usage, record.timings

    def _on_tokens(self, event: e.TokensMade) -> None:
        """The step path: no state changes, so that alarms stay; all parts for one gateway leave together."""
        parts: dict[GatewayId, list[Part]] = {}
        told = dict(event.logprobs) if event.logprobs else {}
        prompts = dict(event.prompts) if event.prompts else {}
        for request_id, ids in zip(event.request_ids, event.ids, strict=True):
            held = self._held.get(request_id)
            if held is None:
                self._turn.drop("tokens")
            else:
                if prompts:
                    held.learn_prompt(prompts.get(request_id))
                held.on_tokens(ids, parts, told.get(request_id) if told else None)
        self._turn.send(parts)

    def _on_one(
        self,
        event: e.Admitted
        | e.WriteDone
        | e.ReadDone
        | e.Ended
        | e.OwnerAsked
        | e.OwnerAnswered
        | e.TakeoverAnswered
        | e.GiveAway
        | e.TakeAnswered
        | e.Heard,
        held: Tenure | None,
    ) -> None:
        if held is None:
            self._on_stranger(event)
            return
        match event:
            case e.Admitted():
                held.on_admitted()
            case e.WriteDone():
                held.on_write_done(event)
            case e.ReadDone():
                held.on_read_done(event)
            case e.Ended():
                held.on_ended(event)
            case e.OwnerAsked():
                held.on_owner_asked(event, self._alive)
            case e.OwnerAnswered():
                held.on_owner_answered(event)
            case e.TakeoverAnswered():
                held.on_takeover_answered(event)
            case e.GiveAway():
                held.on_give_away(event.boot)
            case e.TakeAnswered():
                held.on_take_answered(event.taken)
            case e.Heard():
                held.on_heard(event.message, event.reply)
        self._settle(held)

    def _on_stranger(self, event: e.OwnershipEvent) -> None:
        """About a request that is not held. Who waits for an answer gets one."""
        match event:
            case e.OwnerAsked():
                self._turn.out.append(e.AnswerOwner(event.reply, False))
            case e.Heard(message=Attach(), reply=int() as reply):
                self._turn.out.append(e.AnswerAttach(reply, AttachKind.UNKNOWN))
            case _:
                self._turn.drop("stranger")

    def _settle(self, held: Tenure) -> None:
        if held.state is State.NONE:
            self._alarms.set(held.id, None)
            self._held.pop(held.id, None)
        else:
            self._alarms.set(held.id, held.wake_at())

    # ---- time --------------------------------------------------------------------------------------

    def _notice_pause(self, event: e.OwnershipEvent) -> None:
        """Ticks come at least every progress period while anything is held; a longer gap was a sleep."""
        gap_s = event.now - self._turn.now if self._held else 0.0
        if isinstance(event, e.Tick):
            gap_s = max(gap_s, event.gap_s)
        self._turn.now = event.now
        if gap_s > self._config.ack_wait_s:
            self._doubt_all(gap_s)

    def _doubt_all(self, slept_s: float) -> None:
        for held in self._held.values():
            held.on_pause(slept_s)
            self._settle(held)

    def _on_tick(self) -> None:
        for request_id in self._alarms.due(self._turn.now):
            held = self._held[request_id]
            while (at := held.wake_at()) is not None and at <= self._turn.now:
                held.on_time()
            self._settle(held)
        if self._progress_at <= self._turn.now:
            self._keep_held()

    def _keep_held(self) -> None:
        """Everything held is kept once a period. Many take turns within it, so that no turn carries them all:
        each has a lane of its own, hence a gap of two periods at most, whoever else comes and goes."""
        config, held = self._config, self._held.values()
        lanes = PROGRESS_LANES if len(held) > config.progress_at_once_max else 1
        self._progress_at = self._turn.now + config.progress_period_s / lanes
        self._lane = (self._lane + 1) % lanes
        if self._alive:
            tokens = tuple(h.token for h in held if h.number % lanes == self._lane)
            size = config.progress_len_max
            for first in range(0, len(tokens), size):
                self._turn.out.append(e.Progress(tokens[first : first + size]))

    # ---- deliveries, the pipeline, the end of the process ------------------------------------------

    def _on_delivered(self, event: e.Delivered) -> None:
        held = self._held.get(event.request.id)
        if held is not None:
            held.on_redelivered(event)
            self._settle(held)
            return
        if self._full:
            self._turn.out.append(e.Nak(event.token, self._config.nak_delay_s))
            self._turn.drop("delivered")
            return
        request = replace(event.request, body_digest=event.request.body_digest or event.body_digest)
        self._hold(request, event.token, event.age_s, event.accepted_ms, event.count)

    def _on_take_asked(self, event: e.TakeAsked) -> None:
        """What another batcher gives comes like a delivery."""
        held = self._held.get(event.request_id)
        if held is None and self._full:
            self._turn.out.append(e.AnswerOwner(event.reply, False))
            return
        self._turn.out.append(e.AnswerOwner(event.reply, True))
        if held is None:
            self._hold(event.request, event.token, event.age_s, event.accepted_ms, count=1, given=True)

    @property
    def _full(self) -> bool:
        return self._draining or not self._alive or len(self._held) >= self._config.held_len_max

    def _hold(
        self,
        request: Request,
        token: AckToken,
        age_s: float,
        accepted_ms: int,
        count: int,
        given: bool = False,
    ) -> None:
        now, timeout_ms = self._turn.now, request.timeout_ms
        if not self._held:
            self._progress_at = now + self._config.progress_period_s
        held = self.tenure(
            request=request,
            token=token,
            age_s=age_s,
            accepted_ms=accepted_ms,
            delivered_at=now,
            deadline=now - age_s + timeout_ms / 1000 if timeout_ms else None,
            turn=self._turn,
            number=self._numbers,
            given=given,
        )
        self._numbers += 1
        self._held[held.id] = held
        held.begin(count)
        self._settle(held)

    def _on_pipeline(self, event: e.PipelineChanged) -> None:
        """A pipeline that stood still may have lost what it held, like a process that slept."""
        if event.alive:
            self._draining = False
            if not self._alive:
                self._doubt_all(0.0)
        self._alive = event.alive

    def _on_drain(self) -> None:
        """Nothing is taken in from here on, until a pipeline stands again."""
        self._draining = True
        for held in list(self._held.values()):
            held.on_drain()
            self._settle(held)
