"""Pure. How this batcher comes to have a pipeline: which workers, which layers, which epoch.

Rules: an epoch is fixed by compare-and-set in the registry before any worker hears of it; workers are
claimed in layer order, all or none; a missing registry entry only stops new claims, a worker in use is
judged by its link and its steps alone; a worker that failed us is left alone until it says something new.
Two that do not reach each other are both innocent: they are not made neighbours while a spare can help.
"""

import hashlib
from dataclasses import dataclass
from enum import Enum

from batcher.arrangement import Stage as Stage
from batcher.arrangement import arrange, gain, neighbours, pair
from batcher.arrangement import split_layers as split_layers
from batcher.pool_memory import Writer, pool_generation
from batcher.rebalance import Rebalance
from chassis.ids import BootId, Epoch
from chassis.messages.registry import WorkerEntry

# ---- events and effects ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkersSeen:
    """The registry's view of this model's workers, with their entries' revisions; boots that withdrew."""

    now: float
    workers: tuple[tuple[WorkerEntry, int], ...]
    withdrawn: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EpochWritten:
    """`epoch` None: somebody else was quicker, or no answer."""

    now: float
    call: int
    epoch: Epoch | None


@dataclass(frozen=True, slots=True)
class StageFormed:
    """`kv_stamp` None: refused or unreachable; `last_epoch` is then what the worker knows, if it said, and
    `blamed` the worker that could not be reached, if it is not the one that was asked; `next_away`: the one
    that was asked did not reach its neighbour, though we reached both.
    """

    now: float
    call: int
    kv_stamp: str | None
    num_blocks: int = 0
    last_epoch: Epoch = Epoch(0)
    cause: str = ""
    blamed: BootId | None = None
    next_away: bool = False
    prior_epoch: Epoch = Epoch(0)  # whose steps the worker's KV memory saw last; 0: none
    prior_attachment: int = 0  # to kvstore, the newest that the worker heard of in it; 0: of none


@dataclass(frozen=True, slots=True)
class PipelineLost:
    """A link closed (`boot` names the worker) or a step outlived its deadline (`boot` None)."""

    now: float
    epoch: Epoch
    boot: BootId | None
    cause: str


FormationEvent = WorkersSeen | EpochWritten | StageFormed | PipelineLost


@dataclass(frozen=True, slots=True)
class WriteEpoch:
    """Fix an epoch above `above`, above the key's revision and above its value."""

    call: int
    above: Epoch


@dataclass(frozen=True, slots=True)
class FormStage:
    """Dial all workers before the first, then ask this one to form; completes as StageFormed."""

    call: int
    epoch: Epoch
    index: int
    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True)
