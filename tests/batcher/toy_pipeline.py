"""A pipeline and a kvstore small enough to be obviously right, driven by a seeded dice.

The workers' memory holds token ids instead of keys and values; the next token is a function of the prefix
as read back through the block table, so that a wrong table, block or order gives a wrong answer.
"""

import hashlib
import struct
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

from batcher.block_hash import BlockHasher, Extras, chain, namespace
from batcher.events import (
    Admitted,
    AttachPool,
    BlockEffect,
    BlocksExchanged,
    BlocksMatched,
    Distrusted,
    Ended,
    ExchangeBlocks,
    MatchBlocks,
    PoolAttached,
    Row,
    StepPlan,
    StepReturned,
    TokensMade,
)
from batcher.growth import GrowthReserve
from batcher.scheduler import Scheduler, SchedulerConfig
from batcher.sequence import Clock, Phase, Sequence
from batcher.stops import End, Stops
from chassis.ids import BlockHash, BlockId, Epoch, GatewayId, RequestId
from chassis.messages.pipeline import LAST_SAMPLED
from chassis.messages.request import Limits, Reason, Request, Sampling

VOCAB = 40
EOS = 39
TOKEN_BYTES = tuple(bytes([97 + i % 26]) * (1 + i % 2) for i in range(EOS)) + (b"",)
STOPS = Stops(TOKEN_BYTES, (EOS,))


