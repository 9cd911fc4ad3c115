"""Pure. The batcher's mind: formation, ownership and scheduling, composed. `handle(event) -> effects`.

Ownership decides who may run and end a request, the scheduler what runs in which step, formation on what
pipeline. They speak through this file alone. After each batch of events the shell asks for `plans`.
"""

from dataclasses import dataclass, replace

from batcher.events import (
    Admitted,
    AnswerOwner,
    Append,
    BlocksExchanged,
    BlocksLocated,
    BlocksMatched,
    Closed,
    Distrusted,
    Drain,
    Ended,
    Enqueue,
    GiveAway,
    LoadHeard,
    OwnershipEffect,
    OwnershipEvent,
    PipelineChanged,
    PlacementEffect,
    PoolAttached,
    PoolMoves,
    Run,
    StepPlan,
    StepReturned,
    Stop,
    TakeAnswered,
    TakeAsked,
    Tick,
    WorkersDied,
)
from batcher.events import BlockEffect as BlockEffect
from batcher.formation import (
    CloseLinks,
    EpochWritten,
    Formation,
    FormationEffect,
    FormStage,
    PipelineLost,
    StageFormed,
    State,
    Stood,
    WorkersSeen,
    WriteEpoch,
)
from batcher.holding import State as Holding
from batcher.ownership import Ownership
from batcher.placement import Placement
from batcher.scheduler import Scheduler, Stopped
from chassis.ids import BlockHash, Epoch, RequestId
from chassis.messages.request import Terminal, Timings

Event = (
    OwnershipEvent
    | WorkersSeen
    | EpochWritten
    | StageFormed
    | PipelineLost
    | StepReturned
    | BlocksMatched
    | BlocksExchanged
    | PoolAttached
    | PoolMoves
    | LoadHeard
    | BlocksLocated
)

