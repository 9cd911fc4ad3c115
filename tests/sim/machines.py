"""The machines of a seed: the fake model without what only text needs, exact or with numerics of its own."""

from dataclasses import replace
from functools import cache

import numpy as np

from chassis.messages.card import build_card, parse_card
from shard_worker.executor import Loaded, LoadFailed, ModelFacts, StageSpec, StepInputs, StepOutput
from shard_worker.fake_model import FakeConfig, FakeExecutor


@cache
def _lean(facts: ModelFacts) -> ModelFacts:
    """Without tokenizer and template: to build them takes longer than a seed has."""
    card = replace(parse_card(facts.card), tokenizer_json=b"", chat_template="")
    return replace(facts, card=build_card(card))


class Exact(FakeExecutor):
    def __init__(self, config: FakeConfig, layer_us: float = 0.0, layers_max: int = 0) -> None:
        super().__init__(config, lambda s: None)
        self._own = {"layer_us": layer_us, "layers_max": layers_max}

    @property
    def facts(self) -> ModelFacts:
        return replace(_lean(super().facts), **self._own)  # type: ignore[arg-type]

    def load(self, spec: StageSpec) -> Loaded:
        num_layers = spec.end_layer - spec.first_layer
        if 0 < self._own["layers_max"] < num_layers:
            raise LoadFailed(f"{num_layers} layers")
        return super().load(spec)


class Wobbly(Exact):
    """Its numerics depend on the machine: no two processes continue a text alike."""

    def __init__(self, config: FakeConfig, salt: int, layer_us: float = 0.0, layers_max: int = 0) -> None:
        super().__init__(config, layer_us, layers_max)
        self._salt = np.uint64(salt)

    def run(self, inputs: StepInputs, activations: memoryview) -> StepOutput:
        drawn = np.ones_like(inputs.temperature)
        inputs = replace(inputs, seeds=inputs.seeds ^ self._salt, temperature=drawn)
        return super().run(inputs, activations)
