"""The compiled stage computes what torch's does, takes no memory while it runs, says what it can't do."""

import resource
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from shard_worker.attention.reference import ReferenceAttention
from shard_worker.executor import LoadFailed
from shard_worker.kv_tensors import KvForm, allocate
from shard_worker.model.layers import Precision
from shard_worker.model.stage import NO_BYTES, Stage, StageMemory
from shard_worker.model.stage_weights import Activation, Linear, StageWeights
from shard_worker.model.torch_stage import TorchStage
from shard_worker.native import library
from shard_worker.native_stage import NativeStage, unsupported
from tests.shard_worker import random_stage
from tests.shard_worker.test_invariance import Tokens, ids, step_inputs

BLOCK, NUM_BLOCKS = 8, 300
pytestmark = pytest.mark.skipif(library.native() is None, reason="no compiler here")


@pytest.fixture(params=["best", "portable"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    compiled = library.native()
    assert compiled is not None
    assert not compiled.shoal_linear_use_isa(b"" if request.param == "best" else request.param.encode())
    yield request.param
    assert not compiled.shoal_linear_use_isa(None)


def native_stage(weights: StageWeights, **settings: object) -> NativeStage:
    compiled = library.native()
    assert compiled is not None
    return NativeStage(weights, compiled, **settings)  # type: ignore[arg-type]


def attached(stage: Stage, weights: StageWeights, form: KvForm, step_tokens: int = 256) -> Stage:
    kv = allocate(weights, len(weights.layers), NUM_BLOCKS, BLOCK, form)
    stage.attach(StageMemory(kv, BLOCK, step_tokens))
    return stage


def logits_of(stages: list[Stage]) -> torch.Tensor:
    """Of every token of two sequences, one of them in two chunks."""
    long, short = Tokens(ids(1, 150), list(range(40, 20, -1))), Tokens(ids(2, 9), [3, 9])
    found = []
    for rows in ([(long, 140), (short, 8)], [(short, 1), (long, 10)]):
        inputs, carried = step_inputs(rows), NO_BYTES
        for stage in stages:
            carried = stage.run(inputs, carried)
        found.append(stages[-1].logits(np.arange(len(inputs.token_ids))).clone())
        for sequence, count in rows:
            sequence.computed += count
    return torch.cat(found)


VARIANTS = {
    "every option": random_stage.model(),
    "plain": random_stage.model(plain=True),
    "gelu": replace(random_stage.model(), activation=Activation.GELU_TANH, attention_scale=0.2),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("ends", [(3,), (1, 3)])
def test_is_the_torch_stage(variant: str, ends: tuple[int, ...], isa: str) -> None:
    parts = random_stage.split(VARIANTS[variant], ends)
    exact = Precision(torch.float32, torch.float32)
    expected = logits_of(
        [attached(TorchStage(w, exact, ReferenceAttention()), w, KvForm(torch.float32)) for w in parts]
    )
    ours = logits_of([attached(s := native_stage(w, threads=2), w, s.kv_form) for w in parts])
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"dtype": "bfloat16"}, 0.03),
        ({"quantize": "int8"}, 0.03),
        ({"quantize": "int8", "int8_activations": True}, 0.04),
        ({"quantize": "int4"}, 0.25),
    ],
)
def test_fewer_bits_are_near(settings: dict[str, object], error: float, isa: str) -> None:
    weights = random_stage.model()
    exact = logits_of([attached(s := native_stage(weights), weights, s.kv_form)])
    rough = logits_of([attached(s := native_stage(weights, **settings), weights, s.kv_form)])
    assert 0 < float((rough - exact).norm() / exact.norm()) < error


