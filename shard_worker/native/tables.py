"""Slot tables in compiled code: one call over a step's columns, as they came, checks it and lays it out.

A worker that waited finds its caches taken, and then each line of Python costs many times what it does in a
loop: so there are few between a step's arrival and its computing. Nothing here grows with rows or tokens but
what few slots want (`shaping`). Layouts are used in turn and their memory is taken once: what `take` hands
out is good until as many more were taken as there are layouts.
"""

import ctypes
import struct
import weakref
from ctypes import CFUNCTYPE, POINTER, PYFUNCTYPE, Structure, c_char_p, c_int, c_int64, c_void_p
from dataclasses import replace
from typing import Any

import numpy as np

from chassis.messages import BadMessage
from chassis.messages.pipeline import PackedStep, SlotStart, unpacked
from shard_worker.executor import Ahead, StepInputs
from shard_worker.inputs import MakeTables, TableLimits, Tables
from shard_worker.native import library as native
from shard_worker.shaping import SlotShapes

_START = struct.Struct("<ffQii")  # shoal_slot_start
_TOP_K_MAX = (1 << 31) - 1
_COLUMNS_DIFFER = 1
_REFUSALS = {  # shoal_refusal
    2: "step: freed slot out of range",
    3: "step: slot out of range or named twice",
    4: "step: more tokens than were agreed",
    5: "step: token id out of range",
    6: "step: block out of range",
    7: "step: a row of a slot that nobody started",
    8: "step: a table longer than the context",
    9: "step: a position without a block",
    10: "step: a row skips positions",
    11: "step: a token id left open on one of several stages",
    12: "step: a token id left open in a row that is not one sampling token",
    13: "step: a token id left open behind none that was sampled",
}


class _Limits(Structure):
    _fields_ = [
        ("slots_max", c_int64),
        ("block_size", c_int64),
        ("num_blocks", c_int64),
        ("blocks_per_sequence_max", c_int64),
        ("step_tokens_max", c_int64),
        ("vocab_size", c_int64),
        ("whole", c_int64),
    ]


