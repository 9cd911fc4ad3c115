"""A batcher in a few lines: runs sequences in steps over executors that are chained in this process.

It splits prompts by a token budget, mixes them with decodes, hands out blocks in no order, and can throw a
sequence's cache away in the middle or give it blocks that another one filled.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np

from chassis.messages.pipeline import SlotStart
from chassis.messages.sampling import Sampling, Shaping
from shard_worker.executor import Executor, ShapingColumns, StageSpec, StepInputs
from shard_worker.shaping import SlotShape, columns

NOTHING = memoryview(b"")
VOCAB_SIZE_MAX = 1 << 20


@dataclass
class Sequence:
    prompt: list[int]
    num_output: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    shaping: Shaping | None = None
    table: list[int] = field(default_factory=list)
    computed: int = 0
    output: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def done(self) -> bool:
        return len(self.output) == self.num_output


@dataclass(frozen=True)
class Row:
    sequence: Sequence
    num_tokens: int

    @property
    def end(self) -> int:
        return self.sequence.computed + self.num_tokens

    @property
    def samples(self) -> bool:
        return self.end == len(self.sequence.tokens)


def _shaping(sampling: Items[Sequence]) -> ShapingColumns | None:
    """As a slot that starts anew would have it; that steps give the same is for test_inputs."""
    shapes = []
    for place, sequence in enumerate(sampling):
        if sequence.shaping is not None:
            follows = sequence.shaping.follows
            start = SlotStart(
                Sampling(shaping=sequence.shaping),
                sequence.seed,
                prompt_len=len(sequence.prompt) if follows else 0,
                before=tuple(sequence.tokens) if follows else (),
            )
            shapes.append((place, SlotShape(start, VOCAB_SIZE_MAX)))
    index = np.array([len(s.output) for s in sampling], np.int32)
    return columns(shapes, index) if shapes else None


def step_inputs(rows: Items[Row], block_size: int) -> StepInputs:
    counts = [r.num_tokens for r in rows]
    starts = [r.sequence.computed for r in rows]
    widest = max(len(r.sequence.table) for r in rows)
    tables = np.zeros((len(rows), widest), np.int32)
    for i, r in enumerate(rows):
        tables[i, : len(r.sequence.table)] = r.sequence.table
    positions = np.concatenate(
        [np.arange(s, s + c, dtype=np.int32) for s, c in zip(starts, counts, strict=True)]
    )
    row_of = np.repeat(np.arange(len(rows)), counts)
    sampling = [r.sequence for r in rows if r.samples]
    return StepInputs(
        token_ids=np.concatenate(
            [np.array(r.sequence.tokens[r.sequence.computed : r.end], np.uint32) for r in rows]
        ),
        positions=positions,
        row_offsets=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        context_lens=np.array([r.end for r in rows], np.int32),
        kv_slots=tables[row_of, positions // block_size].astype(np.int64) * block_size
        + positions % block_size,
        block_tables=tables,
        sample_rows=np.array([i for i, r in enumerate(rows) if r.samples], np.int32),
        temperature=np.array([s.temperature for s in sampling], np.float32),
        top_k=np.array([s.top_k for s in sampling], np.int32),
        top_p=np.array([s.top_p for s in sampling], np.float32),
        seeds=np.array([s.seed for s in sampling], np.uint64),
        output_index=np.array([len(s.output) for s in sampling], np.int32),
        shaping=_shaping(sampling),
    )


class Driver:
    """Loads `executors` as the stages of one pipeline and runs sequences to their ends."""

    def __init__(
        self, executors: Items[Executor], ends: Items[int], block_size: int = 4, step_tokens: int = 64
    ) -> None:
        assert len(executors) == len(ends)
        self.executors, self.block_size, self.step_tokens = executors, block_size, step_tokens
        sizes = []
        for i, (executor, end) in enumerate(zip(executors, ends, strict=True)):
            first = ends[i - 1] if i else 0
            spec = StageSpec(i, len(ends), first, end, block_size, 64, step_tokens)
            sizes.append(executor.load(spec).num_blocks)
        self.free = np.random.default_rng(7).permutation(min(sizes)).tolist()
        self.steps = 0

    def step(self, rows: Items[Row]) -> None:
        for row in rows:
            while len(row.sequence.table) * self.block_size < row.end:
                row.sequence.table.append(self.free.pop())
        inputs = step_inputs(rows, self.block_size)
        carried = NOTHING
        for executor in self.executors:
            result = executor.run(inputs, carried)
            carried = memoryview(bytes(result.activations))
        token_ids = iter(result.token_ids.tolist())
        for row in rows:
            samples = row.samples
            row.sequence.computed = row.end
            if samples:
                row.sequence.output.append(next(token_ids))
        assert next(token_ids, None) is None
        self.steps += 1

    def plan(self, sequences: Items[Sequence], chunk: int) -> list[Row]:
        """Decodes first, then prompts, in chunks, as far as the step's tokens go."""
        room, rows = self.step_tokens, []
        pending = [s for s in sequences if not s.done]
        for sequence in sorted(pending, key=lambda s: len(s.tokens) - s.computed > 1):
            num_tokens = min(len(sequence.tokens) - sequence.computed, chunk, room)
            if num_tokens:
                rows.append(Row(sequence, num_tokens))
                room -= num_tokens
        return rows

    def run(self, sequences: Items[Sequence], chunk: int = 64) -> list[list[int]]:
        while rows := self.plan(sequences, chunk):
            self.step(rows)
        return [s.output for s in sequences]

    def preempt(self, sequence: Sequence) -> None:
        """Its cache is gone; its tokens are computed again."""
        self.free = sequence.table[::-1] + self.free
        sequence.table, sequence.computed = [], 0

    def share(self, source: Sequence, target: Sequence) -> int:
        """The whole blocks that both have in common, but for the last prompt token. Returns hit tokens."""
        same = 0
        while (
            same < min(len(target.prompt) - 1, source.computed) and source.tokens[same] == target.prompt[same]
        ):
            same += 1
        blocks = same // self.block_size
        target.table, target.computed = source.table[:blocks], blocks * self.block_size
        return target.computed