LOBBY_S = 0.5
LET_GO_S = (
    1.0  # a worker that leaves is held no longer without a request; one that takes its place may come first
)
YIELD_S = 1.0  # without a pipeline, while others serve: then they get what is held


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The pipeline is lost; these requests were in its steps."""

    epoch: Epoch
    cause: str
    request_ids: tuple[RequestId, ...]


Effect = (
    OwnershipEffect | BlockEffect | FormationEffect | PlacementEffect | Interrupted | Admitted | Distrusted
)


def _rows(t: Timings) -> int:
    return t.queued_us + t.waiting_us + t.prefill_us + t.decode_us + t.interrupted_us


def _fill(made: Timings, total_us: int) -> Timings:
    """What passed after the scheduler was told to stop is interruption: rows sum to the total."""
    missing = max(0, total_us - _rows(made))
    return replace(made, interrupted_us=made.interrupted_us + missing)


class Core:
    def __init__(
        self, ownership: Ownership, scheduler: Scheduler, formation: Formation, reform_timeout_s: float
    ) -> None:
        self.ownership = ownership
        self.scheduler = scheduler
        self.formation = formation
        self.placement = Placement(ownership.boot, scheduler.block_size_tokens)
        self._reform_timeout_s = reform_timeout_s
        self._generation: str | None = None
        self._let_go_at: float | None = None
        self._give_up_at: float | None = None  # when a lost pipeline's requests are let go
        self._draining = False
        self._stopped: dict[RequestId, Stopped] = {}  # what the scheduler knew of those ownership ends
        self._lobby: dict[RequestId, tuple[Enqueue, float]] = {}  # not yet placed, and since when
        self._out: list[Effect] = []

    # ---- inputs

    def handle(self, event: Event) -> list[Effect]:
        match event:
            case WorkersSeen() | EpochWritten() | StageFormed():
                self._formation(self.formation.handle(event), event.now)
                if self._give_up_at is not None and self.formation.others_stand:
                    self._give_up_at = min(self._give_up_at, event.now + YIELD_S)
            case PipelineLost():
                self._lost(event)
            case StepReturned():
                if not self.scheduler.returned(event):
                    self._lost(PipelineLost(event.now, event.epoch, None, "a step out of order"))
            case BlocksMatched() | BlocksExchanged() | PoolAttached() | PoolMoves():
                self.scheduler.handle_blocks(event)
            case LoadHeard():
                self.placement.heard(event.load, event.now)
                if self.placement.alone:
                    self._all_stay(event.now)
            case BlocksLocated():
                self._placed(self.placement.located(event), event.now)
                for request_id in event.request_ids:
                    if not self.placement.offered(request_id):
                        self._stays(request_id, event.now)
            case Tick():
                self._tick(event)
            case TakeAnswered():
                if not event.taken:
                    self.placement.refused(event.request_id)
                    self._stays(event.request_id, event.now)
                self._owned(self.ownership.handle(event), event.now)
            case TakeAsked() if self.scheduler.full(event.request.priority) and not self.ownership.holds(
                event.request_id
            ):
                self._out.append(AnswerOwner(event.reply, False))  # who has it may have room
            case Drain():
                self._draining = True
                self._owned(self.ownership.handle(event), event.now)
            case _:
                self._owned(self.ownership.handle(event), event.now)
        self._let_go(event.now)
        self._settle(event.now)
        self._out.extend(self.placement.asks(self._chain))
        out, self._out = self._out, []
        return out

    def plans(self, now: float) -> tuple[list[StepPlan], list[Effect]]:
        """The steps that can go now, and what planning them wants done."""
        plans: list[StepPlan] = []
        while (plan := self.scheduler.plan(now)) is not None:
            plans.append(plan)
        self._settle(now)
        out, self._out = self._out, []
        return plans, out

    def next_timer(self) -> float | None:
        times = (
            self.formation.next_timer(),
            self.ownership.next_timer(),
            self.scheduler.wake_at(),
            self.placement.wake_at(),
            self._let_go_at,
            self._give_up_at,
        )
        return min([t for t in times if t is not None], default=None)

    # ---- queries

    @property
    def standing(self) -> bool:
        return self.formation.state is State.STANDING

    @property
    def draining(self) -> bool:
        """Told to leave: what is held is being given back."""
        return self._draining

    @property
    def accepting(self) -> bool:
        """Whether deliveries may be fetched now. While a worker leaves, other pipelines take what comes."""
        takes = self.placement.alone or not self.formation.someone_leaves
        return takes and self.standing and not self._draining

    @property
    def num_waiting(self) -> int:
        return self.scheduler.num_waiting + len(self._lobby)

    def check(self) -> None:
        self.ownership.check()
        self.scheduler.check()
        self.placement.check()
        for request_id in self._lobby:
            assert self.ownership.state(request_id) is Holding.WAITING
        for request_id in self.scheduler.request_ids():
            assert request_id not in self._lobby
            assert self.ownership.holds(request_id), f"{request_id} is scheduled but not held"

    # ---- formation

    def _formation(self, effects: list[FormationEffect], now: float) -> None:
        for effect in effects:
            self._out.append(effect)
            match effect:
                case Stood():
                    changed = effect.generation != self._generation or not effect.intact
                    self._generation = effect.generation
                    self._give_up_at = None
                    self.scheduler.form(effect.epoch, effect.num_blocks, len(effect.stages), changed, now)
                    self._owned(self.ownership.handle(PipelineChanged(now, alive=True)), now)
                case WriteEpoch() | FormStage() | CloseLinks():
                    pass

    def _lost(self, event: PipelineLost, by_us: bool = False) -> None:
        stood, left = self.standing, self.formation.someone_left
        effects = self.formation.handle(event)
        if stood and not self.standing:
            held = self.scheduler.unform(event.now)
            self._out.append(Interrupted(event.epoch, event.cause, held))
            self._give_up_at = event.now + self._reform_timeout_s
            if held and not left and not by_us:  # who drains does not die of a request
                self._owned(self.ownership.handle(WorkersDied(event.now, held)), event.now)
        self._formation(effects, event.now)

    def _let_go(self, now: float) -> None:
        """Nobody gains by a worker that leaves and waits for us while nothing is asked."""
        if not self.formation.someone_leaves or len(self.ownership):
            self._let_go_at = None
        elif self._let_go_at is None:
            self._let_go_at = now + LET_GO_S
        elif now >= self._let_go_at:
            self._let_go_at = None
            self._lost(PipelineLost(now, self.formation.epoch, None, "a worker leaves"), by_us=True)

    def _tick(self, event: Tick) -> None:
        now = event.now
        if self.standing and self.scheduler.overdue(now):
            self._lost(PipelineLost(now, self.formation.epoch, None, "step deadline"))
        if self.formation.quicker(now):
            if self._draining:
                self.formation.stay(now)
            else:
                cause = "a worker leaves" if self.formation.someone_left else "others are quicker"
                self._lost(PipelineLost(now, self.formation.epoch, None, cause), by_us=True)
        if self._give_up_at is not None and now >= self._give_up_at:
            self._give_up_at = None
            self._owned(self.ownership.handle(PipelineChanged(now, alive=False)), now)
            self._owned(self.ownership.handle(Drain(now)), now)
        self._formation(self.formation.tick(now), now)
        self._owned(self.ownership.handle(event), now)
        self.scheduler.tick(now)
        if now >= self.placement.wake_at():
            generation = self._generation or ""
            busy = self.scheduler.busy()
            self._placed(self.placement.tick(now, self.accepting, generation, busy), now)
            self._all_stay(now, 0.0 if self.placement.alone else LOBBY_S)

    # ---- placement

    def _place(self, effect: Enqueue, now: float) -> None:
        """With others there it is scheduled only when it is known to stay: what runs at once is not moved."""
        request = effect.request
        if effect.given or self.placement.alone:
            self.scheduler.add_waiting(request, now, effect.age_s, effect.deadline)
        else:
            self._lobby[request.id] = (effect, now)
        if not effect.given and (request.id in self._lobby or self.scheduler.waits(request.id)):
            self.placement.came(request.id, len(request.prompt_ids), request.limits.max_tokens)

    def _stays(self, request_id: RequestId, now: float) -> None:
        found = self._lobby.pop(request_id, None)
        if found is not None:
            effect, since = found
            age_s = effect.age_s + now - since
            self.scheduler.add_waiting(effect.request, now, age_s, effect.deadline)

    def _all_stay(self, now: float, waited_s: float = 0.0) -> None:
        """Who waits for so long: whoever was asked said nothing."""
        for request_id in [r for r, (_, since) in self._lobby.items() if now >= since + waited_s]:
            self.placement.refused(request_id)
            self._stays(request_id, now)

    def _chain(self, request_id: RequestId) -> tuple[BlockHash, ...]:
        found = self._lobby.get(request_id)
        if found is None:
            return self.scheduler.chain(request_id)
        return self.scheduler.chain_of(found[0].request)

    def _placed(self, effects: tuple[PlacementEffect, ...], now: float) -> None:
        for effect in effects:
            if isinstance(effect, GiveAway):
                self._owned(self.ownership.handle(effect), now)
            else:
                self._out.append(effect)

    # ---- ownership and scheduling

    def _owned(self, effects: list[OwnershipEffect], now: float) -> None:
        """Perform what concerns the scheduler; a terminal of what it ran gets the scheduler's account."""
        for effect in effects:
            match effect:
                case Enqueue():
                    self._place(effect, now)
                case Run():
                    self._stopped.pop(effect.request.id, None)
                    self.scheduler.run(effect.request, effect.output_ids, now, effect.deadline, effect.alone)
                case Stop():
                    self._lobby.pop(effect.request_id, None)
                    self.placement.gone(effect.request_id)
                    had = self.scheduler.stop(effect.request_id, now)
                    if had is not None:
                        self._stopped[effect.request_id] = had
                case Append(record=Terminal() as record) if effect.request_id in self._stopped:
                    had = self._stopped.pop(effect.request_id)
                    usage = replace(had.usage, output_tokens=len(record.output_ids))
                    timings = _fill(had.timings, _rows(record.timings))
                    record = replace(record, usage=usage, timings=timings)
                    self.ownership.amend(effect.request_id, record)
                    self._out.append(replace(effect, record=record))
                case Closed():
                    self._lobby.pop(effect.request_id, None)
                    self.placement.gone(effect.request_id)
                    self._stopped.pop(effect.request_id, None)
                    self._out.append(effect)
                case _:
                    self._out.append(effect)

    def _settle(self, now: float) -> None:
        """Carry the scheduler's notes to ownership until neither has more to say."""
        while True:
            taken = self.scheduler.take()
            self._out.extend(taken.effects)
            if not taken.notes:
                return
            for note in taken.notes:
                if isinstance(note, Distrusted):
                    self._out.append(note)
                    continue
                match note:
                    case Admitted():
                        self.placement.gone(note.request_id)
                        self._out.append(note)
                    case Ended():
                        self.placement.gone(note.request_id)
                        self.placement.ended(len(note.output_ids))
                self._owned(self.ownership.handle(note), now)
