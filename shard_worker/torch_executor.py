"""Runs the layers of one stage with torch: the executor for real models.

Weights and KV memory stay resident while the layer range stays the same. Only rows that sample go through
the head. Calls block and come from one thread at a time; the number of threads torch may use is fixed at
start (spinning threads on busy cores cost more than they bring: one is the default).
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from shard_worker import kv_tensors, sampler
from shard_worker.attention.cpu import CpuAttention
from shard_worker.attention.interface import Attention, LayerKv
from shard_worker.card import card_of
from shard_worker.executor import Loaded, LoadFailed, ModelFacts, StageSpec, StepInputs, StepOutput
from shard_worker.model.config import ModelConfig
from shard_worker.model.layers import DTYPES, precision_of
from shard_worker.model.llama import LlamaStage
from shard_worker.weights import digest_of, find_model, model_name, open_checkpoint

NUM_BLOCKS_MAX = 1 << 24
NO_BYTES = memoryview(b"")
NO_IDS = np.empty(0, np.uint32)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    model: str  # a path, or the name of a packaged model
    model_name: str = ""  # what users call it; empty: after the path
    dtype: str = "float32"  # or bfloat16
    threads: int = 1
    kv_memory_mb: int = 512
    num_blocks: int | None = None  # instead of kv_memory_mb
    digest_cache_dir: str = ""  # empty: the user's cache folder


@dataclass(frozen=True, slots=True)
class _Resident:
    """What stays in memory between formations."""

    first_layer: int
    end_layer: int
    block_size_tokens: int
    stage: LlamaStage
    kv: list[LayerKv]
    num_blocks: int

    @property
    def key(self) -> tuple[int, int, int]:
        return self.first_layer, self.end_layer, self.block_size_tokens


class TorchExecutor:
    def __init__(self, config: EngineConfig, attention: Attention | None = None) -> None:
        """Reads the model's configuration and card, no weights. Raises LoadFailed."""
        if config.dtype not in DTYPES:
            raise LoadFailed(f"dtype {config.dtype!r} is not one of {', '.join(DTYPES)}")
        torch.set_num_threads(config.threads)
        path = find_model(config.model)
        self._config = config
        self._checkpoint = open_checkpoint(path)
        self._precision = precision_of(DTYPES[config.dtype])
        self._attention: Attention = attention or CpuAttention()
        self._resident: _Resident | None = None
        self._spec: StageSpec | None = None
        model = self._checkpoint.config
        cache_dir = Path(config.digest_cache_dir) if config.digest_cache_dir else None
        digest = digest_of(self._checkpoint, cache_dir)
        name = config.model_name or model_name(config.model, path)
        self._facts = ModelFacts(
            name=name,
            digest=digest,
            num_layers=model.num_layers,
            head_cost_layers=model.vocab_size * model.hidden_size / model.layer_params,
            activation_bytes=model.hidden_size * self._precision.dtype.itemsize,
            context_len_max=model.context_len_max,
            card=card_of(self._checkpoint, name, digest),
        )

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    def load(self, spec: StageSpec) -> Loaded:
        model = self._checkpoint.config
        _check_spec(spec, model)
        wanted = (spec.first_layer, spec.end_layer, spec.block_size_tokens)
        anew = self._resident is None or self._resident.key != wanted
        if anew:
            self._take_memory(spec)
        resident = self._resident
        assert resident is not None
        if self._spec is None or self._spec.step_tokens_max != spec.step_tokens_max or anew:
            hidden_bytes = spec.step_tokens_max * self._facts.activation_bytes
            self._input_bytes = torch.empty(hidden_bytes, dtype=torch.uint8)
            self._output_bytes = torch.empty(hidden_bytes, dtype=torch.uint8)
        self._spec = spec
        return Loaded(resident.num_blocks, kv_allocated=anew)

    def _take_memory(self, spec: StageSpec) -> None:
        """Raises LoadFailed; then nothing is resident."""
        model, num_layers = self._checkpoint.config, spec.end_layer - spec.first_layer
        compute = self._precision.compute
        block_bytes = kv_tensors.bytes_per_block(model, num_layers, spec.block_size_tokens, compute)
        num_blocks = self._config.num_blocks or (self._config.kv_memory_mb << 20) // block_bytes
        if not 0 < num_blocks <= NUM_BLOCKS_MAX:
            raise LoadFailed(
                f"kv_memory_mb = {self._config.kv_memory_mb}: {num_blocks} blocks of {block_bytes} bytes"
            )
        old, stage = self._resident, None
        if old is not None and (old.first_layer, old.end_layer) == (spec.first_layer, spec.end_layer):
            stage = old.stage
        del old
        self._resident = None  # what is replaced goes before the new is taken
        try:
            with torch.inference_mode():
                stage = stage or LlamaStage(
                    self._checkpoint, spec.first_layer, spec.end_layer, self._precision
                )
            kv = kv_tensors.allocate(model, num_layers, num_blocks, spec.block_size_tokens, compute)
        except (MemoryError, RuntimeError) as error:
            raise LoadFailed(f"{num_layers} layers and {num_blocks} blocks: {error}") from None
        self._resident = _Resident(
            spec.first_layer, spec.end_layer, spec.block_size_tokens, stage, kv, num_blocks
        )

    def run(self, inputs: StepInputs, activations: memoryview) -> StepOutput:
        spec, resident = self._spec, self._resident
        assert spec is not None and resident is not None, "run before load"
        num_tokens = len(inputs.token_ids)
        assert num_tokens <= spec.step_tokens_max
        if num_tokens == 0:
            return StepOutput(NO_BYTES, NO_IDS)
        with torch.inference_mode():
            hidden = self._hidden_in(resident.stage, inputs, activations)
            hidden = resident.stage.run_layers(
                hidden,
                torch.from_numpy(inputs.positions),
                self._attention.step(inputs, resident.block_size_tokens),
                resident.kv,
            )
            if resident.stage.head is not None:
                return StepOutput(NO_BYTES, self._sample(resident.stage, inputs, hidden))
            return StepOutput(self._hidden_out(hidden), NO_IDS)

    def _hidden_in(self, stage: LlamaStage, inputs: StepInputs, activations: memoryview) -> torch.Tensor:
        num_tokens = len(inputs.token_ids)
        if stage.embedding is not None:
            assert int(inputs.token_ids.max()) < stage.config.vocab_size
            return stage.embed(torch.from_numpy(inputs.token_ids.astype(np.int64)))
        num_bytes = num_tokens * self._facts.activation_bytes
        assert activations.nbytes == num_bytes
        self._input_bytes.numpy()[:num_bytes] = np.frombuffer(activations, np.uint8)
        received = self._input_bytes[:num_bytes].view(self._precision.dtype)
        return received.view(num_tokens, -1).to(self._precision.compute)

    def _hidden_out(self, hidden: torch.Tensor) -> memoryview:
        num_bytes = hidden.shape[0] * self._facts.activation_bytes
        sent = self._output_bytes[:num_bytes]
        sent.view(self._precision.dtype).view(hidden.shape).copy_(hidden)
        return sent.numpy().data

    def _sample(self, stage: LlamaStage, inputs: StepInputs, hidden: torch.Tensor) -> sampler.Ids:
        if not len(inputs.sample_rows):
            return NO_IDS
        last = inputs.row_offsets[inputs.sample_rows + 1].astype(np.int64) - 1
        logits = stage.logits(hidden.index_select(0, torch.from_numpy(last)))
        return sampler.sample(logits, sampler.columns_of(inputs))


def _check_spec(spec: StageSpec, model: ModelConfig) -> None:
    if not 0 <= spec.first_layer < spec.end_layer <= model.num_layers:
        raise LoadFailed(
            f"layers {spec.first_layer} to {spec.end_layer}: out of {model.num_layers}, and at least one"
        )
    if (spec.stage == 0) != (spec.first_layer == 0):
        raise LoadFailed(f"stage {spec.stage} can't begin at layer {spec.first_layer}")
    if (spec.stage == spec.num_stages - 1) != (spec.end_layer == model.num_layers):
        raise LoadFailed(f"stage {spec.stage} of {spec.num_stages} can't end at layer {spec.end_layer}")
    if spec.block_size_tokens < 1 or spec.step_tokens_max < 1:
        raise LoadFailed("block size and tokens per step must be at least 1")