class _Filled(Structure):
    _fields_ = [
        ("step", native.Step),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("kv_slots", c_void_p),
        ("row_offsets", c_void_p),
        ("block_tables", c_void_p),
        ("context_lens", c_void_p),
        ("sample_rows", c_void_p),
        ("temperature", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("seeds", c_void_p),
        ("output_index", c_void_p),
        ("sample_slots", c_void_p),
        ("ahead_places", c_void_p),
        ("ahead_slots", c_void_p),
        ("num_samples", c_int64),
        ("num_ahead", c_int64),
    ]


def _functions(library: ctypes.CDLL) -> tuple[Any, Any, Any]:
    """Of `tables.h`: create, destroy, apply. Apply keeps the interpreter lock: to get it back can take longer
    than the call. It takes bytes as they are, with their lengths."""
    create = CFUNCTYPE(c_void_p, POINTER(_Limits))(("shoal_tables_create", library))
    destroy = CFUNCTYPE(None, c_void_p)(("shoal_tables_destroy", library))
    columns = (c_char_p, c_int64) * 9
    apply = PYFUNCTYPE(c_int, c_void_p, c_void_p, c_char_p, c_int64, *columns)(
        ("shoal_tables_apply", library)
    )
    return create, destroy, apply


class _Layout:
    """Memory for the largest step, and the views that its last step took of it."""

    def __init__(self, limits: TableLimits) -> None:
        tokens = limits.step_tokens_max
        rows = min(limits.slots_max, tokens)
        self.token_ids = np.empty(tokens, np.uint32)
        self.positions = np.empty(tokens, np.int32)
        self.kv_slots = np.empty(tokens, np.int64)
        self.row_offsets = np.empty(rows + 1, np.int32)
        self.block_tables = np.empty(rows * limits.blocks_per_sequence_max, np.int32)
        self.context_lens = np.empty(rows, np.int32)
        self.sample_rows = np.empty(rows, np.int32)
        self.temperature = np.empty(rows, np.float32)
        self.top_k = np.empty(rows, np.int32)
        self.top_p = np.empty(rows, np.float32)
        self.seeds = np.empty(rows, np.uint64)
        self.output_index = np.empty(rows, np.int32)
        self.sample_slots = np.empty(rows, np.int64)
        self.ahead_places = np.empty(rows, np.int64)
        self.ahead_slots = np.empty(rows, np.int64)
        self._whole = limits.whole
        self.filled = _Filled()
        self.step = self.filled.step
        for field in _Filled._fields_[1:-2]:
            setattr(self.filled, field[0], native.address(getattr(self, field[0])))
        for name in ("token_ids", "positions", "row_offsets", "kv_slots", "block_tables"):
            setattr(self.step, name, getattr(self.filled, name))
        self.address = ctypes.addressof(self.filled)
        self._shape = (-1, -1, -1, -1, -1)
        self._inputs: StepInputs | None = None

    def inputs(self) -> StepInputs:
        """Steps of one shape follow each other: their views are the same."""
        step = self.step
        filled = self.filled
        shape = (step.num_tokens, step.num_rows, step.table_stride, filled.num_samples, filled.num_ahead)
        if self._inputs is None or shape != self._shape:
            tokens, rows, widest, samples, ahead = self._shape = shape
            self._inputs = StepInputs(
                token_ids=self.token_ids[:tokens],
                positions=self.positions[:tokens],
                row_offsets=self.row_offsets[: rows + 1],
                context_lens=self.context_lens[:rows],
                kv_slots=self.kv_slots[:tokens],
                block_tables=self.block_tables[: rows * widest].reshape(rows, widest),
                sample_rows=self.sample_rows[:samples],
                temperature=self.temperature[:samples],
                top_k=self.top_k[:samples],
                top_p=self.top_p[:samples],
                seeds=self.seeds[:samples],
                output_index=self.output_index[:samples],
                sample_slots=self.sample_slots[:samples] if self._whole else None,
                ahead=Ahead(self.ahead_places[:ahead], self.ahead_slots[:ahead]) if ahead else None,
                compiled=step,
            )
        return self._inputs


def native_tables(library: ctypes.CDLL) -> MakeTables:
    def make(limits: TableLimits, samples: bool, steps_max: int) -> Tables:
        return NativeTables(limits, library, samples, steps_max)

    return make


class NativeTables:
    """`Tables` in compiled code. Only the last stage `samples`."""

    def __init__(
        self, limits: TableLimits, library: ctypes.CDLL, samples: bool = True, layouts: int = 4
    ) -> None:
        """Raises MemoryError."""
        self.limits = limits
        self.shapes = SlotShapes(limits.vocab_size, samples, limits.matcher_of)
        create, destroy, self._apply = _functions(library)
        described = _Limits(
            slots_max=limits.slots_max,
            block_size=limits.block_size_tokens,
            num_blocks=limits.num_blocks,
            blocks_per_sequence_max=limits.blocks_per_sequence_max,
            step_tokens_max=limits.step_tokens_max,
            vocab_size=limits.vocab_size,
            whole=limits.whole,
        )
        self._tables = create(ctypes.byref(described))
        if self._tables is None:
            raise MemoryError(f"tables of {limits.slots_max} slots")
        weakref.finalize(self, destroy, self._tables)
        self._layouts = [_Layout(limits) for _ in range(layouts)]
        self._turn = 0

    def take(self, step: PackedStep) -> StepInputs:
        if self.shapes.concerned(step.fresh):
            return self._take_shaped(step)
        layout = self._layouts[self._turn]
        self._call(step, layout.address)
        self._turn = (self._turn + 1) % len(self._layouts)
        return layout.inputs()

    def _take_shaped(self, step: PackedStep) -> StepInputs:
        self._call(step, None)
        columns = unpacked(step)
        follow = self.shapes.check(columns)
        layout = self._layouts[self._turn]
        self._call(step, layout.address)
        self._turn = (self._turn + 1) % len(self._layouts)
        if follow is not None:
            follow()
        inputs = layout.inputs()
        slots, ahead = columns.slots[inputs.sample_rows].astype(np.int64), inputs.ahead
        later = self.shapes.columns_later(slots, inputs.output_index, ahead.slots) if ahead else None
        if ahead is not None and later is not None:
            return replace(inputs, ahead=replace(ahead, shaping=later))
        return replace(inputs, shaping=self.shapes.columns(slots, inputs.output_index))

    def _call(self, step: PackedStep, layout: int | None) -> None:
        """Raises BadMessage, and then changes nothing."""
        fresh = step.fresh
        starts = b"".join(map(_start, fresh)) if fresh else b""
        refusal = self._apply(
            self._tables,
            layout,
            starts,
            len(fresh),
            step.slots,
            len(step.slots),
            step.num_tokens,
            len(step.num_tokens),
            step.starts,
            len(step.starts),
            step.flags,
            len(step.flags),
            step.output_index,
            len(step.output_index),
            step.token_ids,
            len(step.token_ids),
            step.table_lens,
            len(step.table_lens),
            step.table,
            len(step.table),
            step.freed_slots,
            len(step.freed_slots),
        )
        if not refusal:
            return
        if refusal == _COLUMNS_DIFFER:
            unpacked(step)  # says which
        raise BadMessage(_REFUSALS[refusal])


def _start(start: SlotStart) -> bytes:
    sampling = start.sampling
    top_k = min(sampling.top_k, _TOP_K_MAX)
    return _START.pack(sampling.temperature, sampling.top_p, start.seed, top_k, 0)
