"""The stage implementations under test, and a way to run them as a pipeline without an executor."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from shard_worker.attention.cpu import CpuAttention
from shard_worker.executor import U32, Loaded, ModelFacts, Pages, StageSpec, StepInputs, StepOutput
from shard_worker.kv_tensors import KvForm, allocate, pages_of
from shard_worker.model.families import stage_weights
from shard_worker.model.layers import Precision
from shard_worker.model.stage import Stage, StageMemory
from shard_worker.model.stage_weights import StageWeights
from shard_worker.model.tensors import TensorSource
from shard_worker.model.torch_stage import TorchStage
from shard_worker.native import library
from shard_worker.native_stage import NativeStage, unsupported

FLOAT32 = Precision(torch.float32, torch.float32)
# Each makes a stage that computes in float32.
STAGES: dict[str, Callable[[StageWeights], Stage]] = {
    "torch": lambda weights: TorchStage(weights, FLOAT32, CpuAttention()),
}
COMPILED = library.native()


def native(weights: StageWeights) -> Stage:
    assert COMPILED is not None
    if (reason := unsupported(weights)) is not None:
        pytest.skip(reason)
    return NativeStage(weights, COMPILED, dtype="float32")


if COMPILED is not None:
    STAGES["native"] = native


class StageExecutor:
    """One stage with KV memory; samples greedily and keeps the logits it saw."""

    facts: ModelFacts
    pages: Pages | None = None

    def __init__(
        self, checkpoint: TensorSource, make: Callable[[StageWeights], Stage], num_blocks: int = 120
    ) -> None:
        self._checkpoint, self._make, self._num_blocks = checkpoint, make, num_blocks
        self.logits: list[torch.Tensor] = []

    def load(self, spec: StageSpec) -> Loaded:
        self._last = spec.stage == spec.num_stages - 1
        config, num_layers = self._checkpoint.config, spec.end_layer - spec.first_layer
        self._stage = self._make(stage_weights(self._checkpoint, spec.first_layer, spec.end_layer))
        form = getattr(self._stage, "kv_form", KvForm(torch.float32))
        kv = allocate(config, num_layers, self._num_blocks, spec.block_size_tokens, form)
        self.pages = pages_of(kv, spec.block_size_tokens, form)
        self._stage.attach(StageMemory(kv, spec.block_size_tokens, spec.step_tokens_max))
        return Loaded(self._num_blocks, True)

    def copy_blocks(self, sources: U32, targets: U32) -> None:
        raise AssertionError("nobody shares a prompt here")

    def run(self, inputs: StepInputs, activations: memoryview) -> StepOutput:
        sent = self._stage.run(inputs, activations)
        if not self._last:
            return StepOutput(sent, np.empty(0, np.uint32))
        assert not sent.nbytes
        last = inputs.row_offsets[inputs.sample_rows + 1].astype(np.int64) - 1
        logits = self._stage.logits(last).clone()
        self.logits += list(logits)
        return StepOutput(sent, logits.argmax(-1).numpy().astype(np.uint32))
