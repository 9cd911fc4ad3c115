"""Runs the layers of one stage: the executor for real models, over compiled code or torch (`engine`).

Weights and KV memory stay resident while the layer range stays the same. Only rows that sample go through
the head. Calls block and come from one thread at a time; the number of threads torch may use is fixed at
start (spinning threads on busy cores cost more than they bring: one is the default).
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from chassis import log
from shard_worker import kv_tensors, sampler
from shard_worker.attention.cpu import CpuAttention
from shard_worker.attention.interface import Attention, LayerKv
from shard_worker.card import card_of
from shard_worker.device import choice
from shard_worker.device.memory import num_blocks_of
from shard_worker.device.pages import DevicePages
from shard_worker.device.stage import DeviceStage
from shard_worker.executor import (
    I64,
    U32,
    Loaded,
    LoadFailed,
    ModelFacts,
    Pages,
    StageSpec,
    StepInputs,
    StepOutput,
    check_spec,
)
from shard_worker.formats import BITS, QUANTIZE, digest_as_kept, packs_some, prepared_stage
from shard_worker.hf_dir import HfCheckpoint
from shard_worker.kv_pages import HostPages
from shard_worker.last_sampled import LastSampled
from shard_worker.model.families import FAMILIES, stage_weights
from shard_worker.model.layers import DTYPES, Precision, precision_of
from shard_worker.model.stage import Stage, StageMemory, Total
from shard_worker.model.stage_weights import StageWeights
from shard_worker.model.torch_stage import TorchStage
from shard_worker.native import library
from shard_worker.native_stage import NativeStage, unsupported
from shard_worker.transformers_config import FAMILY
from shard_worker.transformers_stage import TransformersStage
from shard_worker.weights import (
    Checkpoint,
    FiniteWeights,
    digest_of,
    find_model,
    model_name,
    open_checkpoint,
)

ENGINES = ("auto", "native", "torch", "transformers", "device")
NUM_BLOCKS_MAX = 1 << 24
NO_BYTES = memoryview(b"")
NO_IDS = np.empty(0, np.uint32)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    model: str  # a path, or the name of a packaged model or of one in the repository
    model_name: str = ""  # what users call it; empty: after the path
    repository: str = ""  # folder of models with versions; empty: in the user's data folder
    dtype: str = "float32"  # or bfloat16
    quantize: str = "none"  # or keep, int8, int4: see `formats.prepared`
    int8_activations: bool | None = None  # in products with packed weights; None: with int8 and int4
    engine: str = "auto"  # or one of ENGINES; auto: native where it can be had and runs the model
    threads: int = 1
    context_len: int = 0  # 0: the model's own
    kv_memory_mb: int = 512
    num_blocks: int | None = None  # instead of kv_memory_mb
    device: str = "cpu"  # or cuda, cuda:N, auto: see `device.choice`
    device_memory: float = 0.85  # of the device, what KV blocks may take of what is free beside the weights
    digest_cache_dir: str = ""  # empty: the user's cache folder


@dataclass(frozen=True, slots=True)
class _Resident:
    """What stays in memory between formations."""

    first_layer: int
    end_layer: int
    block_size_tokens: int
    stage: Stage
    kv: list[LayerKv]
    pages: Pages
    num_blocks: int

    @property
    def key(self) -> tuple[int, int, int]:
        return self.first_layer, self.end_layer, self.block_size_tokens


class TorchExecutor:
    def __init__(self, config: EngineConfig, attention: Attention | None = None) -> None:
        """Reads the model's configuration and card, no weights. Raises LoadFailed."""
        self._device = choice.chosen(config.device)
        dtypes = DTYPES if self._device.type == "cpu" else choice.DTYPES
        if config.dtype not in dtypes:
            raise LoadFailed(f"dtype {config.dtype!r} is not one of {', '.join(dtypes)}")
        if config.quantize not in QUANTIZE:
            raise LoadFailed(f"quantize {config.quantize!r} is not one of {', '.join(QUANTIZE)}")
        if config.engine not in ENGINES:
            raise LoadFailed(f"engine {config.engine!r} is not one of {', '.join(ENGINES)}")
        torch.set_num_threads(config.threads)
        path = find_model(config.model, Path(config.repository) if config.repository else None)
        self._config = config
        self._checkpoint = open_checkpoint(path, config.context_len)
        dtype = dtypes[config.dtype]
        cpu = self._device.type == "cpu"
        self._precision = precision_of(dtype) if cpu else Precision(dtype, dtype)
        self._attention: Attention = attention or CpuAttention()
        self._given_attention = attention is not None
        self._resident: _Resident | None = None
        self._spec: StageSpec | None = None
        self._last_sampled = LastSampled(0)
        model = self._checkpoint.config
        cache_dir = Path(config.digest_cache_dir) if config.digest_cache_dir else None
        self._int8_activations = self._rounds_activations()
        digest = digest_as_kept(digest_of(self._checkpoint, cache_dir), config.quantize)
        digest = digest_as_kept(digest, "int8 activations" if self._int8_activations else "none")
        digest = digest_as_kept(digest, "stretched" if model.stretched else "none")
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
    def stage(self) -> Stage | None:
        """What is loaded."""
        return None if self._resident is None else self._resident.stage

    @property
    def device_name(self) -> str:
        return "cpu" if self._device.type == "cpu" else torch.cuda.get_device_name(self._device)

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    @property
    def pages(self) -> Pages | None:
        return None if self._resident is None else self._resident.pages

    @property
    def checkpoint(self) -> Checkpoint:
        return self._checkpoint

    @property
    def int8_activations(self) -> bool:
        """Whether products with packed weights round their inputs to 8 bits."""
        return self._int8_activations

    def load(self, spec: StageSpec) -> Loaded:
        check_spec(spec, self._checkpoint.config.num_layers)
        return self._loaded(spec, self._is_new(spec))

    def _is_new(self, spec: StageSpec) -> bool:
        """Whether its KV memory has to be taken anew."""
        wanted = (spec.first_layer, spec.end_layer, spec.block_size_tokens)
        return self._resident is None or self._resident.key != wanted

    def _loaded(self, spec: StageSpec, anew: bool) -> Loaded:
        """Raises LoadFailed."""
        if anew:
            self._take_memory(spec)
        resident = self._resident
        assert resident is not None
        if self._spec is None or self._spec.step_tokens_max != spec.step_tokens_max or anew:
            try:
                resident.stage.attach(StageMemory(resident.kv, spec.block_size_tokens, spec.step_tokens_max))
            except (MemoryError, RuntimeError) as error:
                self._resident = self._spec = None  # the next load takes its KV memory anew, and says so
                raise LoadFailed(f"steps of {spec.step_tokens_max} tokens: {error}") from None
        self._spec = spec
        self._last_sampled = LastSampled(spec.slots_max)
        return Loaded(resident.num_blocks, kv_allocated=anew)

    def _take_memory(self, spec: StageSpec) -> None:
        """Raises LoadFailed; then nothing is resident."""
        old, stage = self._resident, None
        if old is not None and (old.first_layer, old.end_layer) == (spec.first_layer, spec.end_layer):
            stage = old.stage
            stage.release()
        del old
        self._resident = None  # what is replaced goes before the new is taken
        num_layers = spec.end_layer - spec.first_layer
        try:
            with torch.inference_mode():
                stage = stage or self._make_stage(spec)
            heads, form = self._kv_of(stage)
            num_blocks = self._num_blocks(spec, stage)
            if (there := self._there(stage)) is not None:
                kv = there.allocate(num_blocks, spec.block_size_tokens)
                pages: Pages = DevicePages(kv, spec.block_size_tokens)
            else:
                kv = kv_tensors.allocate(heads, num_layers, num_blocks, spec.block_size_tokens, form)
                pages = kv_tensors.pages_of(kv, spec.block_size_tokens, form)
        except (MemoryError, RuntimeError) as error:
            raise LoadFailed(f"{num_layers} layers and their KV memory: {error}") from None
        self._checkpoint.let_go()
        self._resident = _Resident(
            spec.first_layer, spec.end_layer, spec.block_size_tokens, stage, kv, pages, num_blocks
        )

    def _kv_of(self, stage: Stage) -> tuple[kv_tensors.KvHeads, kv_tensors.KvForm]:
        """What the pages of a stage hold, and how it wants them."""
        form = stage.kv_form if isinstance(stage, NativeStage) else kv_tensors.KvForm(self._precision.compute)
        return self._checkpoint.config, form

    def _num_blocks(self, spec: StageSpec, stage: Stage) -> int:
        """Raises LoadFailed."""
        config, num_layers = self._config, spec.end_layer - spec.first_layer
        heads, form = self._kv_of(stage)
        block_bytes = kv_tensors.bytes_per_block(heads, num_layers, spec.block_size_tokens, form)
        if (there := self._there(stage)) is not None:
            num_blocks = num_blocks_of(
                there, spec, config.num_blocks, config.device_memory, config.kv_memory_mb
            )
        else:
            num_blocks = config.num_blocks or (config.kv_memory_mb << 20) // block_bytes
        if not 0 < num_blocks <= NUM_BLOCKS_MAX:
            raise LoadFailed(
                f"kv_memory_mb = {self._config.kv_memory_mb}: {num_blocks} blocks of {block_bytes} bytes"
            )
        return num_blocks

    def _make_stage(self, spec: StageSpec) -> Stage:
        """Raises LoadFailed."""
        if (reason := self._not_there()) is not None:
            raise LoadFailed(reason)
        if self._by_library:
            return self._transformers_stage(spec)
        weights = stage_weights(FiniteWeights(self._checkpoint), spec.first_layer, spec.end_layer)
        return self._stage_of(weights)

    @property
    def _by_library(self) -> bool:
        return self._config.engine == "transformers" or self._checkpoint.config.family == FAMILY

    def _not_there(self) -> str | None:
        """Why this can't compute on its device; None: it can."""
        if self._device.type == "cpu" or not (self._by_library or self._config.engine in ("native", "torch")):
            return None
        how = "the transformers library" if self._by_library else f"engine {self._config.engine}"
        return f"device {self._device}: {how} computes on the processor"

    def _there(self, stage: Stage) -> DeviceStage | None:
        """What has memory on a device of such a stage."""
        return stage if isinstance(stage, DeviceStage) else None

    def _stage_of(self, weights: StageWeights, total: Total | None = None) -> Stage:
        """`total`: over ranks. Raises LoadFailed."""
        if self._device.type != "cpu" or self._config.engine == "device":
            dtype, quantize = self._precision.dtype, self._config.quantize
            return DeviceStage(weights, dtype, self._device, quantize=quantize, total=total)
        if (native := self._native_stage(weights, total)) is not None:
            return native
        if self._config.quantize in BITS:
            weights = prepared_stage(weights, self._config.dtype, self._config.quantize)
        return TorchStage(weights, self._precision, self._attention, total)

    def _transformers_stage(self, spec: StageSpec) -> Stage:
        """For what no file here describes, or when asked for. Raises LoadFailed."""
        config = self._config
        if config.engine not in ("auto", "transformers") or config.quantize not in ("none", "keep"):
            raise LoadFailed(
                f"a model run by the transformers library can't have engine {config.engine} "
                f"or quantize {config.quantize}"
            )
        if not isinstance(self._checkpoint, HfCheckpoint):
            raise LoadFailed("engine transformers needs a folder of Hugging Face's form")
        return TransformersStage(
            self._checkpoint, spec.first_layer, spec.end_layer, self._precision, self._attention
        )

    def _rounds_activations(self) -> bool:
        """As asked; unasked where weights are quantised here and compiled code runs. Raises LoadFailed."""
        config = self._config
        asked = config.int8_activations
        if asked is False or (asked is None and config.quantize not in BITS):
            return False
        if config.quantize == "none":
            raise LoadFailed("int8_activations: quantize none packs no weights; say keep, int8 or int4")
        reason = self._not_compiled()
        if reason is not None and asked:
            raise LoadFailed(f"int8_activations: only compiled code rounds them, and {reason}")
        return reason is None

    def _not_compiled(self) -> str | None:
        """Why stages of this model won't run in compiled code; None: they will."""
        config, model = self._config, self._checkpoint.config
        if self._device.type != "cpu":
            return f"device {self._device} computes"
        if config.engine not in ("auto", "native") or self._given_attention:
            return f"engine {config.engine} computes"
        if model.family not in FAMILIES:
            return "the transformers library computes"
        if (reason := unsupported(model)) is not None:
            return reason
        return "there is none" if library.native() is None else None

    def _native_stage(self, weights: StageWeights, total: Total | None) -> NativeStage | None:
        """None: torch is to compute. Raises LoadFailed."""
        config = self._config
        if config.engine == "torch" or self._given_attention:
            return None
        compiled, reason = library.native(), unsupported(weights)
        if compiled is not None and reason is None:
            if config.int8_activations and not packs_some(weights, config.dtype, config.quantize):
                raise LoadFailed(f"int8_activations: quantize {config.quantize} packs no weights here")
            return NativeStage(
                weights,
                compiled,
                dtype=config.dtype,
                quantize=config.quantize,
                int8_activations=self._int8_activations,
                threads=config.threads,
                total=total,
            )
        reason = reason or "there is no compiled code"
        if config.engine == "native":
            raise LoadFailed(f"engine native: {reason}")
        log.info("torch computes", reason=reason)
        return None

    def copy_blocks(self, sources: U32, targets: U32) -> None:
        resident = self._resident
        assert resident is not None, "copy before load"
        if (there := self._there(resident.stage)) is not None:
            there.copy_blocks(sources, targets)
        else:
            assert isinstance(resident.pages, HostPages)
            resident.pages.copy(sources, targets)

    def run(self, inputs: StepInputs, activations: memoryview) -> StepOutput:
        spec, resident = self._spec, self._resident
        assert spec is not None and resident is not None, "run before load"
        num_tokens = len(inputs.token_ids)
        assert num_tokens <= spec.step_tokens_max
        if num_tokens == 0:
            return StepOutput(NO_BYTES, NO_IDS)
        if isinstance(resident.stage, DeviceStage):
            return resident.stage.begin(inputs, activations).result()
        inputs = self._last_sampled.known(inputs)
        last = inputs.row_offsets[inputs.sample_rows + 1].astype(np.int64) - 1
        sent = resident.stage.run(inputs, activations, None if inputs.prompt_asks else last)
        if spec.stage < spec.num_stages - 1:
            return StepOutput(sent, NO_IDS)
        prompts = sampler.prompt_logprobs(resident.stage.logits, inputs) if inputs.prompt_asks else None
        if not len(inputs.sample_rows):
            return StepOutput(NO_BYTES, NO_IDS, prompts=prompts)
        output = sampler.output(resident.stage.logits(last), inputs, prompts)
        self._last_sampled.keep(inputs, output.token_ids)
        return output

    def logits(self, tokens: I64) -> torch.Tensor:
        """Of the last run's tokens at these places, on the last stage, for checks: [k, vocab_size].

        Only of those that sampled: compiled code spares the others the last layer.
        """
        assert self._resident is not None, "logits before load"
        return self._resident.stage.logits(tokens)

    def times_ns(self) -> dict[str, int] | None:
        """Wall time of all runs by what it went to; None: only compiled code counts it."""
        stage = self._resident.stage if self._resident is not None else None
        return stage.times_ns() if isinstance(stage, NativeStage) else None

    def take_costs(self, head_cost_layers: float, layer_us: float) -> None:
        """What final norm, head and sampling cost here, as measured, in layers; and what a layer takes."""
        self._facts = replace(self._facts, head_cost_layers=head_cost_layers, layer_us=layer_us)

    def take_room(self, layers_max: int, head_layers: float, ends_layers: float) -> None:
        """How many layers there is memory for, and what embedding or head, and both, take of that."""
        self._facts = replace(
            self._facts, layers_max=layers_max, head_layers=head_layers, ends_layers=ends_layers
        )
