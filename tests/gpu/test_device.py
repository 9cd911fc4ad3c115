"""What needs a CUDA device: kernels, recordings, streams and memory; `make test-gpu` runs it.

Without a device every test fails with what is missing. `SHOAL_TEST_DEVICE=cpu` runs what of it has a meaning
there, which tests the tests.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from chassis.transport.nixl_agent import Lanes, NixlAgent, rdma_devices
from chassis.transport.registered import MemoryRange
from shard_worker.attention.cuda import FlashInferAttention, best, lacks
from shard_worker.attention.device import AttentionShape, DeviceColumns, allocate
from shard_worker.attention.gathered import GatheredAttention
from shard_worker.attention.interface import LayerKv
from shard_worker.attention.pages import decode_order
from shard_worker.attention.reference import ReferenceAttention
from shard_worker.device.choice import chosen
from shard_worker.device.direct import DevicePool, flush_for, tensor_of
from shard_worker.device.executor import DeviceExecutor
from shard_worker.device.sampling import sample
from shard_worker.device.stage import DeviceStage, MakeAttention
from shard_worker.device.staging import TURNS
from shard_worker.executor import StageSpec
from shard_worker.model.stage import NO_BYTES, StageMemory
from shard_worker.model.stage_weights import StageWeights
from shard_worker.sampler import columns_of
from shard_worker.sampler import sample as sample_on_host
from shard_worker.torch_executor import EngineConfig
from shard_worker.uniforms import uniforms
from tests.shard_worker import random_stage, tiny_models
from tests.shard_worker.driver import Driver
from tests.shard_worker.driver import Sequence as Prompt
from tests.shard_worker.ranks_rig import Ranks
from tests.shard_worker.smollm2_answers import ANSWERS
from tests.shard_worker.test_device_sampling import inputs_of
from tests.shard_worker.test_device_stage import BLOCK, NUM_BLOCKS, STEP_TOKENS, logits_of, torch_stage
from tests.shard_worker.test_invariance import Tokens, ids, step_inputs
from tests.shard_worker.test_smollm2 import prompts, tokenizer_of

pytestmark = [
    pytest.mark.gpu,
    # libraries for devices warn of much that is none of ours
    pytest.mark.filterwarnings("default"),
]
NAME = os.environ.get("SHOAL_TEST_DEVICE", "cuda")
on_cuda = pytest.mark.skipif(NAME == "cpu", reason="has no meaning on the processor")


@pytest.fixture(scope="module")
def device() -> torch.device:
    return chosen(NAME)


@pytest.fixture
def wide_heads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Heads as FlashInfer's kernels have them."""
    monkeypatch.setattr(random_stage, "HEAD_DIM", 64)
    yield


def gathered(shape: AttentionShape, device: torch.device) -> tuple[GatheredAttention, str | None]:
    return GatheredAttention(device), None


def stage_on(
    device: torch.device,
    weights: StageWeights,
    dtype: torch.dtype = torch.float32,
    recorded: bool = True,
    make_attention: MakeAttention = best,
) -> DeviceStage:
    stage = DeviceStage(weights, dtype, device, recorded=recorded, make_attention=make_attention)
    stage.attach(StageMemory(stage.allocate(NUM_BLOCKS, BLOCK), BLOCK, STEP_TOKENS))
    return stage


