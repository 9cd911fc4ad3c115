"""A model whose numerics depend on the machine: no two processes continue a text alike."""

from dataclasses import replace

import numpy as np

from shard_worker.executor import StepInputs, StepOutput
from shard_worker.fake_model import FakeConfig, FakeExecutor


class Wobbly(FakeExecutor):
    def __init__(self, config: FakeConfig, salt: int) -> None:
        super().__init__(config, lambda s: None)
        self._salt = np.uint64(salt)

    def run(self, inputs: StepInputs, activations: memoryview) -> StepOutput:
        drawn = np.ones_like(inputs.temperature)
        inputs = replace(inputs, seeds=inputs.seeds ^ self._salt, temperature=drawn)
        return super().run(inputs, activations)
