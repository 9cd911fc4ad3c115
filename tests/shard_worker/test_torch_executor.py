"""What a stage may count on: residence, sizes, buffers, refusals."""

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chassis.messages.card import parse_card
from shard_worker.executor import Executor, LoadFailed, StageSpec
from shard_worker.model.torch_stage import TorchStage
from shard_worker.native import library
from shard_worker.torch_executor import EngineConfig, TorchExecutor
from tests.shard_worker import tiny_models
from tests.shard_worker.driver import NOTHING, Driver, Row, Sequence, step_inputs

WHOLE = StageSpec(0, 1, 0, 6, 4, 8, 64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny_models.make(path)
    return path


def executor(folder: Path, **settings: object) -> TorchExecutor:
    settings = {"num_blocks": 40, "digest_cache_dir": str(folder / "digests")} | settings
    return TorchExecutor(EngineConfig(str(folder), **settings))  # type: ignore[arg-type]


def test_facts(folder: Path) -> None:
    made: Executor = executor(folder, model_name="mine")
    facts = made.facts
    assert (facts.name, facts.num_layers, facts.context_len_max) == ("mine", 6, 256)
    assert facts.activation_bytes == 48 * 4
    layer = 48 * (8 * (6 + 2 + 2) + 8 * 6 + 3 * 80)
    assert facts.head_cost_layers == pytest.approx(300 * 48 / layer)
    card = parse_card(facts.card)
    assert (card.name, card.model_digest, card.num_layers) == ("mine", facts.digest, 6)
    assert executor(folder, dtype="bfloat16").facts.activation_bytes == 48 * 2


def test_a_context_is_what_was_asked_for(folder: Path, tmp_path: Path) -> None:
    assert executor(folder, context_len=128).facts.context_len_max == 128
    with pytest.raises(LoadFailed, match="context_len 257: this model serves 2 to 256 tokens"):
        executor(folder, context_len=257)
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    longrope = {"rope_type": "longrope", "rope_theta": 1e4} | factors
    changes: dict[str, Any] = {"rope_parameters": longrope, "original_max_position_embeddings": 32}
    tiny_models.make_small(tmp_path, "phi3", **changes)
    tiny_models.save_tokenizer(tmp_path, tiny_models.SMALL_VOCAB)
    short, same, long = (executor(tmp_path, context_len=n).facts for n in (0, 16, 100))
    assert (short.context_len_max, long.context_len_max) == (32, 100)
    assert short.digest == same.digest != long.digest  # other numbers: of another model


@pytest.mark.parametrize(("engine", "key_positions"), [("torch", 4), ("native", 16)])
def test_kv_memory_decides_the_blocks(folder: Path, engine: str, key_positions: int) -> None:
    """Compiled code keeps keys in whole vectors of 8."""
    if engine == "native" and library.native() is None:
        pytest.skip("no compiler here")
    block_bytes = 6 * 2 * (4 + key_positions) * 8 * 4
    made = executor(folder, num_blocks=None, kv_memory_mb=1, engine=engine)
    assert made.load(WHOLE).num_blocks == (1 << 20) // block_bytes
    half = StageSpec(0, 2, 0, 3, 4, 8, 64)
    made = executor(folder, num_blocks=None, kv_memory_mb=1, engine=engine)
    assert made.load(half).num_blocks == (1 << 20) * 2 // block_bytes


def test_the_engine_is_chosen_by_what_can_be_had(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "native", lambda: None)
    outputs = [
        Driver([executor(folder, engine=engine)], (6,)).run([Sequence([1, 2, 3], 4)])
        for engine in ("auto", "torch")
    ]
    assert outputs[0] == outputs[1]
    with pytest.raises(LoadFailed, match="engine native: there is no compiled code"):
        executor(folder, engine="native").load(WHOLE)
    with pytest.raises(LoadFailed, match="engine 'fastest' is not one of auto, native"):
        executor(folder, engine="fastest")


def test_memory_stays_while_the_range_does(folder: Path) -> None:
    made = executor(folder)
    assert made.load(WHOLE).kv_allocated
    assert not made.load(WHOLE).kv_allocated
    more = StageSpec(0, 1, 0, 6, 4, 8, 128)
    assert not made.load(more).kv_allocated
    sequence = Sequence(list(range(100)), 1, table=list(range(25)))
    assert len(made.run(step_inputs([Row(sequence, 100)], 4), NOTHING).token_ids) == 1
    assert made.load(StageSpec(0, 1, 0, 6, 8, 8, 128)).kv_allocated
    assert made.load(StageSpec(0, 2, 0, 3, 8, 8, 128)).kv_allocated


@pytest.mark.parametrize("engine", ["auto", "torch", "device"])
def test_old_pages_go_before_new_ones_are_taken(
    folder: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = executor(folder, engine=engine)
    made.load(WHOLE)
    assert made._resident is not None
    old = [weakref.ref(kv.keys) for kv in made._resident.kv]
    stage, num_blocks = made.stage, made._num_blocks

    def counted(*given: Any) -> int:
        assert not any(pages() is not None for pages in old)
        return num_blocks(*given)

    monkeypatch.setattr(made, "_num_blocks", counted)
    assert made.load(StageSpec(0, 1, 0, 6, 8, 8, 64)).kv_allocated
    assert made.stage is stage


def test_a_load_that_cannot_attach_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next one found pages that nobody was told of, and a stage that cannot run."""
    made, other = executor(folder, engine="torch"), StageSpec(0, 1, 0, 6, 8, 8, 64)
    made.load(WHOLE)

    def full(*_: object) -> None:
        raise MemoryError("full")

    with monkeypatch.context() as broken:
        broken.setattr(TorchStage, "attach", full)
        with pytest.raises(LoadFailed, match="steps of 64 tokens: full"):
            made.load(other)
    assert made.load(other).kv_allocated


@pytest.mark.parametrize(
    "spec",
    [
        StageSpec(0, 1, 0, 7, 4, 8, 64),
        StageSpec(0, 1, 3, 3, 4, 8, 64),
        StageSpec(0, 2, 0, 6, 4, 8, 64),
        StageSpec(1, 2, 0, 6, 4, 8, 64),
        StageSpec(0, 2, 1, 6, 4, 8, 64),
        StageSpec(0, 1, 0, 6, 0, 8, 64),
    ],
)
def test_an_impossible_range_is_refused(folder: Path, spec: StageSpec) -> None:
    with pytest.raises(LoadFailed):
        executor(folder).load(spec)


def test_impossible_settings_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match="dtype 'float8'"):
        executor(folder, dtype="float8")
    with pytest.raises(LoadFailed, match="kv_memory_mb = 0: 0 blocks"):
        executor(folder, num_blocks=None, kv_memory_mb=0).load(WHOLE)
    with pytest.raises(LoadFailed, match="nowhere"):
        TorchExecutor(EngineConfig(str(tmp_path / "nowhere")))


def test_only_rows_that_sample_come_back(folder: Path) -> None:
    made = executor(folder)
    made.load(WHOLE)
    whole = Sequence([5, 6, 7], 1, table=[3])
    part = Sequence([1, 2, 3, 4, 5, 6, 7, 8], 1, table=[9, 2])
    assert made.run(step_inputs([Row(part, 4)], 4), NOTHING).token_ids.tolist() == []
    result = made.run(step_inputs([Row(part, 4), Row(whole, 3)], 4), NOTHING)
    assert result.token_ids.dtype == np.uint32 and len(result.token_ids) == 1
    assert result.activations.nbytes == 0


def test_an_empty_step_passes(folder: Path) -> None:
    made = executor(folder)
    made.load(StageSpec(0, 2, 0, 3, 4, 8, 64))
    empty = step_inputs([Row(Sequence([1], 1, table=[0]), 0)], 4)
    result = made.run(empty, NOTHING)
    assert result.activations.nbytes == 0 and len(result.token_ids) == 0


def test_activations_are_bytes_of_the_dtype(folder: Path) -> None:
    inputs = step_inputs([Row(Sequence([1, 2, 3], 1, table=[0]), 3)], 4)
    wide, narrow = executor(folder), executor(folder, dtype="bfloat16")
    for made in (wide, narrow):
        made.load(StageSpec(0, 2, 0, 3, 4, 8, 64))
    exact = torch.frombuffer(bytearray(wide.run(inputs, NOTHING).activations), dtype=torch.float32)
    rough = torch.frombuffer(bytearray(narrow.run(inputs, NOTHING).activations), dtype=torch.bfloat16)
    assert exact.shape == rough.shape == (3 * 48,)
    assert float((exact - rough.float()).norm() / exact.norm()) < 0.1


def test_bfloat16_serves_from_end_to_end(folder: Path) -> None:
    prompts = [[1, 2, 3], list(range(30)), [9]]
    stages = [executor(folder, dtype="bfloat16") for _ in range(2)]
    outputs = Driver(stages, (2, 6)).run([Sequence(p, 6) for p in prompts], chunk=8)
    assert all(len(o) == 6 and max(o) < tiny_models.VOCAB for o in outputs)
    alone = [Driver([executor(folder, dtype="bfloat16")], (6,)).run([Sequence(p, 1)]) for p in prompts]
    assert len(alone) == 3


def test_a_device_that_is_not_there_is_told_at_once(folder: Path) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(LoadFailed, match="^device cuda: torch"):
            executor(folder, device="cuda")
    with pytest.raises(LoadFailed, match="device 'tpu'"):
        executor(folder, device="tpu")
    with pytest.raises(LoadFailed, match="dtype 'float16'"):
        executor(folder, dtype="float16")


def test_the_device_stage_answers_as_torch_does(folder: Path) -> None:
    """Greedy and drawn, in chunks and decodes together, over one stage and two."""
    answers = []
    for engine, ends in (("torch", [6]), ("device", [6]), ("device", [2, 6])):
        stages = [executor(folder, engine=engine) for _ in ends]
        driver = Driver(stages, ends)
        prompts = [Sequence([5, 6, 7], 6), Sequence(list(range(30, 50)), 6, 0.9, 12, 0.8, seed=3)]
        prompts.append(Sequence([9], 6, 1.1, seed=4))
        answers.append(driver.run(prompts, chunk=8))
    assert answers[0] == answers[1] == answers[2]


def test_blocks_of_the_device_stage_are_counted_without_scrap(folder: Path) -> None:
    made = executor(folder, engine="device", num_blocks=None, kv_memory_mb=1)
    block_bytes = 2 * 6 * 2 * 4 * 8 * 4
    assert made.load(WHOLE).num_blocks == (1 << 20) // block_bytes
    assert made.load(StageSpec(0, 1, 0, 6, 8, 8, 128)).kv_allocated
