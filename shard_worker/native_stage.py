"""A stage in compiled code: one call a step runs all its layers outside the interpreter lock.

Weights are packed once for the kernels; what a step needs is taken when memory is attached. On the step path
Python fills in one structure of pointers: nothing here grows with the number of tokens. A token's numbers
depend on its sequence alone, bit for bit: not on the batch, the chunks, the cut into stages or the threads.
"""

import ctypes
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shard_worker.executor import I32, I64, LoadFailed, StepInputs
from shard_worker.formats import prepared
from shard_worker.kv_tensors import KvForm
from shard_worker.model.config import ModelConfig
from shard_worker.model.stage import NO_BYTES, StageMemory, Total
from shard_worker.model.stage_weights import (
    Activation,
    LayerWeights,
    Linear,
    Rope,
    StageWeights,
    StoredMatrix,
)
from shard_worker.native import library as native

HEAD_MIN_BITS = 8  # of embedding and head, whatever the other matrices are quantised to
ROWS_KNOWN_MAX = 256  # numbers of rows
ACTIVATIONS = {Activation.SILU: 0, Activation.GELU_TANH: 1}


def unsupported(weights: StageWeights | ModelConfig) -> str | None:
    """Why compiled code can't run this; None: it can."""
    for name in ("hidden_size", "head_dim", "intermediate_size"):
        if getattr(weights, name) % 8:
            return f"{name} is {getattr(weights, name)}, not a multiple of 8"
    return None