def error_of(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    ours, theirs = torch.cat([f.float().cpu() for f in found]), torch.cat([e.float() for e in expected])
    assert bool(ours.isfinite().all())
    return float((ours - theirs).norm() / theirs.norm())


def test_a_device_is_there(device: torch.device) -> None:
    assert device.type == NAME.partition(":")[0]


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("ends", [(3,), (1, 3)])
@pytest.mark.parametrize("recorded", [True, False])
def test_float32_is_the_torch_stage(
    device: torch.device, plain: bool, ends: tuple[int, ...], recorded: bool
) -> None:
    parts = random_stage.split(random_stage.model(plain=plain), ends)
    expected = logits_of([torch_stage(w) for w in parts])
    ours = logits_of([stage_on(device, w, recorded=recorded) for w in parts])
    assert error_of(ours, expected) < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("make_attention", [best, gathered])
@pytest.mark.parametrize("recorded", [True, False])
def test_narrow_types_are_near(
    wide_heads: None,
    device: torch.device,
    dtype: torch.dtype,
    plain: bool,
    make_attention: MakeAttention,
    recorded: bool,
) -> None:
    parts = random_stage.split(random_stage.model(plain=plain), (1, 3))
    expected = logits_of([torch_stage(w) for w in parts])
    ours = logits_of([stage_on(device, w, dtype, recorded, make_attention) for w in parts])
    assert 0 < error_of(ours, expected) < (0.03 if dtype == torch.bfloat16 else 0.006)


@on_cuda
def test_a_replayed_step_is_the_step(wide_heads: None, device: torch.device) -> None:
    """Many decodes of a growing batch, each replayed, against the same that run as they come."""
    weights = random_stage.model()
    recorded, plain = (stage_on(device, weights, torch.bfloat16, r) for r in (True, False))
    sequences = [Tokens(ids(i, 40), [5 * i + j for j in range(5)]) for i in range(20)]
    first = step_inputs([(sequence, 2 + i % 5) for i, sequence in enumerate(sequences)])
    for stage in (recorded, plain):
        stage.run(first, NO_BYTES)
    for i, sequence in enumerate(sequences):
        sequence.computed = 2 + i % 5
    for count in (1, 2, 3, 8, 13, 20, 20, 5, 1):
        inputs = step_inputs([(sequence, 1) for sequence in sequences[:count]])
        for stage in (recorded, plain):
            stage.run(inputs, NO_BYTES)
        at = np.arange(count)
        assert error_of([recorded.logits(at)], [plain.logits(at)]) < 0.02
        for sequence in sequences[:count]:
            sequence.computed += 1


def test_steps_begun_ahead_are_the_steps(device: torch.device) -> None:
    """Through two stages, `TURNS` steps under way in each, against one at a time."""
    parts = random_stage.split(random_stage.model(), (1, 3))
    sequences = [Tokens(ids(i, 30), [4 * i + j for j in range(4)]) for i in range(6)]
    steps = [step_inputs([(sequence, 20)]) for sequence in sequences]
    for sequence in sequences:
        sequence.computed = 20
    steps += [step_inputs([(sequence, 1)]) for sequence in sequences] * 3
    first = stage_on(device, parts[0])
    alone = [bytes(first.run(inputs, NO_BYTES)) for inputs in steps]
    again = stage_on(device, parts[0])
    under_way, results = [], []
    for inputs in steps:
        under_way.append(again.begin(inputs, NO_BYTES))
        if len(under_way) == TURNS:
            results.append(bytes(under_way.pop(0).result().activations))
    results += [bytes(step.result().activations) for step in under_way]
    assert results == alone


def test_activations_that_stay_on_the_device_are_the_same(device: torch.device) -> None:
    """As a link by GPUDirect carries them, whose writes can be waited for."""
    flush_for(device)()
    parts = random_stage.split(random_stage.model(), (1, 3))
    slot = DevicePool(1 << 20, device)
    assert slot.device == (None if device.type == "cpu" else device.index or 0)
    by_host, direct = ([stage_on(device, part) for part in parts] for _ in range(2))
    for inputs in [step_inputs([(Tokens(ids(i, 30), [4 * i + j for j in range(4)]), 20)]) for i in range(6)]:
        carried = by_host[0].run(inputs, NO_BYTES)
        by_host[1].run(inputs, carried)
        left = direct[0].begin(inputs, NO_BYTES, stays=True).result().direct
        assert left is not None and left.memory is direct[0].sends_from and left.nbytes == carried.nbytes
        there = MemoryRange(slot, 512, left.nbytes)
        tensor_of(there).copy_(tensor_of(left))
        direct[1].begin(inputs, there).result()
        at = np.arange(len(inputs.token_ids))
        assert torch.equal(by_host[1].logits(at), direct[1].logits(at))


def test_ranks_answer_as_one(device: torch.device, tmp_path: Path) -> None:
    """Over NCCL, a GPU each."""
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    model = tiny_models.make_small(tmp_path, "llama", num_hidden_layers=4)
    tiny_models.save_tokenizer(tmp_path, tiny_models.SMALL_VOCAB)
    names = [NAME, NAME] if device.type == "cpu" else ["cuda:0", "cuda:1"]
    leader, follower = (
        EngineConfig(
            str(tmp_path), engine="device", device=name, num_blocks=64, digest_cache_dir=str(tmp_path / "d")
        )
        for name in names
    )
    asked = [[5, 9, 2, 30, 71, 12, 8], [3], list(range(40, 70))]
    wanted = [tiny_models.greedy(model, prompt, 12) for prompt in asked]
    assert min(margin for _, margin in wanted) > tiny_models.MARGIN_MIN
    with Ranks(leader, 2, {1: follower}) as ranks:
        made = Driver([ranks.leader], (4,)).run([Prompt(prompt, 12) for prompt in asked])
    assert made == [ids for ids, _ in wanted]


@on_cuda
@pytest.mark.skipif(not rdma_devices(), reason="no RDMA device")
def test_a_card_takes_the_devices_memory(device: torch.device) -> None:
    agent = NixlAgent("shoal-gpu-test", Lanes.RDMA)
    agent.register([DevicePool(1 << 20, device)])
    assert agent.metadata()
    agent.close()


@on_cuda
@pytest.mark.parametrize(("window", "softcap"), [(None, 0.0), (5, 0.0), (None, 20.0), (40, 10.0)], ids=str)
@pytest.mark.parametrize("group", [1, 3, 4, 7])
def test_flashinfer_is_the_reference(
    device: torch.device, window: int | None, softcap: float, group: int
) -> None:
    shape = AttentionShape(2 * group, 2, 64, torch.bfloat16, BLOCK, 0.125, softcap, (window,))
    reason = lacks(shape, device)
    if reason is not None:
        pytest.skip(reason)
    attention = FlashInferAttention(shape, device)
    rows = [(Tokens(ids(i, 70), [9 * i + j for j in range(9)]), n) for i, n in enumerate((30, 1, 1, 12, 1))]
    for (sequence, _), start in zip(rows, (0, 64, 3, 17, 40), strict=True):
        sequence.computed = start
    for chosen_rows in (rows, [row for row in rows if row[1] == 1]):
        inputs = step_inputs(chosen_rows)
        kv = allocate(shape, 1, NUM_BLOCKS, device)[0]
        draw = torch.Generator(device).manual_seed(3)
        for cache in (kv.keys, kv.values):
            cache.copy_(torch.randn(cache.shape, generator=draw, device=device))
        q, k, v = (
            torch.randn((len(inputs.token_ids), heads, 64), generator=draw, device=device).bfloat16()
            for heads in (2 * group, 2, 2)
        )
        none = torch.empty(0, dtype=torch.int32, device=device)
        slots = torch.from_numpy(inputs.kv_slots).to(device)
        columns = DeviceColumns(slots, none, none, none, none, none)
        exact = LayerKv(kv.keys.float().contiguous(), kv.values.float().contiguous())
        options = {"scale": 0.125, "softcap": softcap, "window": window}
        expected = (
            ReferenceAttention().step(inputs, BLOCK).attend(q.float(), k.float(), v.float(), exact, **options)  # type: ignore[arg-type]
        )
        step = attention.plan(inputs, decode_order(inputs), BLOCK).over(columns)
        found = step.attend(q, k, v, kv, **options)  # type: ignore[arg-type]
        torch.testing.assert_close(found.float(), expected, atol=0.03, rtol=0.03)


def test_the_device_draws_what_the_processor_draws(device: torch.device) -> None:
    rows = [(0.0, 0, 1.0, 1), (1.0, 0, 1.0, 2), (0.7, 20, 0.9, 3), (1.5, 0, 0.5, 4), (1.0, 1, 1.0, 5)] * 8
    inputs = inputs_of([(t, k, p, s + 10 * i) for i, (t, k, p, s) in enumerate(rows)])
    logits = torch.randn(len(rows), 3000, generator=torch.Generator().manual_seed(1)) * 4
    expected = sample_on_host(logits.clone(), columns_of(inputs)).tolist()
    u = uniforms(inputs.seeds, inputs.output_index)
    columns = [torch.from_numpy(c) for c in (inputs.temperature, inputs.top_k, inputs.top_p, u)]
    found = sample(logits.to(device), inputs, *(c.to(device) for c in columns)).tolist()
    # sums are added in another order: a draw that falls on the edge between two tokens may fall beside it
    assert sum(a != b for a, b in zip(found, expected, strict=True)) <= 1


def executors(count: int, **settings: object) -> list[DeviceExecutor]:
    config = EngineConfig("smollm2", engine="device" if NAME == "cpu" else "auto", device=NAME)
    return [DeviceExecutor(replace(config, **settings)) for _ in range(count)]  # type: ignore[arg-type]


@pytest.mark.parametrize("ends", [(30,), (18, 30)])
def test_the_packaged_model_gives_its_answers(device: torch.device, ends: tuple[int, ...]) -> None:
    stages = executors(len(ends), num_blocks=64)
    sequences = [Prompt(prompt, 12) for prompt in prompts(tokenizer_of(stages[0]))]
    outputs = Driver(stages, ends, block_size=16).run(sequences, chunk=40)
    assert outputs == [answer[:12] for answer in ANSWERS.values()]


def test_the_packaged_model_answers_in_bfloat16(device: torch.device) -> None:
    stages = executors(1, num_blocks=64, dtype="bfloat16")
    sky = prompts(tokenizer_of(stages[0]))[2]
    output = Driver(stages, (30,), block_size=16).run([Prompt(sky, 8)], chunk=13)[0]
    assert output == list(ANSWERS.values())[2][:8]


@on_cuda
def test_memory_is_shared_out_and_given_back(device: torch.device) -> None:
    """Formed anew with other blocks, a worker takes no more than at first."""
    (made,) = executors(1, dtype="bfloat16", device_memory=0.5)
    total = torch.cuda.mem_get_info(device)[1]
    first = made.load(StageSpec(0, 1, 0, 30, 16, 64, 512)).num_blocks
    assert 16 * first * 2 * 30 * 3 * 64 * 2 < 0.5 * total
    second = made.load(StageSpec(0, 1, 0, 30, 32, 64, 512)).num_blocks
    assert abs(2 * second - first) < 0.05 * first
    assert not made.load(StageSpec(0, 1, 0, 30, 32, 64, 256)).kv_allocated
