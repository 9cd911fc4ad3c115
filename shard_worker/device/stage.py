"""A stage on a device: `begin` gives a step to the device and returns, `InFlight` waits for what comes out.

A step is packed into one pinned buffer and copied at once; activations come and go in lanes of their own, so
that a step's results leave while the next one computes. Steps of decodes alone are padded to a few shapes and
replayed, others run as they come. On the processor all of it runs the same way, with nothing recorded.
Numbers depend on who shares a step, in the last bits: libraries choose kernels by shape.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from chassis.transport.registered import MemoryRange
from shard_worker import sampler
from shard_worker.attention import device as paged
from shard_worker.attention.cuda import WORKSPACE_BYTES, WRAPPER_BYTES, best
from shard_worker.attention.device import AttentionShape, DeviceAttention, DeviceColumns, by_page
from shard_worker.attention.interface import LayerKv
from shard_worker.attention.pages import StepShape, decode_order, padded, scrap_step, widest_of
from shard_worker.device.direct import DevicePool, flush_for, tensor_of
from shard_worker.device.graphs import ROWS, Output, Recorder, Shapes, recorder_for
from shard_worker.device.in_flight import NO_IDS, InFlight
from shard_worker.device.last_sampled import DeviceLastSampled
from shard_worker.device.layers import DeviceLayers
from shard_worker.device.packing import Field, Layout, Sizes, layout_of, pack, sizes_of
from shard_worker.device.sampling import ids_of, sample
from shard_worker.device.staging import DeviceBuffer, Staging, Turn
from shard_worker.executor import I64, U32, StepInputs, StepOutput
from shard_worker.grammar_masks import NO_MASKS, GrammarMasks, masks_of
from shard_worker.model.stage import NO_BYTES, StageMemory, Total
from shard_worker.model.stage_weights import StageWeights

MakeAttention = Callable[[AttentionShape, torch.device], tuple[DeviceAttention, str | None]]
NO_ROWS = np.empty(0, np.int64)
TORCH_TYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True, slots=True)
class _Step:
    """What was enqueued."""

    inputs: StepInputs
    turn: Turn
    layout: Layout
    packed: torch.Tensor
    hidden: torch.Tensor
    logits: torch.Tensor | None  # of all rows, where a recorded step computed them


@dataclass(frozen=True, slots=True)
class _Attached:
    """What a stage has while it serves: pages, buffers, recordings."""

    memory: StageMemory
    attention: DeviceAttention
    staging: Staging
    shapes: Shapes
    recorder: Recorder
    scrap_block: int
    fixed: DeviceBuffer  # columns of padded steps: stays in place, for recordings read it
    columns: DeviceBuffer  # of the others
    entered: torch.Tensor  # [rows, hidden_size] into a padded step, in place too
    last_sampled: DeviceLastSampled


class DeviceStage:
    def __init__(
        self,
        weights: StageWeights,
        dtype: torch.dtype,
        device: torch.device,
        *,
        quantize: str = "none",
        recorded: bool = True,
        make_attention: MakeAttention = best,
        recorder: Recorder | None = None,
        total: Total | None = None,
    ) -> None:
        """`recorded`: pad steps of decodes and replay them, by `recorder` (None: as the device can); `total`:
        where the weights are one rank's, over all of them, whose sums are not recorded.

        Raises LoadFailed.
        """
        self.weights, self.dtype, self.device = weights, dtype, device
        self._recorded = recorded and total is None
        self._make_attention, self._given_recorder = make_attention, recorder
        with torch.inference_mode():
            self._layers = DeviceLayers(weights, dtype, device, quantize, total)
        self._row_bytes = weights.hidden_size * dtype.itemsize
        self._attached: _Attached | None = None
        self.attention_reason: str | None = None  # why it is plain torch, if it is
        self._last: _Step | None = None
        self._flush: Callable[[], None] | None = None  # before what a card has written is read

    # ---- memory ------------------------------------------------------------------------------------------

    def attention_shape(self, block_size_tokens: int) -> AttentionShape:
        weights = self.weights
        return AttentionShape(
            weights.num_heads,
            weights.num_kv_heads,
            weights.head_dim,
            self.dtype,
            block_size_tokens,
            weights.score_scale,
            weights.attention_softcap,
            tuple(dict.fromkeys(layer.window for layer in weights.layers)),
        )

    def block_bytes(self, block_size_tokens: int) -> int:
        return paged.block_bytes(self.attention_shape(block_size_tokens), len(self.weights.layers))

    def allocate(self, num_blocks: int, block_size_tokens: int) -> list[LayerKv]:
        """One block more than was asked for: the last one is scrap, which padding reads and writes."""
        shape = self.attention_shape(block_size_tokens)
        return paged.allocate(shape, len(self.weights.layers), num_blocks + 1, self.device)

    def working_bytes(self, step_tokens_max: int) -> int:
        """About what the largest step takes: a layer's widest tensors, logits, what attention has."""
        weights = self.weights
        widest = max(2 * weights.intermediate_size, (weights.num_heads + 2 * weights.num_kv_heads) * 128)
        per_token = 4 * (3 * widest + 6 * weights.hidden_size)
        logits = 16 * weights.vocab_size * min(step_tokens_max, 256) if weights.head is not None else 0
        wrappers = len(ROWS) * len(self.attention_shape(1).windows) * WRAPPER_BYTES
        return 2 * per_token * step_tokens_max + logits + wrappers + WORKSPACE_BYTES

    def release(self) -> None:
        """Lets go of KV pages, buffers and recordings; `attach` comes next."""
        self._attached = self._last = None

    def attach(self, memory: StageMemory) -> None:
        """`memory.kv`: of `allocate`."""
        assert len(memory.kv) == len(self.weights.layers)
        self.release()
        size, num_blocks = memory.block_size_tokens, memory.kv[0].keys.shape[1]
        attention, self.attention_reason = self._make_attention(self.attention_shape(size), self.device)
        shapes = Shapes(memory.step_tokens_max, num_blocks, attention.reads_tables)
        attention.hold(num_blocks, shapes.rows)
        staging = Staging(self.device, memory.step_tokens_max * self._row_bytes)
        on_device = self.device.type == "cuda"
        rows = shapes.rows_max
        entered = torch.zeros((rows, self.weights.hidden_size), dtype=self.dtype, device=self.device)
        self._attached = _Attached(
            memory=memory,
            attention=attention,
            staging=staging,
            shapes=shapes,
            recorder=self._given_recorder or recorder_for(staging.compute),
            scrap_block=num_blocks - 1,
            fixed=DeviceBuffer(
                self.device, layout_of(Sizes(rows, rows, shapes.width_max, rows, rows)).num_bytes
            ),
            columns=DeviceBuffer(self.device),
            entered=entered,
            last_sampled=DeviceLastSampled(self.device),
        )
        if on_device:
            torch.cuda.synchronize(self.device)  # what was made so far is not in the order of any lane
            if self._recorded and not attention.reads_tables:
                self._record_all(self._attached)

    def _record_all(self, attached: _Attached) -> None:
        """So that no request waits for it; the largest first, into whose memory the others fit. Where tables
        are read there are too many shapes: each is recorded when it first comes."""
        memory = attached.memory
        for rows in reversed(attached.shapes.rows):
            if rows <= memory.step_tokens_max:
                inputs = scrap_step(rows, memory.block_size_tokens, attached.scrap_block)
                self.run(inputs, memoryview(bytes(rows * self._row_bytes)) if self._takes else NO_BYTES)

    @property
    def _takes(self) -> bool:
        """Whether activations come in."""
        return self.weights.embedding is None

    # ---- a step ------------------------------------------------------------------------------------------

    @property
    def sends_from(self) -> DevicePool:
        """Where activations lie that were told to stay, until the stage is attached anew."""
        return self._at.staging.pool

    def begin(
        self, inputs: StepInputs, activations: memoryview | MemoryRange, stays: bool = False
    ) -> InFlight:
        """Of at least one token. The caller may reuse `activations` at once, but a range of the device's
        memory only when the result is there. `stays`: those that go out are left there. One thread begins."""
        with torch.inference_mode():
            staging = self._at.staging
            with staging.compute.working():
                inputs = self._at.last_sampled.shaped(inputs)
            step = self._enqueue(inputs, activations)
            if self.weights.head is None:
                if stays:
                    kept = staging.keep(step.turn, step.hidden)
                    return InFlight(step.turn.out, NO_BYTES, direct=kept)
                sent = staging.leave(step.turn, step.hidden)
                return InFlight(step.turn.out, sent)
            shaping = inputs.shaping
            if inputs.prompt_asks or (shaping is not None and len(shaping.logprob_rows)):
                return self._told(step)
            if not len(inputs.sample_rows):
                return InFlight(staging.end(step.turn), NO_BYTES)
            with staging.compute.working():
                logits = self._logits_of(step)
                masks = NO_MASKS if shaping is None else masks_of(shaping.grammars)  # while it computes
                ids = self._sampled(step, logits, masks)
            told = staging.leave_ids(step.turn, ids)
            return InFlight(step.turn.out, NO_BYTES, told, masks=masks)

    def copy_blocks(self, sources: U32, targets: U32) -> None:
        """In the order of steps: within the lane that computes."""
        with self.in_order():
            pairs = np.stack((sources, targets)).astype(np.int64)
            taken, put = torch.from_numpy(pairs).to(self.device)
            for layer in self._at.memory.kv:
                for pages in (by_page(layer.keys), by_page(layer.values)):
                    pages[put] = pages[taken]

    def run(self, inputs: StepInputs, activations: memoryview, wanted: I64 | None = None) -> memoryview:
        """Whoever calls knows all ids."""
        with torch.inference_mode():
            step = self._enqueue(replace(inputs, ahead=None), activations)
            sent, staging = NO_BYTES, self._at.staging
            if self.weights.head is None:
                sent = staging.leave(step.turn, step.hidden)
            else:
                staging.end(step.turn)
        step.turn.out.wait()
        return sent

    def logits(self, tokens: I64) -> torch.Tensor:
        """On the host."""
        with self.in_order():
            return self.logits_there(tokens).cpu()

    def logits_there(self, tokens: I64) -> torch.Tensor:
        """On the device; to be called `in_order`."""
        assert self._last is not None
        at = torch.from_numpy(tokens).to(self.device)
        return self._layers.logits(self._last.hidden[at])

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """What torch is told inside comes after the steps that were begun."""
        with torch.inference_mode(), self._at.staging.compute.working():
            yield

    @property
    def _at(self) -> _Attached:
        assert self._attached is not None, "run before attach"
        return self._attached

    def _enqueue(self, inputs: StepInputs, activations: memoryview | MemoryRange) -> _Step:
        at, num_tokens = self._at, len(inputs.token_ids)
        assert 0 < num_tokens <= at.memory.step_tokens_max
        assert self._takes or int(inputs.token_ids.max()) < self.weights.vocab_size
        size = at.memory.block_size_tokens
        shape = self._shape_of(inputs)
        given = inputs if shape is None else padded(inputs, shape, size, at.scrap_block)
        order = decode_order(given) if shape is None else np.arange(shape.rows, dtype=np.int32)
        turn = at.staging.take()
        with at.staging.compute.working():
            layout, packed = self._bring_columns(given, order, turn, shape)
            at.last_sampled.fill(inputs, _view(packed, layout.token_ids))
            plan = at.attention.plan(given, order, size, shape)
            entering = self._entering(turn, activations, num_tokens)
            if entering is not None and shape is not None:
                at.entered[:num_tokens].copy_(entering)
                entering = at.entered[: shape.rows]

            def work() -> Output:
                columns = columns_of(layout, packed)
                hidden = entering
                if hidden is None:
                    hidden = self._layers.embed(_view(packed, layout.token_ids))
                step = plan.over(columns)
                hidden = self._layers.through(hidden, columns.positions, step, at.memory.kv)
                whole = shape is not None and self.weights.head is not None
                return Output(hidden, self._layers.logits(hidden) if whole else None)

            output = work() if shape is None else at.recorder.run(shape, work)
        logits = None if output.logits is None else output.logits[:num_tokens]
        self._last = _Step(inputs, turn, layout, packed, output.hidden[:num_tokens], logits)
        return self._last

    def _shape_of(self, inputs: StepInputs) -> StepShape | None:
        """What the step is padded to; None: it runs as it comes."""
        at = self._at
        shape = at.shapes.of(inputs, at.memory.block_size_tokens) if self._recorded else None
        return shape if shape is not None and at.attention.fits(inputs, shape) else None

    def _bring_columns(
        self, given: StepInputs, order: NDArray[np.int32], turn: Turn, shape: StepShape | None
    ) -> tuple[Layout, torch.Tensor]:
        """The one copy of a step's columns, in the computing lane: the step before has read the buffer."""
        at, width = self._at, 0
        if at.attention.reads_tables:
            width = widest_of(given, at.memory.block_size_tokens) if shape is None else shape.width
        sizes = sizes_of(given, len(order), width, samples=self.weights.head is not None)
        host = turn.columns.upto(layout_of(sizes).num_bytes)
        layout = pack(given, order, sizes, host.numpy())
        there = (at.columns if shape is None else at.fixed).upto(layout.num_bytes)
        there.copy_(host, non_blocking=True)
        return layout, there

    def _entering(
        self, turn: Turn, activations: memoryview | MemoryRange, num_tokens: int
    ) -> torch.Tensor | None:
        """[T, hidden_size] of the stage before; None on the first."""
        if not self._takes:
            return None
        assert activations.nbytes == num_tokens * self._row_bytes
        if isinstance(activations, MemoryRange):
            self._flush = self._flush or flush_for(self.device)
            self._flush()
            there = tensor_of(activations)
        else:
            there = self._at.staging.bring(turn, activations)
        return there.view(self.dtype).view(num_tokens, -1)

    # ---- the end of the last stage -----------------------------------------------------------------------

    def _logits_of(self, step: _Step) -> torch.Tensor:
        """[k, vocab_size] of the rows that sample, to be changed."""
        tokens = _view(step.packed, step.layout.sample_tokens)
        if step.logits is not None:
            return step.logits[tokens]
        return self._layers.logits(step.hidden[tokens])

    def _sampled(self, step: _Step, logits: torch.Tensor, masks: GrammarMasks) -> torch.Tensor:
        fields, packed = step.layout, step.packed
        ids = sample(
            logits,
            step.inputs,
            _view(packed, fields.temperature),
            _view(packed, fields.top_k),
            _view(packed, fields.top_p),
            _view(packed, fields.uniforms),
            masks=masks,
        )
        self._at.last_sampled.keep(step.inputs, ids)
        return ids

    def _logits_at(self, step: _Step) -> Callable[[I64], torch.Tensor]:
        def logits(places: I64) -> torch.Tensor:
            at = torch.from_numpy(places).to(self.device)
            return step.logits[at] if step.logits is not None else self._layers.logits(step.hidden[at])

        return logits

    def _told(self, step: _Step) -> InFlight:
        """With log probabilities, which are looked at on the host: such a step is waited for."""
        shaping, staging, told, prompts = step.inputs.shaping, self._at.staging, None, None
        token_ids, masks = NO_IDS, NO_MASKS if shaping is None else masks_of(shaping.grammars)
        nan_rows: tuple[int, ...] = ()
        with staging.compute.working():
            if step.inputs.prompt_asks:
                prompts = sampler.prompt_logprobs(self._logits_at(step), step.inputs)
            if len(step.inputs.sample_rows):
                logits = self._logits_of(step)
                rows = NO_ROWS if shaping is None else shaping.logprob_rows
                raw = logits[torch.from_numpy(rows).to(self.device)].float()
                token_ids, nan_rows = ids_of(self._sampled(step, logits, masks).cpu().numpy())
                if shaping is not None and len(rows):
                    told = sampler.logprobs(raw, token_ids[rows].astype(np.int64), shaping)
            undrawn = masks.waiting_rows, masks.refused_rows
            known = StepOutput(NO_BYTES, token_ids, told, prompts, nan_rows, *undrawn)
        staging.end(step.turn)
        return InFlight(step.turn.out, NO_BYTES, known=known)


def columns_of(layout: Layout, packed: torch.Tensor) -> DeviceColumns:
    return DeviceColumns(
        _view(packed, layout.kv_slots),
        _view(packed, layout.positions),
        _view(packed, layout.row_starts),
        _view(packed, layout.context_lens),
        _view(packed, layout.decode_order),
        _view(packed, layout.block_tables),
    )


def _view(packed: torch.Tensor, field: Field) -> torch.Tensor:
    return packed[field.offset : field.end].view(TORCH_TYPES[field.dtype]).view(field.shape)
