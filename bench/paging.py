"""How many sequences fit into the same memory, paged and with room for its longest reserved for each.

The batcher's Scheduler and kvstore's Ledger as they are, no process, no tensor: a step is whatever the
scheduler plans, and requests always wait. Lengths are log-normal, as those of chats are: many short, a long
tail. Prompts have a median of 128 tokens and a mean of 250, answers 192 and 280, both together at most 4,096:
of the size that public chat traces show. Nobody tells how long an answer becomes: each may take what the
context leaves, and ends by its end token. Prompts share nothing, so that no gain is the prefix cache's. What
admission keeps free for the running to grow into, and blocks leased ahead of need, are reported beside the
waste: they are anybody's.
"""

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import NamedTuple

from batcher import events as ev
from batcher.block_hash import namespace
from batcher.scheduler import Scheduler, SchedulerConfig
from batcher.stops import Stops
from bench.results_file import Sample, table, write
from chassis.ids import Epoch, GatewayId, RequestId
from chassis.messages.kvstore import Attach, Commit, Exchange, PoolRef
from chassis.messages.request import Limits, Request, Sampling
from kvstore.ledger import Ledger
from shard_worker.fake_model import EOS_ID, TOKEN_BYTES

STEP_S = 0.01
WAITING = 16  # kept in the line
OUTPUT_ID = 97


@dataclass(frozen=True, slots=True)
class Setting:
    context_len: int = 4096
    contiguous: int = 64  # sequences whose longest fit: this is the memory
    block_size_tokens: int = 16
    sequences_max: int = 1024  # more than ever fit
    step_tokens_max: int = 2048
    waiting: int = WAITING
    warm_up_steps: int = 1500
    steps: int = 2500
    seeds: tuple[int, ...] = (1, 2, 3)
    pool_tokens: int | None = None  # None: what `contiguous` says

    @property
    def num_blocks(self) -> int:
        memory = self.pool_tokens or self.contiguous * self.context_len
        return memory // self.block_size_tokens


@dataclass(slots=True)
class Seen:
    """Of one run, one value a step."""

    running: list[int] = field(default_factory=list)
    stored_tokens: list[int] = field(default_factory=list)
    table_tokens: list[int] = field(default_factory=list)  # that the blocks of all tables have room for
    leased_tokens: list[int] = field(default_factory=list)  # and those leased ahead
    recomputed: int = 0
    computed: int = 0
    preemptions: int = 0
    contiguous_stored: float = 0.0  # tokens of a sequence, on average over its life

    @property
    def wasted(self) -> float:
        """Of the memory that sequences take: the ends of their last blocks."""
        return 1 - sum(self.stored_tokens) / sum(self.table_tokens)


class Lengths(NamedTuple):
    """In tokens. An answer that is as long as it may be ends by that."""

    prompt: int
    output: int
    output_max: int


Draw = Callable[[random.Random], Lengths]


def draw_chat(rng: random.Random, context_len: int = 4096) -> Lengths:
    while True:
        prompt = max(1, round(rng.lognormvariate(4.85, 1.2)))
        output = max(1, round(rng.lognormvariate(5.26, 0.9)))
        if prompt + output <= context_len:
            return Lengths(prompt, output, context_len - prompt)


