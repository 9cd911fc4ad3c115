"""A device's stage on the processor: all of its logic but the kernels, held against the torch stage."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from chassis.transport.registered import MemoryRange
from shard_worker import sampler
from shard_worker.attention.cuda import best
from shard_worker.attention.pages import StepShape
from shard_worker.attention.reference import ReferenceAttention
from shard_worker.device.direct import DevicePool, flush_for, tensor_of
from shard_worker.device.graphs import Output
from shard_worker.device.stage import DeviceStage, MakeAttention
from shard_worker.device.staging import TURNS
from shard_worker.executor import ShapingColumns, StepInputs
from shard_worker.formats import prepared_stage
from shard_worker.kv_tensors import KvForm, allocate
from shard_worker.model.layers import Precision
from shard_worker.model.stage import NO_BYTES, Stage, StageMemory
from shard_worker.model.stage_weights import Activation, StageWeights
from shard_worker.model.torch_stage import TorchStage
from tests.contract.flashinfer_stand_in import flashinfer_on_stand_in
from tests.shard_worker import random_stage
from tests.shard_worker.test_invariance import Tokens, ids, step_inputs

BLOCK, NUM_BLOCKS, STEP_TOKENS = 8, 200, 160
CPU = torch.device("cpu")
VARIANTS = {
    "every option": random_stage.model(),
    "plain": random_stage.model(plain=True),
    "gelu": replace(random_stage.model(), activation=Activation.GELU_TANH, attention_scale=0.2),
}


def torch_stage(weights: StageWeights) -> Stage:
    stage = TorchStage(weights, Precision(torch.float32, torch.float32), ReferenceAttention())
    kv = allocate(weights, len(weights.layers), NUM_BLOCKS, BLOCK, KvForm(torch.float32))
    stage.attach(StageMemory(kv, BLOCK, STEP_TOKENS))
    return stage


def device_stage(weights: StageWeights, dtype: torch.dtype = torch.float32, **settings: Any) -> DeviceStage:
    stage = DeviceStage(weights, dtype, CPU, **settings)
    stage.attach(StageMemory(stage.allocate(NUM_BLOCKS, BLOCK), BLOCK, STEP_TOKENS))
    return stage


def steps() -> list[StepInputs]:
    """Prompts in chunks beside decodes, then decodes alone: as many as a shape has, and fewer."""
    long, short, third = (
        Tokens(ids(1, 150), list(range(40, 20, -1))),
        Tokens(ids(2, 20), [3, 9, 1]),
        Tokens(ids(3, 40), [60, 50, 70, 90, 80]),
    )
    plan = [
        [(long, 130), (short, 8)],
        [(short, 1), (long, 10), (third, 30)],
        [(short, 1), (third, 1), (long, 1)],
        [(third, 1), (long, 1)],
        [(long, 1)],
        [(third, 1), (long, 1), (short, 1)],
        [(short, 1), (long, 3), (third, 1)],
        [(long, 1), (short, 1)],
    ]
    made = []
    for rows in plan:
        made.append(step_inputs(rows))
        for sequence, count in rows:
            sequence.computed += count
    return made


def logits_of(stages: list[Stage]) -> list[torch.Tensor]:
    found = []
    for inputs in steps():
        carried = NO_BYTES
        for stage in stages:
            carried = stage.run(inputs, carried)
        found.append(stages[-1].logits(np.arange(len(inputs.token_ids))).clone())
    return found


class Replay:
    """As a recording does: what ran first for a shape runs again, with the columns and places it had then."""

    def __init__(self) -> None:
        self.recorded: dict[StepShape, Callable[[], Output]] = {}
        self.replayed = 0

    def run(self, shape: StepShape, work: Callable[[], Output]) -> Output:
        self.replayed += shape in self.recorded
        return self.recorded.setdefault(shape, work)()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("ends", [(3,), (1, 3)])
@pytest.mark.parametrize("attention", [best, flashinfer_on_stand_in])
@pytest.mark.parametrize("recorded", [True, False])
def test_is_the_torch_stage(
    variant: str, ends: tuple[int, ...], attention: MakeAttention, recorded: bool
) -> None:
    parts = random_stage.split(VARIANTS[variant], ends)
    expected = logits_of([torch_stage(w) for w in parts])
    replay = [Replay() for _ in parts]
    ours = logits_of(
        [
            device_stage(w, recorded=recorded, make_attention=attention, recorder=r)
            for w, r in zip(parts, replay, strict=True)
        ]
    )
    assert all(bool(r.replayed) is recorded for r in replay)
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("recorded", [True, False])
def test_activations_that_stay_on_the_device_are_the_same(recorded: bool) -> None:
    """As a direct link carries them: from the memory one stage leaves them in to a slot of the next."""
    parts = random_stage.split(VARIANTS["every option"], (1, 2, 3))
    expected = logits_of([torch_stage(w) for w in parts])
    stages = [device_stage(w, recorded=recorded, recorder=Replay()) for w in parts]
    slot = DevicePool(1 << 20, CPU)
    for inputs, theirs in zip(steps(), expected, strict=True):
        carried: memoryview | MemoryRange = NO_BYTES
        for stage in stages:
            output = stage.begin(inputs, carried, stays=True).result()
            assert not output.activations
            if output.direct is not None:
                assert output.direct.memory is stage.sends_from and output.direct.memory.device is None
                carried = MemoryRange(slot, 512, output.direct.nbytes)
                tensor_of(carried).copy_(tensor_of(output.direct))
        assert output.direct is None, "the last stage gives none"
        mine = stages[-1].logits(np.arange(len(inputs.token_ids)))
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=2e-5)


def test_what_stays_holds_until_the_third_step_after_it() -> None:
    stage = device_stage(random_stage.split(random_stage.model(), (2, 3))[0])
    kept = []
    for inputs in steps()[:TURNS]:
        sent = stage.begin(inputs, NO_BYTES, stays=True).result().direct
        assert sent is not None
        kept.append((sent, tensor_of(sent).clone()))
    for sent, content in kept:
        assert torch.equal(tensor_of(sent), content)
    assert len({sent.offset for sent, _ in kept}) == TURNS


class Driver:
    """CUDA's, as far as flushing goes."""

    def __init__(self, ordering: int, result: int = 0) -> None:
        self.ordering, self.result, self.flushed = ordering, result, 0

    def cuDeviceGet(self, handle: Any, index: int) -> int:
        assert index == 1
        handle._obj.value = 7
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:
        assert (attribute, device.value) == (118, 7)
        value._obj.value = self.ordering
        return self.result

    def cuFlushGPUDirectRDMAWrites(self, target: int, scope: int) -> int:
        assert (target, scope) == (0, 100)
        self.flushed += 1
        return self.result