def next_token(prefix: list[int]) -> int:
    digest = hashlib.blake2b(struct.pack(f"<{len(prefix)}i", *prefix), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB


def make_request(
    name: str,
    prompt_ids: list[int],
    limits: Limits,
    priority: int = 5,
    tenant: str = "t",
) -> Request:
    return Request(
        id=RequestId(name),
        tenant=tenant,
        gateway=GatewayId("g"),
        model="toy",
        prompt_ids=tuple(prompt_ids),
        seed=1,
        sampling=Sampling(),
        limits=limits,
        priority=priority,
    )


def oracle(request: Request, context_len_max: int) -> tuple[End, tuple[int, ...]]:
    """The one right answer."""
    ids = list(request.prompt_ids)
    watch = STOPS.watch(request.limits, len(ids), context_len_max)
    while True:
        ids.append(next_token(ids))
        end = watch.push(ids[-1])
        if end is not None:
            return end, tuple(ids[len(request.prompt_ids) :])


class ToyWorkers:
    """One memory for all stages; steps are executed whole and in order."""

    def __init__(self, block_size_tokens: int, num_blocks: int) -> None:
        self.block_size_tokens = block_size_tokens
        self.memory: dict[int, list[int]] = {b: [-1] * block_size_tokens for b in range(num_blocks)}
        self.form()

    def form(self) -> None:
        self.tables: dict[int, list[int]] = {}
        self.sampled: dict[int, int] = {}  # by each slot's last row
        self.void: set[int] = set()  # slots whose blocks were found to hold something else
        self.number = 0

    def execute(self, plan: StepPlan) -> tuple[int, ...]:
        assert plan.number == self.number + 1, "a gap or a repeat"
        self.number = plan.number
        for slot in plan.freed_slots:
            self.tables.pop(slot, None)
            self.sampled.pop(slot, None)
        written: set[tuple[int, int]] = set()
        size = self.block_size_tokens
        for source, target in plan.copies:
            self.memory[target] = list(self.memory[source])
        for row in plan.rows:
            if row.fresh:
                self.tables[row.slot] = list(row.new_blocks)
                self.void.discard(row.slot)
            else:
                self.tables[row.slot].extend(row.new_blocks)
            table = self.tables[row.slot]
            token_ids = row.token_ids
            if LAST_SAMPLED in token_ids:
                assert row.samples and not row.fresh and len(token_ids) == 1
                token_ids = (self.sampled[row.slot],)
            for position, token_id in enumerate(token_ids, row.start):
                place = (table[position // size], position % size)
                assert place not in written, "two rows write one place in one step"
                written.add(place)
                self.memory[place[0]][place[1]] = token_id
        drawn = [
            (row.slot, next_token(self.read(row.slot, row.start + len(row.token_ids))))
            for row in plan.rows
            if row.samples
        ]
        for row in plan.rows:
            self.sampled.pop(row.slot, None)
        self.sampled.update(drawn)
        return tuple(token_id for _, token_id in drawn)

    def written_by(self, plans: Iterable[StepPlan]) -> set[int]:
        """The blocks that these steps, which come next, will write, or copy."""
        size = self.block_size_tokens
        written: set[int] = set()
        tables = {slot: list(table) for slot, table in self.tables.items()}
        for plan in plans:
            written.update(block for copy in plan.copies for block in copy)
            for row in plan.rows:
                table = [*([] if row.fresh else tables[row.slot]), *row.new_blocks]
                tables[row.slot] = table
                written.update(table[i // size] for i in range(row.start, row.start + len(row.token_ids)))
        return written

    def read(self, slot: int, length: int) -> list[int]:
        size, table = self.block_size_tokens, self.tables[slot]
        return [self.memory[table[i // size]][i % size] for i in range(length)]


class ToyKvStore:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.attachment = -1
        self.refs: dict[int, int] = {}
        self.free: deque[int] = deque(range(num_blocks))
        self.hashes: dict[int, bytes] = {}  # of blocks, held or cached
        self.index: dict[bytes, int] = {}
        self.cached: dict[int, None] = {}  # oldest first
        self.lied = False

    def restart(self) -> None:
        self.__init__(self.num_blocks)  # type: ignore[misc]

    def attach(self, effect: AttachPool) -> tuple[int, int] | None:
        if effect.call <= self.attachment:
            return None
        self.attachment = effect.call
        committed = dict(effect.committed)
        self.refs = {}
        for block in effect.held:
            self.refs[block] = self.refs.get(block, 0) + 1
        for block in map(BlockId, range(self.num_blocks)):
            if block in self.refs:
                self._forget(block)
                if block in committed:
                    self._name(block, committed[block])
                self.cached.pop(block, None)
            elif block in self.hashes:
                self.cached[block] = None
        self.free = deque(b for b in range(self.num_blocks) if b not in self.refs and b not in self.cached)
        return len(self.free), len(self.cached)

    def _name(self, block: int, block_hash: bytes) -> None:
        if block_hash not in self.index:
            self.index[block_hash] = block
            self.hashes[block] = block_hash

    def _forget(self, block: int) -> None:
        block_hash = self.hashes.pop(block, None)
        if block_hash is not None:
            del self.index[block_hash]

    def match(self, effect: MatchBlocks, attachment: int) -> tuple[tuple[BlockId, ...], ...] | None:
        if attachment != self.attachment:
            return None
        answer = []
        for asked in effect.chains:
            hit = []
            for block_hash in asked:
                cached = self.index.get(block_hash)
                if cached is None:
                    break
                self.cached.pop(cached, None)
                self.refs[cached] = self.refs.get(cached, 0) + 1
                hit.append(BlockId(cached))
            answer.append(tuple(hit))
        return tuple(answer)

    def lie(self, dice: Random, blocks: tuple[BlockId, ...]) -> tuple[BlockId, ...]:
        """Another block than the right one."""
        place = dice.randrange(len(blocks))
        return (*blocks[:place], BlockId(dice.randrange(self.num_blocks)), *blocks[place + 1 :])

    def exchange(self, effect: ExchangeBlocks, attachment: int) -> tuple[BlockId, ...] | None:
        if attachment != self.attachment:
            return None
        ended = Counter(effect.releases) | Counter(effect.bad)
        if any(count > self.refs.get(block, 0) for block, count in ended.items()):
            assert self.lied, "gives back what it does not lease"
            return None
        for block in effect.bad:
            self._forget(block)
        for block, block_hash, _ in effect.commits:
            assert self.refs[block] == 1, "commits what it does not lease"
            self._name(block, block_hash)
        for block in effect.releases:
            self.refs[block] -= 1
            if self.refs[block] == 0:
                del self.refs[block]
                if block in self.hashes:
                    self.cached[block] = None
                else:
                    self.free.append(block)
        leased: list[BlockId] = []
        while len(leased) < effect.lease and (self.free or self.cached):
            if self.free:
                blank = self.free.popleft()
            else:
                blank = next(reversed(self.cached))
                del self.cached[blank]
                self._forget(blank)
            self.refs[blank] = 1
            leased.append(BlockId(blank))
        return tuple(leased)

    def check(self) -> None:
        held = [*self.refs, *self.free, *self.cached]
        assert sorted(held) == list(range(self.num_blocks)), "blocks leaked in the toy kvstore"


class Careless(GrowthReserve):
    """Leaves nothing for anybody to grow into, so that many give way."""

    def blocks(self, running: Iterable[Sequence], head: Sequence) -> int:
        return 0


@dataclass
class World:
    """Runs a scheduler against the toys. Every choice of the world is the dice's."""

    dice: Random
    config: SchedulerConfig
    num_blocks: int
    num_stages: int = 1
    trouble: float = 0.0  # how often a call to kvstore fails
    careless: bool = False
    lies: float = 0.0  # how often a match names another block
    waits: float = 0.0  # how often nothing is drawn for a row yet: its grammar is compiled still
    now: float = 0.0
    epoch: int = 0
    attachment: int = -1
    formed: bool = False
    requests: dict[RequestId, Request] = field(default_factory=dict)
    outputs: dict[RequestId, list[int]] = field(default_factory=dict)
    ended: dict[RequestId, Ended] = field(default_factory=dict)
    admitted: list[RequestId] = field(default_factory=list)
    added_at: dict[RequestId, float] = field(default_factory=dict)
    alone: set[RequestId] = field(default_factory=set)
    distrusted: list[Distrusted] = field(default_factory=list)
    steps: int = 0
    planned_at: list[float] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.config, STOPS)
        if self.careless:
            self.scheduler._admission.reserve = Careless(self.config.block_size_tokens)
        self.workers = ToyWorkers(self.config.block_size_tokens, self.num_blocks)
        self.kvstore = ToyKvStore(self.num_blocks)
        self.ring: deque[StepPlan] = deque()  # sent, not executed
        self.calls: deque[tuple[BlockEffect, int]] = deque()
        self.sampling: Counter[RequestId] = Counter()  # rows in flight of what it has begun last
        self.beginnings: Counter[RequestId] = Counter()
        self.begun: dict[tuple[int, RequestId], int] = {}  # of the row of that step
        self.steps_alone: set[int] = set()

    # ---- what the core would do

    def take(self) -> None:
        taken = self.scheduler.take()
        for note in taken.notes:
            match note:
                case Admitted():
                    self.admitted.append(note.request_id)
                case TokensMade():
                    for request_id, ids in zip(note.request_ids, note.ids, strict=True):
                        self.outputs.setdefault(request_id, []).extend(ids)
                case Ended():
                    assert note.request_id not in self.ended
                    self.ended[note.request_id] = note
                case Distrusted():
                    self.distrusted.append(note)
        for effect in taken.effects:
            self.calls.append((effect, self.attachment))
        self.scheduler.check()

    def chain_of(self, prompt_ids: list[int], tenant: str = "t") -> tuple[BlockHash, ...]:
        """What the blocks of a prompt are called."""
        config = self.config
        salt = Extras(salt=tenant.encode() if config.salt_by_tenant else None)
        return chain(config.namespace, prompt_ids, config.block_size_tokens, salt)

    def add(self, request: Request, deadline: float | None = None) -> None:
        self.requests[request.id] = request
        self.added_at[request.id] = self.now
        self.scheduler.add_waiting(request, self.now, 0.5, deadline)
        self.take()

    def run(self, request: Request, output_ids: tuple[int, ...], alone: bool) -> None:
        self.requests[request.id] = request
        self.outputs[request.id] = list(output_ids)
        self._begin_anew(request.id)
        (self.alone.add if alone else self.alone.discard)(request.id)
        self.scheduler.run(request, output_ids, self.now, None, alone, age_s=0.25)
        self.take()

    def stop(self, request_id: RequestId) -> None:
        had = self.scheduler.stop(request_id, self.now)
        assert had is not None and list(had.output_ids) == self.outputs.get(request_id, [])
        self._begin_anew(request_id)
        self.take()

    def _begin_anew(self, request_id: RequestId) -> None:
        self.beginnings[request_id] += 1
        self.sampling[request_id] = 0

    def plan(self) -> bool:
        self.scheduler.tick(self.now)
        plan = self.scheduler.plan(self.now)
        self.planned_at.append(self.now)
        self.take()
        if plan is None:
            return False
        self._check_plan(plan)
        self.ring.append(plan)
        return True

    def _check_plan(self, plan: StepPlan) -> None:
        config = self.config
        self.steps += bool(plan.rows)
        assert plan.epoch == self.epoch
        assert sum(len(row.token_ids) for row in plan.rows) <= config.step_tokens_max
        assert len(plan.rows) <= config.sequences_max
        assert len({row.slot for row in plan.rows}) == len(plan.rows)
        assert not any(sent.number in self.steps_alone for sent in self.ring), "another shares its ring"
        if any(row.request_id in self.alone for row in plan.rows):
            assert len(plan.rows) == 1 and not self.ring, "it shares the ring"
            self.steps_alone.add(plan.number)
        for row in plan.rows:
            if row.fresh:
                self._begin_anew(row.request_id)
            unknown = self.sampling[row.request_id]
            self.begun[plan.number, row.request_id] = self.beginnings[row.request_id]
            self.sampling[row.request_id] += row.samples
            request = self.requests[row.request_id]
            sequence_ids = [*request.prompt_ids, *self.outputs.get(row.request_id, [])]
            end = row.start + len(row.token_ids)
            if unknown:
                assert config.run_ahead and self.num_stages == 1 and row.request_id not in self.alone
                assert unknown == 1, "two unknown tokens"
                assert row.token_ids == (LAST_SAMPLED,) and row.start == len(sequence_ids)
                assert row.output_index < request.limits.max_tokens, "behind what ends by length"
            else:
                assert list(row.token_ids) == sequence_ids[row.start : end]
            assert row.samples == (end == len(sequence_ids) + unknown)
            assert row.output_index == len(sequence_ids) + unknown - len(request.prompt_ids)

    # ---- what the world does

    def form(self, pool_changed: bool) -> None:
        self.epoch += 1
        self.formed = True
        self.ring.clear()
        self.calls.clear()
        self.begun.clear()
        self.steps_alone.clear()
        self.workers.form()
        if pool_changed:
            self.workers = ToyWorkers(self.config.block_size_tokens, self.num_blocks)
            attachment, self.kvstore = self.kvstore.attachment, ToyKvStore(self.num_blocks)
            self.kvstore.attachment = attachment
        self.scheduler.form(Epoch(self.epoch), self.num_blocks, self.num_stages, pool_changed, self.now)
        self.take()

    def lose(self) -> None:
        """The pipeline goes; some of its steps were executed and nobody hears of it."""
        for _ in range(self.dice.randint(0, len(self.ring))):
            self.workers.execute(self.ring.popleft())
        held = self.scheduler.unform(self.now)
        assert set(held) <= set(self.scheduler.request_ids())
        self.formed = False
        self.ring.clear()
        self.take()

    def execute(self) -> None:
        if not self.ring:
            return
        plan = self.ring.popleft()
        tokens = self.workers.execute(plan)
        tokens, waiting = self._undrawn(plan, tokens)
        void = tuple([place for place, row in enumerate(plan.rows) if self._is_void(row)])
        for row in plan.rows:
            if row.slot not in self.workers.void and row.output_index == len(
                self.outputs.get(row.request_id, [])
            ):
                self._check_memory(row.request_id, row.slot, row.start + len(row.token_ids))
        for row in plan.rows:
            same = self.begun.pop((plan.number, row.request_id)) == self.beginnings[row.request_id]
            self.sampling[row.request_id] -= row.samples and same
            undrawn = row.request_id in waiting.values()
            if same and (row.slot in self.workers.void or undrawn):
                self._begin_anew(row.request_id)
        places = tuple(waiting)
        returned = StepReturned(
            self.now, plan.epoch, plan.number, tokens, void_rows=void, waiting_places=places
        )
        assert self.scheduler.returned(returned)
        self.take()

    def _undrawn(
        self, plan: StepPlan, tokens: tuple[int, ...]
    ) -> tuple[tuple[int, ...], dict[int, RequestId]]:
        """Of some rows that sample nothing is drawn: their ids stand for nothing. Whose, by place."""
        sampling = [row for row in plan.rows if row.samples]
        waiting = {
            i: row.request_id
            for i, row in enumerate(sampling)
            if self.waits and self.dice.random() < self.waits
        }
        drawn = list(tokens)
        for place in waiting:
            drawn[place] = self.workers.sampled[sampling[place].slot] = self.dice.randrange(VOCAB)
        return tuple(drawn), waiting

    def _is_void(self, row: Row) -> bool:
        """Whether the memory that it read is not its own, as workers find out."""
        ids = [*self.requests[row.request_id].prompt_ids, *self.outputs.get(row.request_id, [])][: row.start]
        if self.lies and self.workers.read(row.slot, row.start)[: len(ids)] != ids:
            self.workers.void.add(row.slot)
        return row.slot in self.workers.void

    def _check_memory(self, request_id: RequestId, slot: int, length: int) -> None:
        if request_id in self.scheduler.request_ids():
            ids = [*self.requests[request_id].prompt_ids, *self.outputs.get(request_id, [])]
            assert self.workers.read(slot, length) == ids[:length], "the memory holds another prefix"

    def _check_unheld(self) -> None:
        """What kvstore may fill from elsewhere, no step on its way writes."""
        unheld = set(range(self.num_blocks)) - set(self.kvstore.refs)
        assert not unheld & self.workers.written_by(self.ring), "a row in flight writes a free block"

    def answer(self) -> None:
        """One call to kvstore ends, one way or another."""
        if not self.calls:
            return
        effect, attachment = self.calls.popleft()
        fails = self.dice.random() < self.trouble
        happens = not fails or self.dice.random() < 0.5
        store = self.kvstore
        match effect:
            case AttachPool():
                room = store.attach(effect) if happens else None
                failed = fails or room is None
                if not failed:
                    self.attachment = effect.call
                self.scheduler.handle_blocks(PoolAttached(self.now, effect.call, *(room or (0, 0)), failed))
            case MatchBlocks():
                blocks = store.match(effect, attachment) if happens else None
                failed = fails or blocks is None
                if blocks and self.dice.random() < self.lies:
                    store.lied = True
                    blocks = tuple(store.lie(self.dice, found) if found else found for found in blocks)
                self.scheduler.handle_blocks(
                    BlocksMatched(self.now, effect.call, () if failed else blocks or (), failed)
                )
            case ExchangeBlocks():
                leased = store.exchange(effect, attachment) if happens else None
                failed = fails or leased is None
                if leased is not None:
                    self._check_unheld()
                self.scheduler.handle_blocks(
                    BlocksExchanged(
                        self.now,
                        effect.call,
                        () if failed else leased or (),
                        len(store.free),
                        len(store.cached),
                        failed,
                    )
                )
        self.take()

    def finish(self, rounds_max: int) -> None:
        """No more trouble: all that it holds must end. Time passes only when the scheduler says that it waits
        for time, so that a wake-up it forgets is found."""
        self.trouble = 0.0
        if not self.formed:
            self.form(pool_changed=False)
        for _ in range(rounds_max):
            while self.plan():
                pass
            if not self.scheduler.request_ids():
                break
            self.turn()
        assert not self.scheduler.request_ids(), "a request does not end"
        for _ in range(1000):
            if not (self.ring or self.calls or self.scheduler.lease_waits):
                break
            self.turn()
            self.plan()
        assert not self.scheduler.lease_waits, "kvstore never hears the last of it"
        assert not list(self.scheduler.tables())
        self.kvstore.check()

    def turn(self) -> None:
        """Whatever comes next: an answer, a step, or time."""
        if self.calls and (not self.ring or self.dice.random() < 0.5):
            self.answer()
        elif self.ring:
            self.execute()
        else:
            wake_at = self.scheduler.wake_at()
            assert wake_at is not None and wake_at < self.now + 0.5, "it waits for nothing"
            self.now = max(self.now, wake_at)

    def check_answers(self) -> None:
        for request_id, ended in self.ended.items():
            if ended.reason in (Reason.STOP, Reason.LENGTH):
                capacity = self.num_blocks * self.config.block_size_tokens
                room = min(self.config.context_len_max, capacity)
                end, output = oracle(self.requests[request_id], room)
                assert ended.output_ids == output
                assert (ended.reason, ended.byte_cut) == (end.reason, end.byte_cut)


def make_config(**changes: object) -> SchedulerConfig:
    values: dict[str, object] = {
        "context_len_max": 4096,
        "namespace": namespace("toy", "float32", "plain"),
        "block_size_tokens": 4,
        "step_tokens_max": 32,
        "sequences_max": 8,
        "lease_low_blocks": 2,
        "lease_high_blocks": 8,
        "idle_step_ms": 1_000_000,
    }
    return SchedulerConfig(**{**values, **changes})  # type: ignore[arg-type]


def make_sequence(
    name: str,
    prompt_len: int = 4,
    order: tuple[int, int] = (0, 0),
    block_size_tokens: int = 4,
    limits: Limits | None = None,
) -> Sequence:
    request = make_request(name, list(range(prompt_len)), limits or Limits(max_tokens=8))
    watch = STOPS.watch(request.limits, prompt_len, 4096)
    hasher = BlockHasher(namespace("toy", "float32", "plain"), block_size_tokens, Extras(salt=b"t"))
    return Sequence(request, (), watch, hasher, Clock(0.0, 0.0, Phase.WAITING), order)