class NativeStage:
    def __init__(
        self,
        weights: StageWeights,
        library: ctypes.CDLL,
        *,
        dtype: str = "float32",
        quantize: str = "none",
        int8_activations: bool = False,
        threads: int = 1,
        total: Total | None = None,
    ) -> None:
        """`dtype`: of KV, of activations between stages, and of weights that aren't quantised. `total`: where
        the weights are one rank's, over all of them.

        Raises LoadFailed.
        """
        assert unsupported(weights) is None
        self.weights = weights
        self._library = library
        self.kv_form = KvForm(torch.bfloat16 if dtype == "bfloat16" else torch.float32, paged=True)
        self._dtype, self._quantize = dtype, quantize
        self._kept: list[Any] = []  # what C points to
        self._row_bytes = weights.hidden_size * (2 if dtype == "bfloat16" else 4)
        self._memory: StageMemory | None = None
        self._step = native.Step()
        self._ranks = None if total is None else _Ranks(total, weights.hidden_size)
        pool = self._made(
            library.shoal_pool_create(threads), library.shoal_pool_destroy, f"{threads} threads"
        )
        config = self._config(weights, int8_activations)
        # What was packed is not kept beside it; of layers only their number is asked for later.
        self._num_layers, self.weights = len(weights.layers), replace(weights, layers=())
        self._stage = self._made(
            library.shoal_stage_create(ctypes.byref(config), pool), library.shoal_stage_destroy, "the stage"
        )

    def _made(self, handle: int | None, destroy: Callable[[int], None], what: str) -> int:
        """A handle that goes with this object; what was made last goes first. Raises LoadFailed."""
        if handle is None:
            raise LoadFailed(f"no memory for {what}")
        # Not at exit: a step may still run in its thread, and the process takes everything with it.
        weakref.finalize(self, destroy, handle).atexit = False
        return handle

    # ---- weights -----------------------------------------------------------------------------------------

    def _config(self, weights: StageWeights, int8_activations: bool) -> native.StageConfig:
        ropes: list[Rope] = []
        layers = (native.Layer * len(weights.layers))(
            *(self._layer(layer, ropes) for layer in weights.layers)
        )
        turned = (native.Rope * len(ropes))(
            *(native.Rope(self._floats(rope.frequencies), rope.rotary_dim, rope.scale) for rope in ropes)
        )
        self._kept += [layers, turned]
        config = native.StageConfig(
            hidden=weights.hidden_size,
            heads=weights.num_heads,
            kv_heads=weights.num_kv_heads,
            head_dim=weights.head_dim,
            inner=weights.intermediate_size,
            vocab=weights.vocab_size,
            layers=layers,
            num_layers=len(layers),
            ropes=turned,
            num_ropes=len(turned),
            rms_eps=weights.rms_eps,
            embedding_scale=weights.embedding_scale,
            score_scale=weights.score_scale,
            score_softcap=weights.attention_softcap,
            activation=ACTIVATIONS[weights.activation],
            narrow=self._dtype == "bfloat16",
            int8=int8_activations,
        )
        if self._ranks is not None:
            config.total = ctypes.cast(self._ranks.callback, ctypes.c_void_p)
        if weights.embedding is not None:
            config.embedding = self._matrix(weights.embedding, HEAD_MIN_BITS)
        if weights.head is not None:
            config.head_norm = self._floats(weights.head.norm)
            config.logit_softcap = weights.head.softcap
            config.head = self._head(weights.head.linear, config.embedding)
        return config

    def _head(self, head: Linear, embedding: int | None) -> native.Map:
        """A tied one is packed once."""
        if embedding is None or len(head.matrices) > 1 or head.matrices[0] is not self.weights.embedding:
            return self._map(head, HEAD_MIN_BITS)
        return self._mapped([embedding], head.bias)

    def _layer(self, layer: LayerWeights, ropes: list[Rope]) -> native.Layer:
        if not any(rope is layer.rope for rope in ropes):
            ropes.append(layer.rope)
        return native.Layer(
            attention_norm=self._floats(layer.attention_norm),
            mlp_norm=self._floats(layer.mlp_norm),
            q_norm=self._floats(layer.q_norm),
            k_norm=self._floats(layer.k_norm),
            post_attention_norm=self._floats(layer.post_attention_norm),
            post_mlp_norm=self._floats(layer.post_mlp_norm),
            qkv=self._map(layer.qkv, joined=True),
            out=self._map(layer.out),
            gate_up=self._map(layer.gate_up),
            down=self._map(layer.down),
            rope=next(i for i, rope in enumerate(ropes) if rope is layer.rope),
            window=layer.window or 0,
        )

    def _floats(self, values: NDArray[np.float32] | None) -> int | None:
        if values is None:
            return None
        kept = np.ascontiguousarray(values, np.float32)
        self._kept.append(kept)
        return native.address(kept)

    def _map(self, linear: Linear, min_bits: int = 4, joined: bool = False) -> native.Map:
        """`joined`: as one matrix, where formats allow: a product prepares its input once a matrix."""
        matrices = linear.matrices
        if joined and len(dict.fromkeys(matrix.format for matrix in matrices)) == 1:
            rows = np.concatenate([matrix.rows for matrix in matrices])
            matrices = (StoredMatrix(matrices[0].format, rows, linear.inputs),)
        return self._mapped([self._matrix(matrix, min_bits) for matrix in matrices], linear.bias)

    def _mapped(self, handles: list[int], bias: NDArray[np.float32] | None) -> native.Map:
        pointers = (ctypes.c_void_p * len(handles))(*handles)
        self._kept.append(pointers)
        return native.Map(matrices=pointers, count=len(handles), bias=self._floats(bias))

    def _matrix(self, matrix: StoredMatrix, min_bits: int) -> int:
        """Raises LoadFailed."""
        held = prepared(matrix, self._dtype, self._quantize, min_bits)
        rows = np.ascontiguousarray(held.rows)
        what = f"a matrix of {held.outputs} x {held.inputs} in {held.format.value}"
        handle = self._library.shoal_linear_create(
            native.FORMATS[held.format], native.address(rows), held.outputs, held.inputs, rows.shape[1]
        )
        return self._made(handle, self._library.shoal_linear_destroy, what)

    # ---- a step ------------------------------------------------------------------------------------------

    def attach(self, memory: StageMemory) -> None:
        """Raises MemoryError."""
        assert len(memory.kv) == self._num_layers
        pages = (ctypes.c_void_p * len(memory.kv))(*(kv.keys.data_ptr() for kv in memory.kv))
        description = native.Memory(
            pages=pages,
            block_size=memory.block_size_tokens,
            step_tokens_max=memory.step_tokens_max,
        )
        if self._library.shoal_stage_attach(self._stage, ctypes.byref(description)):
            raise MemoryError(f"steps of {memory.step_tokens_max} tokens")
        self._memory = memory
        self._sent = np.empty(memory.step_tokens_max * self._row_bytes, np.uint8)
        self._sent_bytes = self._sent.data
        self._logits = np.empty((1, self.weights.vocab_size), np.float32)

    def release(self) -> None:
        self._memory = None

    def run(self, inputs: StepInputs, activations: memoryview, wanted: I64 | None = None) -> memoryview:
        assert self._memory is not None, "run before attach"
        num_tokens = len(inputs.token_ids)
        assert 0 < num_tokens <= self._memory.step_tokens_max
        num_bytes = num_tokens * self._row_bytes
        step = inputs.compiled if isinstance(inputs.compiled, native.Step) else self._filled(inputs)
        if self.weights.embedding is None:
            assert activations.nbytes == num_bytes
            step.activations_in = native.address(np.frombuffer(activations, np.uint8))
        last = self.weights.head is not None
        step.activations_out = None if last else native.address(self._sent)
        step.wanted = native.address(wanted)
        step.num_wanted = 0 if wanted is None else len(wanted)
        self._library.shoal_stage_run(self._stage, ctypes.byref(step))
        if self._ranks is not None:
            self._ranks.check()
        return NO_BYTES if last else self._sent_bytes[:num_bytes]

    def _filled(self, inputs: StepInputs) -> native.Step:
        step, self._tables = self._step, _rows_apart(inputs.block_tables)
        step.num_tokens, step.num_rows = len(inputs.token_ids), len(inputs.context_lens)
        step.token_ids = native.address(inputs.token_ids)
        step.positions = native.address(inputs.positions)
        step.row_offsets = native.address(inputs.row_offsets)
        step.kv_slots = native.address(inputs.kv_slots)
        step.block_tables = self._tables.__array_interface__["data"][0]
        step.table_stride = self._tables.strides[0] // self._tables.itemsize
        return step

    def logits(self, tokens: I64) -> torch.Tensor:
        count = len(tokens)
        if count > len(self._logits):
            self._logits = np.empty((2 * count, self.weights.vocab_size), np.float32)
        places = np.ascontiguousarray(tokens, np.int64)
        failed = self._library.shoal_stage_logits(
            self._stage, native.address(places), count, native.address(self._logits)
        )
        assert not failed, "logits of a token that was not wanted"
        return torch.from_numpy(self._logits[:count])

    def times_ns(self) -> dict[str, int]:
        """Wall time of all runs by what it went to (`library.PHASES`)."""
        return native.times_ns(self._library, self._stage)


