"""What the table of formats rests on: the measure, the model off the grid, that only the table changes."""

from pathlib import Path

import numpy as np
import pytest

from bench import off_grid, quality
from shard_worker.executor import StageSpec
from shard_worker.probe import ProbeRow, probe_inputs
from shard_worker.torch_executor import EngineConfig, TorchExecutor
from tests.shard_worker import tiny_models


def test_surprise_is_the_negative_logarithm_of_what_came() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]], np.float32)) + np.float32(7)
    assert quality._surprise(logits, [1, 2]) == pytest.approx(-np.log(0.25) - np.log(0.8), rel=1e-5)


def test_agreement_counts_places() -> None:
    one, other = (quality.Found(1.0, choices, 0.0, 0.0, 0.0, {}) for choices in ([1, 2, 3, 4], [1, 2, 9, 4]))
    assert quality.agreement(one, other) == 0.75 and quality.agreement(one, one) == 1.0


def test_a_row_is_held_against_float32_of_its_own_model() -> None:
    found = {
        row: quality.Found(1.0, [i], 0.0, 0.0, 0.0, {"1": [1.0], "16": [1.0]})
        for i, row in enumerate(quality.ROWS)
    }
    for row in quality.ROWS:
        (choice,) = quality.reference_of(row, found).choices
        reference = quality.ROWS[choice]
        assert (reference.dtype, reference.quantize) == ("float32", "none")
        assert reference.model == ("gemma" if row.model == "gemma" else "file")
    keys = [row.key for row in quality.ROWS]
    assert len(set(keys)) == len(keys) and len(quality._table(found)) == 1 + len(keys)


def test_only_what_is_between_the_marks_is_written(tmp_path: Path) -> None:
    document = tmp_path / "document.md"
    document.write_text(f"before\n{quality.BEGIN}\nold\n{quality.END}\nafter\n")
    for _ in range(2):
        quality.update(document, "| new |")
        assert document.read_text() == f"before\n{quality.BEGIN}\n| new |\n{quality.END}\nafter\n"
    assert quality.BEGIN in quality.DOCUMENT.read_text() and quality.END in quality.DOCUMENT.read_text()


def logits(path: Path) -> np.ndarray:
    made = TorchExecutor(
        EngineConfig(str(path), engine="torch", num_blocks=8, digest_cache_dir=str(path / "d"))
    )
    made.load(StageSpec(0, 1, 0, made.facts.num_layers, 16, 8, 64))
    made.run(probe_inputs([ProbeRow(list(range(40, 70)), 0, [0, 1])], 16), memoryview(b""))
    found: np.ndarray = made.logits(np.arange(30, dtype=np.int64)).numpy().copy()
    return found


def test_the_model_off_the_grid_says_the_same(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    target.mkdir()
    tiny_models.make(source)
    off_grid.write(str(source), target)
    wanted, found = logits(source), logits(target)
    assert np.linalg.norm(found - wanted) < 1e-4 * np.linalg.norm(wanted)
    first, second = ((p / "model.safetensors").read_bytes() for p in (source, target))
    assert first != second