class CloseLinks:
    """Nothing of this epoch or an older one is wanted any more."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Stood:
    epoch: Epoch
    stages: tuple[Stage, ...]
    generation: str  # of the block pool
    stamps: tuple[str, ...]
    num_blocks: int
    intact: bool = False  # no other batcher had any of the workers since we stood last
    prior_epoch: Epoch = Epoch(0)  # the one that all workers stood in before; 0: none, or they differ
    prior_attachment: int = 0  # the newest that one of them heard of in it; 0: of none


FormationEffect = WriteEpoch | FormStage | CloseLinks | Stood


ANSWER_WAIT_S = 0.2  # who gives up closes its link and says why, on another connection
FIXED_MAX = 64
APART_MAX = 8
DOUBLINGS_MAX = 16  # of the time between tries; failures go on as long as the bus is away


class State(Enum):
    SEEKING = "seeking"
    NUMBERING = "numbering"
    FORMING = "forming"
    STANDING = "standing"


@dataclass(frozen=True, slots=True)
class FormationConfig:
    num_stages: int
    retry_min_s: float = 0.05
    retry_max_s: float = 1.0
    jitter_s: float = 0.1
    call_timeout_s: float = 30.0  # a worker may have to load its layers first


class Formation:
    def __init__(self, boot: BootId, config: FormationConfig) -> None:
        self._boot = boot
        self._config = config
        self.state = State.SEEKING
        self.epoch = Epoch(0)  # the newest we asked for
        self._workers: dict[str, tuple[WorkerEntry, int]] = {}
        self._shunned: dict[str, int] = {}  # boot -> revision of the entry that failed us
        self._withdrawn: frozenset[str] = frozenset()
        self._absent: frozenset[str] = frozenset()  # of those shunned, who could not be reached
        self._apart: dict[tuple[str, str], None] = {}  # pairs that did not reach each other, the newest last
        self._suspect: str | None = None  # taken last, since the pipeline that stood was lost
        self._ours: frozenset[str] = frozenset()  # workers of our last formations, up to one that stood
        self._stages: tuple[Stage, ...] = ()
        self._stamps: list[str] = []
        self._num_blocks = 0
        self._intact = False
        self._prior = Writer()
        self._fixed: dict[Epoch, None] = {}  # our own epochs, the newest last
        self._call = 0
        self._failures = 0
        self._above = Epoch(0)
        self._retry_at: float | None = None
        self._give_up_at: float | None = None
        self._began_at = 0.0
        self._rebalance = Rebalance()
        self._compared: tuple[tuple[Stage, ...], list[WorkerEntry]] = ((), [])  # of whom `_gain` is
        self._gain = 0.0

    # ---- inputs

    def handle(self, event: FormationEvent) -> list[FormationEffect]:
        match event:
            case WorkersSeen():
                self._workers = {w.boot: (w, revision) for w, revision in event.workers}
                self._shunned = {
                    b: r for b, r in self._shunned.items() if b in self._workers and self._workers[b][1] == r
                }
                self._absent &= frozenset(self._shunned)
                self._withdrawn = frozenset(event.withdrawn)
                self._look_for_others(event)
                return self._seek(event.now) if self._retry_at is None else []
            case EpochWritten():
                return self._numbered(event)
            case StageFormed():
                return self._formed(event)
            case PipelineLost():
                return self._lost(event)

    def tick(self, now: float) -> list[FormationEffect]:
        if self._give_up_at is not None and now >= self._give_up_at:
            boot = self._stages[len(self._stamps)].worker.boot if self.state is State.FORMING else None
            return self._fail(now, boot)
        if self._retry_at is not None and now >= self._retry_at:
            self._retry_at = None
            return self._seek(now)
        return []

    def next_timer(self) -> float | None:
        times = [t for t in (self._retry_at, self._give_up_at, self._rebalance.due_at()) if t is not None]
        return min(times) if times else None

    @property
    def others_stand(self) -> bool:
        """Whether there is nothing to form of, and as many workers as make a pipeline serve somebody else."""
        if self.state is not State.SEEKING or self._choose() is not None:
            return False
        busy = [boot for boot, (worker, _) in self._workers.items() if not worker.free]
        return sum(boot not in self._absent for boot in busy) >= self._config.num_stages

    @property
    def someone_left(self) -> bool:
        """Whether a worker of the standing pipeline withdrew its entry: its links close in good order."""
        return any(s.worker.boot not in self._workers for s in self.stages)

    @property
    def someone_leaves(self) -> bool:
        """Whether one said that it leaves, and waits until it is let go."""
        return any(s.worker.boot in self._withdrawn for s in self.stages)

    def quicker(self, now: float) -> bool:
        """Whether this pipeline is to be given up for others: much quicker, or for one that leaves."""
        due_at = self._rebalance.due_at()
        return self.state is State.STANDING and due_at is not None and now >= due_at

    def stay(self, now: float) -> None:
        """It is not given up for others now."""
        self._rebalance.done(now)

    @property
    def stages(self) -> tuple[Stage, ...]:
        return self._stages if self.state is State.STANDING else ()

    # ---- steps

    def _seek(self, now: float) -> list[FormationEffect]:
        if self.state is not State.SEEKING:
            return []
        stages = self._choose()
        if stages is None:
            return []
        self._stages = stages
        self.state = State.NUMBERING
        self._began_at = now
        self._call += 1
        self._give_up_at = now + self._config.call_timeout_s
        above = max([self._above, self.epoch, *(s.worker.last_epoch for s in stages)])
        return [WriteEpoch(self._call, Epoch(above))]

    def _numbered(self, event: EpochWritten) -> list[FormationEffect]:
        if self.state is not State.NUMBERING or event.call != self._call:
            return []
        if event.epoch is None:
            return self._fail(event.now, None)
        self.epoch = event.epoch
        self._fixed[event.epoch] = None
        if len(self._fixed) > FIXED_MAX:
            del self._fixed[next(iter(self._fixed))]  # then nothing counts as intact: that is safe
        self.state = State.FORMING
        self._stamps = []
        self._num_blocks = 0
        self._intact = True
        return [self._form_next(event.now)]

    def _form_next(self, now: float) -> FormationEffect:
        self._call += 1
        self._give_up_at = now + self._config.call_timeout_s
        return FormStage(self._call, self.epoch, len(self._stamps), self._stages)

    def _formed(self, event: StageFormed) -> list[FormationEffect]:
        if self.state is not State.FORMING or event.call != self._call:
            return []
        stage = self._stages[len(self._stamps)]
        if event.kv_stamp is None:
            self._above = max(self._above, event.last_epoch)
            if event.next_away:
                self._note_apart(stage, self._stages[len(self._stamps) + 1])
                return self._fail(event.now, None)
            return self._fail(event.now, event.blamed or stage.worker.boot, event.blamed is not None)
        self._num_blocks = min(self._num_blocks or event.num_blocks, event.num_blocks)
        self._stamps.append(event.kv_stamp)
        self._intact &= event.prior_epoch in self._fixed
        said = Writer(event.prior_epoch, event.prior_attachment)
        self._prior = said if len(self._stamps) == 1 else self._prior.joined(said)
        if len(self._stamps) < len(self._stages):
            return [self._form_next(event.now)]
        self.state = State.STANDING
        self._suspect = None
        self._give_up_at = None
        self._failures = 0
        self._rebalance.stood(event.now - self._began_at)
        self._ours = frozenset(s.worker.boot for s in self._stages)
        for both in neighbours(self._stages):
            self._apart.pop(both, None)
        stamps = tuple(self._stamps)
        ranges = tuple((s.first_layer, s.end_layer) for s in self._stages)
        generation = pool_generation(stamps, ranges)
        blocks = self._num_blocks
        return [Stood(self.epoch, self._stages, generation, stamps, blocks, self._intact, *self._prior)]

    def _lost(self, event: PipelineLost) -> list[FormationEffect]:
        if event.epoch != self.epoch or self.state not in (State.STANDING, State.FORMING):
            return []
        if self.state is State.FORMING:
            if event.boot != self._stages[len(self._stamps)].worker.boot:
                return self._fail(event.now, event.boot)
            assert self._give_up_at is not None
            self._give_up_at = min(self._give_up_at, event.now + ANSWER_WAIT_S)
            return []
        self._suspect = event.boot  # the first link to close may be that of a dead one's neighbour
        return self._fail(event.now, None)

    def _fail(self, now: float, boot: str | None, unreachable: bool = False) -> list[FormationEffect]:
        """Back to seeking. The worker that failed us is left alone until its entry changes; one that was
        not there at all is no rival's doing, and the others are asked soon, before a rival has them.
        """
        if boot is not None and boot in self._workers:
            self._shunned[boot] = self._workers[boot][1]
            if unreachable:
                self._absent |= {boot}
        effects: list[FormationEffect] = []
        if self.state is not State.NUMBERING:
            effects.append(CloseLinks(self.epoch))
            self._ours |= frozenset(s.worker.boot for s in self._stages)
        was_standing = self.state is State.STANDING
        if was_standing:
            self._rebalance.done(now)
        self.state = State.SEEKING
        self._give_up_at = None
        if was_standing or unreachable:
            self._retry_at = now + self._config.retry_min_s
        else:
            self._failures += 1
            wait = self._config.retry_min_s * 2 ** min(self._failures, DOUBLINGS_MAX)
            self._retry_at = now + min(self._config.retry_max_s, wait) + self._jitter()
        return effects

    def _look_for_others(self, seen: WorkersSeen) -> None:
        """Who could take the place of one that leaves, or do better."""
        if self.state is not State.STANDING:
            return
        if self.someone_left:
            if self.someone_leaves and self._choose() is not None:
                self._rebalance.leaves(seen.now)
            return
        ours = {s.worker.boot for s in self._stages}
        usable = [w for w in self._free() if w.free and w.boot not in ours]
        usable += [self._workers[s.worker.boot][0] for s in self._stages]
        compared = (self._stages, usable)
        if compared != self._compared:  # most entries say again what they said
            self._compared, self._gain = compared, gain(self._stages, usable, self._fitness)
        self._rebalance.saw(self._gain, seen.now, 10 * self._jitter())

    def _note_apart(self, one: Stage, other: Stage) -> None:
        self._apart[pair(one, other)] = None
        if len(self._apart) > APART_MAX:
            del self._apart[next(iter(self._apart))]

    def _jitter(self) -> float:
        digest = hashlib.sha256(f"{self._boot}:{self.epoch}:{self._failures}".encode()).digest()
        return self._config.jitter_s * digest[0] / 256

    def _choose(self) -> tuple[Stage, ...] | None:
        """A worker for every stage, or None. Where only such as are apart are left, they are tried again."""
        free = self._free()
        return self._joined(free) or self._best(free)

    def _free(self) -> list[WorkerEntry]:
        return [
            w
            for boot, (w, _) in sorted(self._workers.items())
            if boot not in self._shunned
            and (w.free or boot in self._ours)
            and w.num_layers >= self._config.num_stages
        ]

    def _joined(self, free: list[WorkerEntry]) -> tuple[Stage, ...] | None:
        """The best choice without neighbours that are apart: a spare takes one's place, else the other's."""
        stages = self._best(free)
        apart = next((both for both in neighbours(stages or ()) if both in self._apart), ())
        if not apart:
            return stages
        without = (self._joined([w for w in free if w.boot != boot]) for boot in apart)
        return next((found for found in without if found is not None), None)

    def _best(self, free: list[WorkerEntry]) -> tuple[Stage, ...] | None:
        return arrange(free, self._config.num_stages, self._fitness)

    def _fitness(self, worker: WorkerEntry, index: int, layers: tuple[int, int]) -> int:
        if worker.boot == self._suspect:
            return 0
        if worker.wish:
            return 5 if (worker.wish.start, worker.wish.stop) == layers else 1
        if (worker.loaded.start, worker.loaded.stop) == layers:
            return 4
        if worker.preferred_stage == index:
            return 3
        return 2 if worker.preferred_stage is None and not worker.loaded else 1