class _Ranks:
    """Sums of rows over ranks, asked for by compiled code. What fails is raised when the run is over."""

    def __init__(self, total: Total, hidden_size: int) -> None:
        self._total, self._hidden_size = total, hidden_size
        self._failed: BaseException | None = None
        self._rows: dict[tuple[int, int], torch.Tensor] = {}
        self.callback = native.TOTAL(self._add_up)

    def _add_up(self, _: int | None, address: int, count: int) -> None:
        if self._failed is not None or not count:
            return
        try:
            self._total(self._rows_at(address, count))
        except BaseException as error:  # nothing may pass through compiled code
            self._failed = error

    def _rows_at(self, address: int, count: int) -> torch.Tensor:
        if (rows := self._rows.get((address, count))) is None:
            memory = (ctypes.c_float * (count * self._hidden_size)).from_address(address)
            if len(self._rows) >= ROWS_KNOWN_MAX:
                self._rows.clear()
            rows = self._rows[address, count] = torch.from_numpy(np.ctypeslib.as_array(memory))
        return rows

    def check(self) -> None:
        """Raises what failed."""
        if self._failed is not None:
            raise self._failed


def _rows_apart(tables: I32) -> I32:
    """The same with neighbours in a row side by side."""
    return tables if tables.strides[1] == tables.itemsize else np.ascontiguousarray(tables)
