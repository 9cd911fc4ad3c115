"""Pure. Every sequence's block table and sampling parameters, kept as columns over slots, in numpy.

A step brings deltas: freed slots are forgotten first, fresh rows replace their slot's table and
parameters, other rows append to theirs. `apply` checks the whole step before it changes anything and
loops over nothing but the fresh rows, so that a step costs microseconds. What it hands out is copied:
tables may change while a step computes. With compiled code `native/tables.py` does the same, sooner.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from chassis.messages import BadMessage
from chassis.messages.pipeline import FLAG_FRESH, FLAG_SAMPLES, LAST_SAMPLED, PackedStep, Step, unpacked
from shard_worker.executor import I32, I64, U32, Ahead, Bool, MatcherOf, StepInputs
from shard_worker.shaping import SlotShapes


@dataclass(frozen=True, slots=True)
class TableLimits:
    slots_max: int
    block_size_tokens: int
    num_blocks: int
    context_len_max: int
    step_tokens_max: int
    vocab_size: int = 1 << 31
    whole: bool = False  # the stage is the whole pipeline: ids may be left open that its slots sampled last
    matcher_of: MatcherOf | None = None  # None: nobody here reads grammars

    @property
    def blocks_per_sequence_max(self) -> int:
        return -(-self.context_len_max // self.block_size_tokens)


class Tables(Protocol):
    """The state of one epoch on one stage; a new epoch starts with empty tables."""

    def take(self, step: PackedStep) -> StepInputs:
        """Takes in the step's deltas and lays the step out. Raises BadMessage, and then changes nothing."""


# limits; whether it is the last stage's; how many steps may be laid out and not computed yet
MakeTables = Callable[[TableLimits, bool, int], Tables]


def portable_tables(limits: TableLimits, samples: bool, steps_max: int) -> Tables:
    """For any number of steps: each is laid out in memory of its own."""
    return SlotTables(limits, samples)