def test_writes_of_a_card_are_flushed_where_the_gpu_does_not_order_them() -> None:
    gpu = torch.device("cuda", 1)
    for ordering, flushes in ((0, 1), (100, 0), (200, 0)):
        driver = Driver(ordering)
        flush_for(gpu, lambda found=driver: found)()  # type: ignore[misc]
        assert driver.flushed == flushes
    with pytest.raises(RuntimeError, match="cuDeviceGetAttribute: CUDA error 801"):
        flush_for(gpu, lambda: Driver(0, 801))  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("quantize", ["int8", "int4", "keep"])
def test_expands_what_is_quantised(quantize: str) -> None:
    weights = random_stage.model()
    whole = prepared_stage(weights, "float32", quantize)
    expected = logits_of([torch_stage(whole)])
    for mine, theirs in zip(logits_of([device_stage(weights, quantize=quantize)]), expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_are_near(dtype: torch.dtype) -> None:
    weights = random_stage.model()
    exact, rough = (
        torch.cat(logits_of([torch_stage(weights)])),
        torch.cat(logits_of([device_stage(w, dtype) for w in random_stage.split(weights, (2, 3))])),
    )
    assert 0 < float((rough - exact).norm() / exact.norm()) < 0.03


def test_padding_changes_no_page_of_a_sequence() -> None:
    """A step of five rows is padded to eight; what padding writes goes into the scrap block alone."""
    weights = random_stage.model()
    stage = device_stage(weights)
    sequences = [Tokens(ids(i, 3), [10 * i + 1]) for i in range(5)]
    stage.run(step_inputs([(sequence, 2) for sequence in sequences]), NO_BYTES)
    for sequence in sequences:
        sequence.computed = 2
    kv = stage._at.memory.kv
    before = [layer.keys.clone() for layer in kv]
    stage.run(step_inputs([(sequence, 1) for sequence in sequences]), NO_BYTES)
    for layer, old in zip(kv, before, strict=True):
        changed = (layer.keys != old).any(dim=3).any(dim=0).nonzero().tolist()
        assert changed == [[sequence.table[0], 2] for sequence in sequences] + [[NUM_BLOCKS, 0]]


def test_results_of_steps_under_way_stay_apart() -> None:
    """`TURNS` steps are begun before the first is asked for."""
    weights = random_stage.split(random_stage.model(), (1, 3))[0]
    stage = device_stage(weights)
    sequences = [Tokens(ids(i, 9), [i + 1, i + 20]) for i in range(TURNS)]
    inputs = [step_inputs([(sequence, i + 1)]) for i, sequence in enumerate(sequences)]
    alone = [bytes(stage.run(step, NO_BYTES)) for step in inputs]
    begun = [stage.begin(step, NO_BYTES) for step in inputs]
    assert [bytes(step.result().activations) for step in begun] == alone


def test_a_stage_takes_and_gives_bytes_of_its_type() -> None:
    stage = device_stage(random_stage.split(random_stage.model(), (1, 3))[0], torch.bfloat16)
    sent = stage.begin(step_inputs([(Tokens(ids(1, 3), [4]), 3)]), NO_BYTES).result()
    assert sent.activations.nbytes == 3 * random_stage.HIDDEN * 2 and not len(sent.token_ids)
    with pytest.raises(AssertionError):
        stage.begin(
            step_inputs([(Tokens(ids(1, STEP_TOKENS + 1), list(range(30))), STEP_TOKENS + 1)]), NO_BYTES
        )


def test_shaped_rows_and_log_probabilities_are_the_samplers() -> None:
    weights = random_stage.model()
    rows = [(Tokens(ids(i, 6), [i + 1]), 6 - i) for i in range(4)]
    few, none, floats = np.array([1, 2]), np.empty(0, np.int64), np.empty(0, np.float32)
    shaping = ShapingColumns(
        rows=np.array([0, 2]),
        bias_rows=np.array([0, 2]), bias_ids=np.array([7, 9]), bias=np.array([50, -5], np.float32),
        allowed=(), banned_rows=np.array([2]), banned_ids=np.array([3]),
        penalty_rows=np.array([2]), repetition=np.array([1.5], np.float32),
        frequency=np.array([0.5], np.float32), presence=np.array([0.1], np.float32),
        seen_lens=np.array([2]), seen_ids=np.array([4, 5]), seen_counts=np.array([1, 0], np.float32),
        min_p_rows=np.array([1]), min_p=np.array([0.1], np.float32), typical_rows=none, typical_p=floats,
        logprob_rows=few, top_logprobs=np.array([3, 0]),
    )  # fmt: skip
    inputs = replace(
        step_inputs(rows),
        sample_rows=np.arange(4, dtype=np.int32),
        temperature=np.array([0, 0.8, 0.9, 1.5], np.float32),
        top_k=np.array([0, 0, 20, 0], np.int32),
        top_p=np.array([1, 1, 0.9, 1], np.float32),
        seeds=np.arange(4, dtype=np.uint64),
        output_index=np.arange(4, dtype=np.int32),
        shaping=shaping,
    )
    reference = torch_stage(weights)
    reference.run(inputs, NO_BYTES)
    last = inputs.row_offsets[1:].astype(np.int64) - 1
    expected = sampler.output(reference.logits(last), inputs)
    found = device_stage(weights).begin(inputs, NO_BYTES).result()
    assert found.token_ids.tolist() == expected.token_ids.tolist() and found.token_ids[0] == 7
    ours, theirs = found.logprobs, expected.logprobs
    assert ours is not None and theirs is not None
    for name in ("places", "ranks", "top_lens", "top_ids"):
        assert getattr(ours, name).tolist() == getattr(theirs, name).tolist()
    np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)
    unshaped = replace(inputs, shaping=replace(shaping, logprob_rows=none, top_logprobs=none))
    again = device_stage(weights).begin(unshaped, NO_BYTES).result()
    assert again.token_ids.tolist() == found.token_ids.tolist() and again.logprobs is None
