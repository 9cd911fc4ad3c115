"""What a check says of a model is so, and a model whose numbers are none does not pass."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from chassis.model_repository import Manifest, ModelRepository, StoredFile, build_manifest
from shard_worker import __main__ as worker
from shard_worker import check
from shard_worker.config import Config
from shard_worker.costs import Costs, known_or_measured, least_s, measure, split_by_time
from shard_worker.executor import LoadFailed
from shard_worker.native import build, library
from shard_worker.probe import ProbeRow, probe_inputs
from shard_worker.torch_executor import EngineConfig, TorchExecutor
from shard_worker.weights import find_model, model_name
from tests.shard_worker import tiny_models


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny_models.make(path)
    return path


def executor(path: Path) -> TorchExecutor:
    return TorchExecutor(
        EngineConfig(str(path), num_blocks=check.NUM_BLOCKS, digest_cache_dir=str(path / "digests"))
    )


def told(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> dict[str, Any]:
    assert check.main(words) == code
    lines = capsys.readouterr().out.splitlines()
    return dict(json.loads(lines[-1]))


def test_a_good_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, 0, "--model", str(folder), "--stages", "2", "--quantize", "keep")
    assert (found["family"], found["num_layers"], found["formats"]) == ("llama", 6, {"f32": 42})
    assert len(found["ids"]) == check.OUTPUT_LEN and len(found["layer_us"]) == 6
    first, second = found["stages"]
    assert first["first_layer"] == 0 and first["end_layer"] == second["first_layer"]
    layer = 48 * (8 * (6 + 2 + 2) + 8 * 6 + 3 * 80) * 4
    assert first["weight_bytes"] == first["end_layer"] * layer + 300 * 48 * 4
    assert first["kv_bytes_per_token"] == 2 * first["end_layer"] * 2 * 8 * 4
    files = told(capsys, 0, "--model", str(folder), "--only", "files")
    assert "stages" not in files and files["digest"] == found["digest"]


def test_a_file_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert "cut off" in told(capsys, 1, "--model", str(tmp_path / "x.gguf"))["error"]
    assert "no such file" in told(capsys, 1, "--model", "nowhere", "--repository", str(tmp_path))["error"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_a_device_that_is_not_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, 1, "--model", str(folder), "--device", "cuda")
    assert found["error"].startswith("device cuda: torch ")


def test_a_model_whose_numbers_are_none(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in folder.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.3.mlp.down_proj.weight"][5, 7] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    error = told(capsys, 1, "--model", str(tmp_path))["error"]
    assert "model.layers.3.mlp.down_proj.weight holds what is no number" in error


def test_two_runs_that_differ(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([[1, 2], [1, 3]])
    monkeypatch.setattr(check, "_greedy", lambda *_: next(answers))
    with pytest.raises(LoadFailed, match="two greedy runs differ"):
        check.try_out(executor(folder), EngineConfig(str(folder)), 2)


# ---- costs ------------------------------------------------------------------------------------------


def test_what_is_measured_grows_with_the_work(folder: Path) -> None:
    ticks = iter(range(10_000))
    made = executor(folder)
    costs = measure(made, made.checkpoint, lambda: next(ticks) * 1e-3)
    assert costs.layer_us == (1000.0,) * 6  # one tick a run
    assert 0 < costs.head_us <= made.facts.head_cost_layers * 1000.0 / 3 + 1  # no more than a layer: noise


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_the_smallest_models_are_measured(tmp_path: Path, num_layers: int) -> None:
    tiny_models.make(tmp_path, num_hidden_layers=num_layers)
    made = executor(tmp_path)
    costs = measure(made, made.checkpoint, iter(np.arange(0.0, 1e4, 0.01)).__next__)
    assert len(costs.layer_us) == num_layers and min(*costs.layer_us, costs.head_us) > 0


@pytest.mark.parametrize("tick_s", [1e-7, 4e-3, 1.5e-2])
def test_a_clock_of_coarse_ticks_that_goes_back_at_times_says_what_a_run_takes(tick_s: float) -> None:
    now, calls = 0.0, 0

    def run() -> None:
        nonlocal now
        now += 30e-6

    def clock() -> float:
        nonlocal calls
        calls += 1
        return now // tick_s * tick_s - (1e-4 if calls % 7 == 0 else 0.0)

    assert 0.5 * 30e-6 < least_s(run, clock) < 2 * 30e-6


def test_a_machines_workers_agree(folder: Path, tmp_path: Path) -> None:
    made = executor(folder)
    ticks = iter(np.arange(0.0, 1e4, 0.01))

    def known(*conditions: object) -> Costs:
        return known_or_measured(made, made.checkpoint, conditions, tmp_path, ticks.__next__)

    first = known("float32", 1)
    (note,) = tmp_path.iterdir()
    note.write_text(json.dumps([[5.0] * 6, 7.0]))
    assert known("float32", 1) == Costs((5.0,) * 6, 7.0)
    assert known("float32", 2) == first
    for rubbish in ("", "{}", "[[1.0], 1.0]", "[[0, 0, 0, 0, 0, 0], 1]", '[["a"], 1]', "[" * 10):
        note.write_text(rubbish)
        assert known("float32", 1) == first
    (tmp_path / "file").write_text("")
    assert known_or_measured(made, made.checkpoint, (), tmp_path / "file" / "x", ticks.__next__) == first
    made.take_costs(first.head_cost_layers, first.layer_us[0])
    assert made.facts.head_cost_layers == first.head_cost_layers


def test_other_kernels_are_measured_anew(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(model=str(folder), num_blocks=check.NUM_BLOCKS, digest_cache_dir=str(tmp_path))

    def notes(kernels: str) -> set[Path]:
        monkeypatch.setattr(worker, "digest", lambda: kernels)
        worker.build_executor(config)
        return set(tmp_path.glob("*.costs"))

    first = notes("one")
    assert len(first) == 1 and notes("one") == first
    assert len(notes("other")) == 2


def test_a_library_is_named_by_its_digest() -> None:
    if (path := build.library_path()) is None:
        assert library.digest() == ""
    else:
        assert library.digest() == path.stem


@settings(deadline=None, derandomize=True, max_examples=80)
@given(st.lists(st.floats(1, 100), min_size=1, max_size=9), st.floats(0, 300), st.integers(1, 4))
def test_no_split_is_quicker(layer_us: list[float], head_us: float, num_stages: int) -> None:
    num_stages = min(num_stages, len(layer_us))
    costs = Costs(tuple(layer_us), head_us)

    def slowest(ends: tuple[int, ...]) -> float:
        firsts = (0, *ends[:-1])
        stages = [sum(layer_us[a:b]) for a, b in zip(firsts, ends, strict=True)]
        return max(*stages[:-1], stages[-1] + head_us) if len(stages) > 1 else stages[0] + head_us

    def cuts(first: int, left: int) -> list[tuple[int, ...]]:
        if left == 1:
            return [(len(layer_us),)]
        ends = range(first + 1, len(layer_us) - left + 2)
        return [(end, *rest) for end in ends for rest in cuts(end, left - 1)]

    ranges = split_by_time(costs, num_stages)
    assert [a for a, _ in ranges] == [0, *(b for _, b in ranges[:-1])] and ranges[-1][1] == len(layer_us)
    best = min(map(slowest, cuts(0, num_stages)))
    assert slowest(tuple(b for _, b in ranges)) == pytest.approx(best)


def test_a_probe_is_a_step() -> None:
    inputs = probe_inputs([ProbeRow([7], 4, [3, 1]), ProbeRow([5, 6, 8], 0, [2])], 4)
    assert inputs.token_ids.tolist() == [7, 5, 6, 8] and inputs.positions.tolist() == [4, 0, 1, 2]
    assert inputs.row_offsets.tolist() == [0, 1, 4] and inputs.context_lens.tolist() == [5, 3]
    assert inputs.kv_slots.tolist() == [4, 8, 9, 10] and inputs.block_tables.tolist() == [[3, 1], [2, 0]]


# ---- the repository ---------------------------------------------------------------------------------


def test_a_worker_finds_what_was_added(folder: Path, tmp_path: Path) -> None:
    repository = ModelRepository(tmp_path)
    manifest = Manifest(
        "tiny", "2", "llama", "d", ".", False, "2026-01-01T00:00:00Z", (StoredFile("config.json", 1, ""),)
    )
    place = repository.place("tiny", "2")
    place.mkdir(parents=True)
    (place / "manifest.json").write_text(build_manifest(manifest))
    assert find_model("tiny", tmp_path) == find_model("tiny:2", tmp_path) == place
    assert model_name("tiny:2", place) == "tiny:2"
    with pytest.raises(LoadFailed, match="and not in"):
        find_model("tiny:3", tmp_path)
