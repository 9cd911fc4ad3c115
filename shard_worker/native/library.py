"""The compiled code as Python sees it: structures and functions of `stage.h`, `linear.h` and `pool.h`, typed.

Nothing here keeps what it is given alive: who passes a pointer holds the array behind it. Calls let go of the
interpreter lock.
"""

import ctypes
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char_p,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_void_p,
)
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chassis import log
from shard_worker.model.stage_weights import WeightFormat
from shard_worker.native import build

FORMATS = {format: index for index, format in enumerate(WeightFormat)}  # enum shoal_format
PHASES = ("edges", "norms", "attention", "products", "head", "wait")  # enum shoal_phase


class Map(Structure):
    _fields_ = [("matrices", POINTER(c_void_p)), ("count", c_int64), ("bias", c_void_p)]


class Layer(Structure):
    _fields_ = [
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("post_attention_norm", c_void_p),
        ("post_mlp_norm", c_void_p),
        ("qkv", Map),
        ("out", Map),
        ("gate_up", Map),
        ("down", Map),
        ("rope", c_int64),
        ("window", c_int64),
    ]


class Rope(Structure):
    _fields_ = [("frequencies", c_void_p), ("rotary_dim", c_int64), ("scale", c_float)]


class StageConfig(Structure):
    _fields_ = [
        ("hidden", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("inner", c_int64),
        ("vocab", c_int64),
        ("layers", POINTER(Layer)),
        ("num_layers", c_int64),
        ("ropes", POINTER(Rope)),
        ("num_ropes", c_int64),
        ("embedding", c_void_p),
        ("head_norm", c_void_p),
        ("head", Map),
        ("rms_eps", c_float),
        ("embedding_scale", c_float),
        ("score_scale", c_float),
        ("score_softcap", c_float),
        ("logit_softcap", c_float),
        ("activation", c_int32),
        ("narrow", c_int32),
        ("int8", c_int32),
        ("total", c_void_p),
        ("total_arg", c_void_p),
    ]


TOTAL = CFUNCTYPE(None, c_void_p, c_void_p, c_int64)  # of StageConfig


class Memory(Structure):
    _fields_ = [
        ("pages", POINTER(c_void_p)),
        ("block_size", c_int64),
        ("step_tokens_max", c_int64),
    ]


class Step(Structure):
    _fields_ = [
        ("num_tokens", c_int64),
        ("num_rows", c_int64),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("row_offsets", c_void_p),
        ("kv_slots", c_void_p),
        ("block_tables", c_void_p),
        ("table_stride", c_int64),
        ("activations_in", c_void_p),
        ("activations_out", c_void_p),
        ("wanted", c_void_p),
        ("num_wanted", c_int64),
    ]


SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "shoal_pool_create": (c_void_p, [c_int]),
    "shoal_pool_destroy": (None, [c_void_p]),
    "shoal_linear_create": (c_void_p, [c_int, c_void_p, c_int64, c_int64, c_int64]),
    "shoal_linear_destroy": (None, [c_void_p]),
    "shoal_linear_bytes": (c_int64, [c_void_p]),
    "shoal_linear_scratch_bytes": (c_size_t, [c_void_p, c_int64]),
    "shoal_linear_use_isa": (c_int, [c_char_p]),
    "shoal_linear_isa": (c_char_p, []),
    "shoal_stage_create": (c_void_p, [POINTER(StageConfig), c_void_p]),
    "shoal_stage_destroy": (None, [c_void_p]),
    "shoal_stage_block_pad": (c_int64, [c_int64]),
    "shoal_stage_attach": (c_int, [c_void_p, POINTER(Memory)]),
    "shoal_stage_run": (None, [c_void_p, POINTER(Step)]),
    "shoal_stage_logits": (c_int, [c_void_p, c_void_p, c_int64, c_void_p]),
    "shoal_stage_times": (None, [c_void_p, c_void_p]),
    "shoal_ranks_bytes": (c_int64, [c_int64]),
    "shoal_ranks_open": (c_void_p, [c_void_p, c_int64, c_int64, c_int64]),
    "shoal_ranks_destroy": (None, [c_void_p]),
    "shoal_ranks_abort": (None, [c_void_p]),
    "shoal_ranks_sum": (c_int, [c_void_p, c_void_p, c_int64]),
    "shoal_ranks_gather": (c_int, [c_void_p, c_void_p, c_void_p, c_void_p]),
    "shoal_attention": (
        c_int,
        [
            c_void_p,
            POINTER(Step),
            c_void_p,
            POINTER(StageConfig),
            c_int64,
            c_int64,
            c_void_p,
            c_void_p,
        ],
    ),
    "shoal_vector_functions": (
        None,
        [c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p],
    ),
}


def load(path: Path) -> ctypes.CDLL:
    """Raises OSError if it can't be loaded, AttributeError if it lacks a function of these sources."""
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


@cache
def native() -> ctypes.CDLL | None:
    """The library of this process, compiled if need be; None if there is none (`build`)."""
    path = build.library_path()
    if path is None:
        return None
    try:
        return load(path)
    except (OSError, AttributeError) as error:
        log.warning("no compiled stage", error=str(error))
        return None


def digest() -> str:
    """Names the library of this process (`build.digest_of`); empty if there is none."""
    library = native()
    return "" if library is None else Path(library._name).stem


def native_if_built() -> ctypes.CDLL | None:
    """The same, but nothing is compiled: for those whom it would cost more than it gains."""
    return native() if build.is_built() else None


def address(array: NDArray[Any] | None) -> int | None:
    """Of a contiguous array's first element; None for None."""
    if array is None:
        return None
    assert array.flags.c_contiguous
    return int(array.__array_interface__["data"][0])


def times_ns(library: ctypes.CDLL, stage: int) -> dict[str, int]:
    """Wall time of the stage's steps by what it went to, as the calling thread saw it."""
    ns = np.zeros(len(PHASES), np.int64)
    library.shoal_stage_times(stage, address(ns))
    return dict(zip(PHASES, ns.tolist(), strict=True))