class Pipeline:
    """A scheduler over a ledger; stages that are done at once."""

    def __init__(self, setting: Setting, seed: int, draw: Draw = draw_chat) -> None:
        self._setting = setting
        self._draw = draw
        self._rng = random.Random(seed)
        self._lengths: dict[RequestId, Lengths] = {}
        self._written: dict[RequestId, int] = {}  # tokens computed so far
        self._ref = PoolRef("g", Epoch(1), 1)
        self._arrived = 0
        self.now = 0.0
        self.seen = Seen()
        self.ledger = Ledger(blocks_max=setting.num_blocks)
        self.scheduler = Scheduler(
            SchedulerConfig(
                context_len_max=setting.context_len,
                namespace=namespace("d", "", "paged"),
                block_size_tokens=setting.block_size_tokens,
                sequences_max=setting.sequences_max,
                step_tokens_max=setting.step_tokens_max,
                steps_in_flight_max=1,
            ),
            Stops(TOKEN_BYTES, (EOS_ID,)),
        )
        self.scheduler.form(Epoch(1), setting.num_blocks, 1, True, 0.0)
        self._settle()

    def step(self) -> None:
        self.now += STEP_S
        while self.scheduler.num_waiting < self._setting.waiting:
            self._arrive()
        plan = self.scheduler.plan(self.now)
        self._settle()
        if plan is None:
            return
        sampled = tuple(self._token(row) for row in plan.rows if row.samples)
        for row in plan.rows:
            first, end = self._written.get(row.request_id, 0), row.start + len(row.token_ids)
            self.seen.recomputed += max(0, min(first, end) - row.start)
            self._written[row.request_id] = max(first, end)
        self.seen.computed += sum(len(row.token_ids) for row in plan.rows)
        self.scheduler.returned(ev.StepReturned(self.now, plan.epoch, plan.number, sampled))
        self._settle()

    def look(self) -> None:
        """Notes how the memory is used between two steps."""
        running = list(self.scheduler._running)
        self.seen.running.append(len(running))
        self.seen.stored_tokens.append(sum(s.num_computed for s in running))
        size = self._setting.block_size_tokens
        self.seen.table_tokens.append(size * sum(len(s.blocks) for s in running))
        self.seen.leased_tokens.append(size * self.ledger.stats("g").leased)

    def _arrive(self) -> None:
        self._arrived += 1
        lengths = self._draw(self._rng)
        request_id = RequestId(f"r{self._arrived}")
        self._lengths[request_id] = lengths
        request = Request(
            id=request_id, tenant="t", gateway=GatewayId("gw"), model="fake",
            prompt_ids=tuple(self._rng.randrange(200) for _ in range(lengths.prompt)), seed=1,
            sampling=Sampling(1.0), limits=Limits(max_tokens=lengths.output_max),
        )  # fmt: skip
        self.scheduler.add_waiting(request, self.now, 0.0, None)

    def _token(self, row: ev.Row) -> int:
        lengths = self._lengths[row.request_id]
        over = row.output_index >= lengths.output - 1 and lengths.output < lengths.output_max
        return EOS_ID if over else OUTPUT_ID

    def _settle(self) -> None:
        while True:
            taken = self.scheduler.take()
            for note in taken.notes:
                if isinstance(note, ev.Ended):
                    del self._lengths[note.request_id]
                    self.seen.preemptions += note.timings.preemptions
                    self._written.pop(note.request_id, None)
            if not taken.effects:
                return
            for effect in taken.effects:
                self.scheduler.handle_blocks(self._call(effect))

    def _call(self, effect: ev.BlockEffect) -> ev.BlockEvent:
        match effect:
            case ev.AttachPool(call=call):
                size = self._setting.block_size_tokens
                attached = self.ledger.attach(Attach(self._ref, ("w",), self._setting.num_blocks, size, "n"))
                return ev.PoolAttached(self.now, call, attached.free, attached.cached)
            case ev.MatchBlocks(call=call, chains=chains):
                return ev.BlocksMatched(self.now, call, self.ledger.match(self._ref, chains))
            case ev.ExchangeBlocks(call=call):
                commits = tuple(Commit(*commit) for commit in effect.commits)
                exchange = Exchange(self._ref, commits, effect.releases, effect.lease, effect.keeps)
                done = self.ledger.exchange(exchange)
                return ev.BlocksExchanged(self.now, call, done.leased, done.free, done.cached)


def contiguous_stored(lengths: Sequence[Lengths]) -> float:
    """Tokens that a sequence holds, on average over its steps: from its prompt to its end."""
    return sum(o * (p + o / 2) for p, o, _ in lengths) / sum(o for _, o, _ in lengths)


def run(setting: Setting, seed: int) -> Seen:
    pipeline = Pipeline(setting, seed)
    for _ in range(setting.warm_up_steps):
        pipeline.step()
    pipeline.seen = Seen()
    for _ in range(setting.steps):
        pipeline.step()
        pipeline.look()
    pipeline.scheduler.check()
    pipeline.ledger.check()
    rng = random.Random(seed)
    lengths = [draw_chat(rng, setting.context_len) for _ in range(20_000)]
    pipeline.seen.contiguous_stored = contiguous_stored(lengths)
    return pipeline.seen


def main(setting: Setting) -> None:
    runs = [run(setting, seed) for seed in setting.seeds]
    memory = setting.contiguous * setting.context_len
    values = {
        "paging.sequences": Sample(tuple(mean(r.running) for r in runs), "sequences"),
        "paging.sequences_ratio": Sample(tuple(mean(r.running) / setting.contiguous for r in runs), "ratio"),
        "paging.wasted": Sample(tuple(r.wasted for r in runs), "ratio"),
        "paging.leased_ahead": Sample(
            tuple((mean(r.leased_tokens) - mean(r.table_tokens)) / memory for r in runs), "ratio"
        ),
        "paging.kept_for_growth": Sample(tuple(1 - mean(r.leased_tokens) / memory for r in runs), "ratio"),
        "paging.recomputed": Sample(tuple(r.recomputed / r.computed for r in runs), "ratio"),
        "paging.contiguous_wasted": Sample(
            tuple(1 - r.contiguous_stored / setting.context_len for r in runs), "ratio"
        ),
    }
    rows = [
        ["memory for", "sequences", "wasted of what is taken"],
        ["the longest of each", str(setting.contiguous), str(values["paging.contiguous_wasted"])],
        ["what each has", str(values["paging.sequences"]), str(values["paging.wasted"])],
    ]
    sys.stdout.write(table(rows) + "\n")
    for name in ("sequences_ratio", "leased_ahead", "kept_for_growth", "recomputed"):
        sys.stdout.write(f"paging.{name}: {values[f'paging.{name}']}\n")
    preemptions = sum(r.preemptions for r in runs)
    notes = {"context_len": setting.context_len, "blocks": setting.num_blocks, "preemptions": preemptions}
    write("paging", values, notes)
