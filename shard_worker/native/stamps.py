"""Stamps in compiled code: one call over the columns of a step that was computed."""

import ctypes
from ctypes import PYFUNCTYPE, Structure, c_char_p, c_int64, c_uint64, c_void_p

import numpy as np

from chassis.ids import Epoch
from chassis.messages.pipeline import PackedStep
from shard_worker.executor import I32, U32
from shard_worker.native import library as native
from shard_worker.stamps import MakeStamps, Stamps


class _Stamps(Structure):
    _fields_ = [
        ("blocks", c_void_p),
        ("slots", c_void_p),
        ("block_size", c_int64),
        ("epoch", c_uint64),
        ("rate", c_uint64),
        ("turn", c_uint64),
    ]


def native_stamps(library: ctypes.CDLL) -> MakeStamps:
    def make(num_blocks: int, block_size_tokens: int, rate: float = 1.0) -> Stamps:
        return NativeStamps(num_blocks, block_size_tokens, rate, library)

    return make


class NativeStamps(Stamps):
    def __init__(self, num_blocks: int, block_size_tokens: int, rate: float, library: ctypes.CDLL) -> None:
        super().__init__(num_blocks, block_size_tokens, rate)
        columns = (c_char_p,) * 6
        self._note = PYFUNCTYPE(
            c_int64, c_void_p, c_int64, *columns, c_void_p, c_int64, c_void_p, c_void_p, c_int64
        )(("shoal_stamps_note", library))
        self._state = _Stamps(native.address(self.blocks), None, block_size_tokens, 0, self._rate, 0)
        self._at = ctypes.addressof(self._state)
        self._void_rows = np.zeros(0, np.int32)
        self._void_at: int | None = None

    def begin(self, epoch: Epoch, slots_max: int) -> None:
        super().begin(epoch, slots_max)
        self._state.epoch, self._state.slots = epoch, native.address(self._slots)
        self._void_rows = np.zeros(slots_max, np.int32)
        self._void_at = native.address(self._void_rows)

    def note(self, step: PackedStep, block_tables: I32, sampled: U32) -> tuple[int, ...]:
        before = step.void_rows
        if before:
            self._void_rows[: len(before)] = before
        found = self._note(
            self._at,
            len(step.flags),
            step.slots,
            step.num_tokens,
            step.starts,
            step.flags,
            step.token_ids,
            step.digests or None,
            native.address(block_tables),
            block_tables.shape[1],
            native.address(sampled) if len(sampled) else None,
            self._void_at,
            len(before),
        )
        return tuple(self._void_rows[:found].tolist()) if found else ()