class SlotTables:
    """`Tables` in numpy. Only the last stage `samples`."""

    def __init__(self, limits: TableLimits, samples: bool = True) -> None:
        self.limits = limits
        self.shapes = SlotShapes(limits.vocab_size, samples, limits.matcher_of)
        n = limits.slots_max
        self._tables: I32 = np.zeros((n, limits.blocks_per_sequence_max), np.int32)
        self._lens: I64 = np.zeros(n, np.int64)  # blocks in each table
        self._computed: I64 = np.zeros(n, np.int64)  # tokens whose K and V a step has written
        self._known: Bool = np.zeros(n, np.bool_)
        self._sampled: Bool = np.zeros(n, np.bool_)  # each slot's last row did
        self._temperature = np.zeros(n, np.float32)
        self._top_k = np.zeros(n, np.int32)
        self._top_p = np.ones(n, np.float32)
        self._seeds = np.zeros(n, np.uint64)

    def take(self, step: PackedStep) -> StepInputs:
        return self.apply(unpacked(step))

    def apply(self, step: Step) -> StepInputs:
        """Raises BadMessage, and then changes nothing."""
        slots = step.slots.astype(np.int64)
        starts = step.starts.astype(np.int64)
        ends = starts + step.num_tokens
        fresh = (step.flags & FLAG_FRESH) != 0
        self._check(step, slots, starts, ends, fresh)
        follow = self.shapes.check(step)
        self._known[step.freed_slots] = False
        if len(step.fresh):
            self._start(step, slots[fresh])
        if len(step.table):
            self._append(step, slots)
        if follow is not None:
            follow()
        return self._lay_out(step, slots, starts, ends)

    def check(self) -> None:
        """Invariants; for tests."""
        widths = np.arange(self.limits.blocks_per_sequence_max)
        beyond = widths[None, :] >= self._lens[:, None]
        assert not self._tables[beyond].any(), "a table holds something past its end"
        assert (self._tables >= 0).all() and (self._tables < self.limits.num_blocks).all()
        assert (self._computed <= self._lens * self.limits.block_size_tokens).all()

    def _check(self, step: Step, slots: I64, starts: I64, ends: I64, fresh: Bool) -> None:
        limits = self.limits
        if len(step.freed_slots) and int(step.freed_slots.max()) >= limits.slots_max:
            raise BadMessage("step: freed slot out of range")
        if not len(slots):
            return
        listed = slots.tolist()
        if max(listed) >= limits.slots_max or len(dict.fromkeys(listed)) < len(listed):
            raise BadMessage("step: slot out of range or named twice")
        if len(step.token_ids) > limits.step_tokens_max:
            raise BadMessage("step: more tokens than were agreed")
        left_open = self._left_open(step, fresh)
        if int(step.token_ids.max(where=step.token_ids != LAST_SAMPLED, initial=0)) >= limits.vocab_size:
            raise BadMessage("step: token id out of range")
        if len(step.table) and int(step.table.max()) >= limits.num_blocks:
            raise BadMessage("step: block out of range")
        known = self._known.take(slots)
        if len(step.freed_slots):
            known &= ~np.isin(slots, step.freed_slots)
        if np.count_nonzero(known | fresh) < len(slots):
            raise BadMessage("step: a row of a slot that nobody started")
        lens = np.where(fresh, 0, self._lens.take(slots)) + step.table_lens
        if max(lens.tolist()) > limits.blocks_per_sequence_max:
            raise BadMessage("step: a table longer than the context")
        if np.count_nonzero(ends > lens * limits.block_size_tokens):
            raise BadMessage("step: a position without a block")
        if np.count_nonzero((starts > self._computed.take(slots)) & ~fresh):
            raise BadMessage("step: a row skips positions")
        if left_open is not None:
            before = self._sampled.take(slots) & (starts == self._computed.take(slots))
            if np.count_nonzero(left_open & ~before):
                raise BadMessage("step: a token id left open behind none that was sampled")

    def _left_open(self, step: Step, fresh: Bool) -> Bool | None:
        """[n]: rows whose token id is left open, if there are any."""
        is_open = step.token_ids == LAST_SAMPLED
        if not np.count_nonzero(is_open):
            return None
        if not self.limits.whole:
            raise BadMessage("step: a token id left open on one of several stages")
        rows = np.arange(len(step.slots)).repeat(step.num_tokens)[is_open]
        single = (step.num_tokens == 1) & ((step.flags & FLAG_SAMPLES) != 0) & ~fresh
        if np.count_nonzero(single.take(rows)) < len(rows):
            raise BadMessage("step: a token id left open in a row that is not one sampling token")
        left_open: Bool = np.zeros(len(step.slots), np.bool_)
        left_open[rows] = True
        return left_open

    def _start(self, step: Step, slots: I64) -> None:
        self._known[slots] = True
        self._tables[slots] = 0
        self._lens[slots] = 0
        self._temperature[slots] = [f.sampling.temperature for f in step.fresh]
        self._top_k[slots] = [min(f.sampling.top_k, (1 << 31) - 1) for f in step.fresh]
        self._top_p[slots] = [f.sampling.top_p for f in step.fresh]
        self._seeds[slots] = np.array([f.seed for f in step.fresh], np.uint64)

    def _append(self, step: Step, slots: I64) -> None:
        added = step.table_lens.astype(np.int64)
        begins = np.cumsum(added) - added
        places = np.arange(len(step.table)) + np.repeat(self._lens[slots] - begins, added)
        self._tables[np.repeat(slots, added), places] = step.table
        self._lens[slots] += added

    def _lay_out(self, step: Step, slots: I64, starts: I64, ends: I64) -> StepInputs:
        n, block_size = len(slots), self.limits.block_size_tokens
        counts = step.num_tokens
        offsets = np.zeros(n + 1, np.int32)
        counts.cumsum(out=offsets[1:])
        self._computed[slots] = ends
        self._sampled[slots] = (step.flags & FLAG_SAMPLES) != 0
        rows = np.arange(n).repeat(counts)
        positions = np.arange(len(rows)) + (starts - offsets[:-1]).take(rows)
        widest = max(self._lens.take(slots).tolist(), default=0)
        tables = self._tables[slots, :widest]
        blocks, within = np.divmod(positions, block_size)
        kv_slots = tables[rows, blocks] * np.int64(block_size) + within
        samples = (step.flags & FLAG_SAMPLES).nonzero()[0]
        sampling = slots.take(samples)
        output_index = step.output_index.take(samples).astype(np.int32)
        token_ids, ahead = self._opened(step, slots, rows, sampling, output_index)
        later = ahead is not None and ahead.shaping is not None
        return StepInputs(
            token_ids=token_ids,
            positions=positions.astype(np.int32),
            row_offsets=offsets,
            context_lens=ends.astype(np.int32),
            kv_slots=kv_slots,
            block_tables=tables,
            sample_rows=samples.astype(np.int32),
            temperature=self._temperature.take(sampling),
            top_k=self._top_k.take(sampling),
            top_p=self._top_p.take(sampling),
            seeds=self._seeds.take(sampling),
            output_index=output_index,
            shaping=None if later else self.shapes.columns(sampling, output_index),
            sample_slots=sampling if self.limits.whole else None,
            ahead=ahead,
        )

    def _opened(
        self, step: Step, slots: I64, rows: I64, sampling: I64, output_index: I32
    ) -> tuple[U32, Ahead | None]:
        """Ids that can be filled in, where some are left open."""
        places = (step.token_ids == LAST_SAMPLED).nonzero()[0]
        if not len(places):
            return step.token_ids, None
        token_ids = step.token_ids.copy()
        token_ids[places] = 0
        open_slots = slots.take(rows.take(places))
        return token_ids, Ahead(
            places, open_slots, self.shapes.columns_later(sampling, output_index, open_slots)
        )
