"""What layers and head take on this machine: stages share the layers by time, not by count.

Layers that are alike are measured once, in processor time, since others may be busy. What was measured is
kept in the user's cache, so that a model's workers on one machine agree: who else is about to measure waits
for the first.
"""

import fcntl
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from shard_worker.executor import Executor, LoadFailed, StageSpec, StepOutput
from shard_worker.model.families import FAMILIES, stage_weights
from shard_worker.model.stage_weights import LayerWeights
from shard_worker.probe import ProbeRow, probe_inputs
from shard_worker.weights import Checkpoint

MEASURED_AS = "1"  # changes when older measurements no longer hold
ROWS = 16  # sequences that decode together
CONTEXT_LEN = 64
BLOCK_SIZE_TOKENS = 16
BATCHES, BATCH_S = 5, 0.01

OFF_MAX = 3.0  # beyond this factor from what the sizes say, a measurement is taken for an accident

Clock = Callable[[], float]  # processor seconds
Kind = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Costs:
    """Of a decode step with `ROWS` sequences."""

    layer_us: tuple[float, ...]  # one a layer
    head_us: float  # final norm, head and sampling

    @property
    def head_cost_layers(self) -> float:
        return self.head_us / fmean(self.layer_us)


def split_by_time(costs: Costs, num_stages: int) -> list[tuple[int, int]]:
    """Layer ranges whose slowest stage is as quick as can be; the last stage has the head too."""
    num_layers = len(costs.layer_us)
    assert 1 <= num_stages <= num_layers, "a stage needs a layer"
    upto = np.concatenate(([0.0], np.cumsum(costs.layer_us)))
    best = [[math.inf] * (num_layers + 1) for _ in range(num_stages + 1)]  # [stages][layers so far]
    cut = [[0] * (num_layers + 1) for _ in range(num_stages + 1)]
    best[0][0] = 0.0
    for stage in range(1, num_stages + 1):
        head = costs.head_us if stage == num_stages else 0.0
        for end in range(stage, num_layers + 1):
            for first in range(stage - 1, end):
                slowest = max(best[stage - 1][first], float(upto[end] - upto[first]) + head)
                if slowest < best[stage][end]:
                    best[stage][end], cut[stage][end] = slowest, first
    ranges, end = [], num_layers
    for stage in range(num_stages, 0, -1):
        ranges.append((cut[stage][end], end))
        end = cut[stage][end]
    return ranges[::-1]


def measure(executor: Executor, checkpoint: Checkpoint, clock: Clock) -> Costs:
    """Loads one layer of each kind, then the last with the head. Raises LoadFailed."""
    facts = executor.facts
    kinds = [_kind_of(checkpoint, i) for i in range(facts.num_layers)]
    last = facts.num_layers - 1
    took_us: dict[Kind, float] = {}
    for layer in reversed(range(last)):  # the first has the embedding with it, so another if there is one
        if kinds[layer] not in took_us:
            spec = _spec(min(layer, 1), 2 if last == 1 else 3, layer)
            took_us[kinds[layer]] = _step_us(executor, spec, clock)
    whole_us = _step_us(executor, _spec(min(last, 2), min(last + 1, 3), last), clock)
    if kinds[last] not in took_us:  # nothing to take off: by the sizes
        took_us[kinds[last]] = whole_us / (1 + facts.head_cost_layers)
    layer_us = tuple(took_us[kind] for kind in kinds)
    by_size_us = facts.head_cost_layers * fmean(layer_us)
    head_us = min(max(whole_us - layer_us[last], by_size_us / OFF_MAX), by_size_us * OFF_MAX)
    return Costs(layer_us, head_us)


def _spec(stage: int, num_stages: int, layer: int) -> StageSpec:
    if layer == 0:
        stage = 0
    return StageSpec(stage, num_stages, layer, layer + 1, BLOCK_SIZE_TOKENS, ROWS, ROWS)


def _kind_of(checkpoint: Checkpoint, layer: int) -> Kind:
    if checkpoint.config.family not in FAMILIES:
        return ()  # what is not described is taken to be alike
    return _kind(stage_weights(checkpoint, layer, layer + 1).layers[0])


def _kind(layer: LayerWeights) -> Kind:
    """Layers of the same kind take the same time."""
    linears = (layer.qkv, layer.out, layer.gate_up, layer.down)
    matrices = tuple((m.format, m.outputs, m.inputs) for linear in linears for m in linear.matrices)
    return (*matrices, layer.window, layer.q_norm is None, layer.post_mlp_norm is None)


def _step_us(executor: Executor, spec: StageSpec, clock: Clock) -> float:
    per_row = CONTEXT_LEN // BLOCK_SIZE_TOKENS
    num_rows = min(ROWS, executor.load(spec).num_blocks // per_row)
    if not num_rows:
        raise LoadFailed(f"no {per_row} KV blocks to measure a step with")
    blocks = np.arange(num_rows * per_row).reshape(num_rows, per_row).tolist()
    inputs = probe_inputs([ProbeRow([1], CONTEXT_LEN - 1, row) for row in blocks], BLOCK_SIZE_TOKENS)
    hidden = memoryview(b"")
    if spec.stage:
        numbers = np.zeros(num_rows * executor.facts.activation_bytes, np.uint8)
        numbers[3::4] = 0x3E  # float32 of 0.125, or pairs of bfloat16
        hidden = numbers.data

    def run() -> StepOutput:
        return executor.run(inputs, hidden)

    run()
    took_s = least_s(run, clock)
    return round(took_s * 1e6 * ROWS / num_rows, 1)


def least_s(run: Callable[[], object], clock: Clock) -> float:
    """Of a run, in the best of some batches: each long enough that the clock's own steps, as coarse as a tick
    of the machine's or a little back, are small in it. Never 0."""
    means = []
    for _ in range(BATCHES):
        start, runs, took_s = clock(), 0, 0.0
        while took_s < BATCH_S:
            run()
            runs += 1
            took_s = clock() - start
        means.append(took_s / runs)
    return min(means)


# ---- kept -------------------------------------------------------------------------------------------


def known_or_measured(
    executor: Executor, checkpoint: Checkpoint, conditions: Sequence[object], folder: Path, clock: Clock
) -> Costs:
    """`conditions`: what else the time depends on. A folder that can't be written keeps nothing.

    Raises LoadFailed.
    """
    described = " ".join(map(str, (MEASURED_AS, executor.facts.digest, *conditions)))
    note = folder / f"{hashlib.sha256(described.encode()).hexdigest()}.costs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with note.open("a+", encoding="ascii") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            costs = _parse(file.read(), executor.facts.num_layers)
            if costs is None:
                costs = measure(executor, checkpoint, clock)
                file.truncate(0)
                file.write(json.dumps([costs.layer_us, costs.head_us]))
            return costs
    except OSError:
        return measure(executor, checkpoint, clock)


def _parse(text: str, num_layers: int) -> Costs | None:
    try:
        layer_us, head_us = json.loads(text)
        costs = Costs(tuple(map(float, layer_us)), float(head_us))
    except (ValueError, TypeError):
        return None
    fits = len(costs.layer_us) == num_layers and min(*costs.layer_us, costs.head_us) > 0
    return costs if fits and math.isfinite(costs.head_cost_layers) else None