def test_vector_functions_are_as_exact_as_they_say(isa: str) -> None:
    compiled = library.native()
    assert compiled is not None
    x = np.concatenate(
        [np.linspace(-100, 88, 400_000), np.linspace(-2, 2, 400_000), [0.0, -0.0, -np.inf, -1e-30]]
    ).astype(np.float32)
    x = x[: len(x) // 8 * 8 - 8]
    x = np.concatenate([x, np.array([0.0, -0.0, -np.inf, -88, -1e-30, 1e-30, 9, -9], np.float32)])
    exps, tanhs, silus, powers, rough = (np.empty_like(x) for _ in range(5))
    compiled.shoal_vector_functions(
        *map(library.address, (x,)), len(x), *map(library.address, (exps, tanhs, silus, powers, rough))
    )
    wide = x.astype(np.float64)
    big = wide > -87.33
    true = np.exp(wide[big])
    assert (np.abs(exps[big] - true) <= 2 * np.spacing(true.astype(np.float32))).all()
    assert (exps[~big] == 0).all() and (exps[x == 0] == 1).all()
    true = np.tanh(wide)
    assert (np.abs(tanhs - true) <= 4 * np.spacing(np.abs(true).astype(np.float32))).all()
    inside = np.isfinite(x) & big
    true = wide[inside] / (1 + np.exp(-wide[inside]))
    assert (np.abs(silus[inside] - true) <= 4 * np.spacing(np.abs(true).astype(np.float32)) + 1e-37).all()
    assert (np.abs(rough[inside] - true) <= 1e-4 * np.abs(true) + 1e-36).all()
    true = 2.0 ** wide[wide > -125]
    assert (np.abs(powers[wide > -125] - true) <= 1e-5 * true).all()
    assert (powers[x == 0] == 1).all() and (powers[x == -np.inf] == 0).all()


STEPS = {  # rows of (tokens before, tokens), and which of the step's tokens are wanted
    "a decode is not wanted": ([(5, 1), (0, 1), (9, 1)], [0, 2]),
    "chunks": ([(3, 8), (0, 20), (40, 1)], [7, 27, 28]),
    "in line": ([(3, 8), (0, 20)], [2, 3, 4, 7, 8, 9]),
    "nothing": ([(3, 8), (0, 20)], []),
    "nothing of many": ([(3, 150)], []),
    "few of many": ([(3, 70), (0, 90), (2, 1)], [0, 69, 70, 159, 160]),
    "many of many": ([(3, 80), (0, 90)], [*range(5, 80), *range(85, 170)]),
    "all": ([(3, 4), (0, 5)], list(range(9))),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", STEPS)
def test_rows_that_are_not_wanted_change_nothing(name: str, dtype: str, isa: str) -> None:
    """The same bits for those that are, and for all in the next step: keys and values are all there."""
    shapes, places = STEPS[name]
    wanted = np.array(places, np.int64)
    found = []
    for asked in (None, wanted):
        stage = native_stage(weights := random_stage.model(), dtype=dtype, threads=2)
        attached(stage, weights, stage.kv_form)
        rows = [(Tokens(ids(i, 170), list(range(25 * i, 25 * i + 25))), n) for i, (_, n) in enumerate(shapes)]
        for (row, _), (before, _) in zip(rows, shapes, strict=True):
            if before:
                stage.run(step_inputs([(row, before)]), NO_BYTES)
                row.computed = before
        stage.run(step_inputs(rows), NO_BYTES, asked)
        of_wanted = stage.logits(wanted).clone()
        for row, count in rows:
            row.computed += count
        following = step_inputs([(row, 1) for row, _ in rows])
        stage.run(following, NO_BYTES)
        found.append(torch.cat([of_wanted, stage.logits(np.arange(len(rows)))]))
    assert torch.equal(*(logits.view(torch.int32) for logits in found))


def test_logits_of_what_was_not_wanted_are_refused() -> None:
    stage = native_stage(weights := random_stage.model())
    attached(stage, weights, stage.kv_form)
    stage.run(step_inputs([(Tokens(ids(1), [1, 2]), 9)]), NO_BYTES, np.array([3, 8]))
    with pytest.raises(AssertionError, match="not wanted"):
        stage.logits(np.array([4]))


@pytest.mark.parametrize("places", [[9], [-1], [0] * 257], ids=["behind", "before", "too many"])
def test_logits_of_what_no_step_had_are_refused(places: list[int]) -> None:
    """Rows behind the step are not the step's, and there is room for as many as a step has at most."""
    stage = native_stage(weights := random_stage.model())
    attached(stage, weights, stage.kv_form, step_tokens=256)
    stage.run(step_inputs([(Tokens(ids(1), [1, 2]), 9)]), NO_BYTES)
    with pytest.raises(AssertionError, match="not wanted"):
        stage.logits(np.array(places))


def test_more_threads_than_rows() -> None:
    """Steps that are shared out by rows leave some threads none of them."""
    weights = random_stage.model(plain=True)
    found = []
    for threads in (1, 140):
        stage = native_stage(weights, threads=threads)
        attached(stage, weights, stage.kv_form)
        stage.run(step_inputs([(Tokens(ids(1, 130), list(range(20))), 130)]), NO_BYTES)
        found.append(stage.logits(np.arange(130)).clone())
    assert torch.equal(*(logits.view(torch.int32) for logits in found))


def test_steps_take_no_memory_after_the_first() -> None:
    """The biggest step first; then none of 200 leaves anything, in Python's heap or in the process."""
    weights = random_stage.model()
    stage = native_stage(weights, threads=2)
    attached(stage, weights, stage.kv_form)
    every = np.arange(200)
    sequences = [Tokens(ids(i, 200), list(range(25 * i, 25 * i + 25))) for i in range(8)]
    steps = [step_inputs([(sequences[0], 200)])]
    for length in range(1, 26):
        for sequence in sequences:
            sequence.computed = length
        steps.append(step_inputs([(sequence, 1) for sequence in sequences]))
        steps.append(step_inputs([(sequence, 7) for sequence in sequences]))

    def all_steps() -> None:
        for inputs in steps:
            stage.run(inputs, NO_BYTES)
            stage.logits(every[: len(inputs.context_lens)])

    stage.run(steps[0], NO_BYTES)
    stage.logits(every)
    all_steps()
    tracemalloc.start()
    try:
        all_steps()
        before, resident = tracemalloc.get_traced_memory()[0], peak_resident_kb()
        for _ in range(4):
            all_steps()
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 4 * len(steps) >= 200
    assert after - before < 2_000  # what the loop itself holds
    assert peak_resident_kb() - resident < 256


def peak_resident_kb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_time_is_told_by_what_it_went_to() -> None:
    weights = random_stage.model()
    stage = native_stage(weights)
    attached(stage, weights, stage.kv_form)
    assert not any(stage.times_ns().values())
    inputs = step_inputs([(Tokens(ids(1, 20), [1, 2, 3]), 20)])
    stage.run(inputs, NO_BYTES)
    stage.logits(np.arange(1))
    spent = stage.times_ns()
    assert tuple(spent) == library.PHASES
    assert all(spent[name] > 0 for name in ("edges", "norms", "attention", "products", "head"))


def test_what_it_cannot_run_is_said() -> None:
    weights = random_stage.model()
    assert unsupported(weights) is None
    assert unsupported(replace(weights, head_dim=12)) == "head_dim is 12, not a multiple of 8"
    short = replace(weights.layers[0].qkv.matrices[0], inputs=80)
    layer = replace(weights.layers[0], out=Linear((short,)))
    with pytest.raises(LoadFailed, match=r"96 x 80 in f32"):
        native_stage(replace(weights, layers=(layer,)))
    with pytest.raises(LoadFailed, match="999 threads"):
        native_stage(weights, threads=999)


def test_a_stage_that_goes_takes_its_memory_along() -> None:
    weights = random_stage.model()
    for _ in range(3):
        native_stage(weights)
    resident = peak_resident_kb()
    for _ in range(50):
        native_stage(weights)
    assert peak_resident_kb() - resident < 50 * 100  # a tenth of what they had
