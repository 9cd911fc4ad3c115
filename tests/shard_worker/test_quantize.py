"""Quantised stages: both engines compute with the numbers that the rows mean, however the model is cut."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from shard_worker.executor import LoadFailed, StageSpec
from shard_worker.formats import dequantize, kept_bytes, prepared_stage
from shard_worker.model.families import stage_weights
from shard_worker.model.stage_weights import StageWeights, WeightFormat
from shard_worker.native import library
from shard_worker.probe import ProbeRow, probe_inputs
from shard_worker.torch_executor import EngineConfig, TorchExecutor
from shard_worker.weights import open_checkpoint
from tests.shard_worker import tiny_gguf, tiny_models
from tests.shard_worker.driver import NOTHING, Driver, Sequence

IDS = [7, 99, 3, 250, 41, 12, 12, 8, 160, 77]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    model = tiny_models.make(path, hidden_size=64, head_dim=16, num_attention_heads=4, intermediate_size=96)
    for kind in ("Q8_0", "Q4_0", "Q4_1", "Q5_0"):
        tiny_gguf.write(model, path / f"{kind}.gguf", GGMLQuantizationType[kind], path / "tokenizer.json")
    return path


@cache
def engines() -> tuple[str, ...]:
    return ("torch", "native") if library.native() is not None else ("torch",)


def executor(
    path: Path,
    quantize: str,
    engine: str = "torch",
    dtype: str = "float32",
    int8_activations: bool | None = False,
) -> TorchExecutor:
    cache_dir = str((path if path.is_dir() else path.parent) / "digests")
    return TorchExecutor(
        EngineConfig(
            str(path),
            quantize=quantize,
            engine=engine,
            dtype=dtype,
            int8_activations=int8_activations,
            num_blocks=40,
            digest_cache_dir=cache_dir,
        )
    )


def logits(
    path: Path,
    quantize: str,
    engine: str = "torch",
    dtype: str = "float32",
    int8_activations: bool | None = False,
) -> np.ndarray:
    """[tokens, vocabulary] of a prompt."""
    made = executor(path, quantize, engine, dtype, int8_activations)
    made.load(StageSpec(0, 1, 0, made.facts.num_layers, 4, 8, 64))
    assert made.stage is not None
    made.stage.run(probe_inputs([ProbeRow(IDS, 0, range(5))], 4), NOTHING)
    found: np.ndarray = made.logits(np.arange(len(IDS), dtype=np.int64)).float().numpy().copy()
    return found


def off(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_engines_agree_on_what_is_quantised_at_load(folder: Path, quantize: str) -> None:
    reference = logits(folder, quantize, "torch", "float32")
    for engine in engines():
        assert off(logits(folder, quantize, engine), reference) < 1e-4


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_what_is_quantised_at_load_loses_no_more_in_bfloat16_than_what_is_not(
    folder: Path, quantize: str
) -> None:
    """How much that is depends on the processor: torch multiplies in bfloat16 where it has such products."""

    def lost(engine: str, quantize: str) -> float:
        exact = logits(folder, quantize, "torch", "float32")
        return off(logits(folder, quantize, engine, "bfloat16"), exact)

    for engine in engines():
        assert lost(engine, quantize) < 2 * lost(engine, "none") < 0.1


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_what_stays_packed_means_what_it_means_expanded(folder: Path, kind: str) -> None:
    path = folder / f"{kind}.gguf"
    expanded = logits(path, "none")
    for engine in engines():
        assert off(logits(path, "keep", engine), expanded) < 1e-4


def test_more_bits_are_nearer(folder: Path) -> None:
    exact = logits(folder, "none")
    eight, four = off(logits(folder, "int8"), exact), off(logits(folder, "int4"), exact)
    assert 0 < eight < 0.1 and eight * 4 < four < 1.0


def test_a_quantised_model_may_be_cut_anywhere(folder: Path) -> None:
    prompts = [IDS, IDS[3:], [9]]

    def outputs(ends: tuple[int, ...]) -> list[list[int]]:
        stages = [executor(folder, "int4", engines()[-1]) for _ in ends]
        return Driver(stages, ends).run([Sequence(prompt, 6) for prompt in prompts], chunk=4)

    assert outputs((6,)) == outputs((2, 6)) == outputs((1, 3, 6))


def test_stages_that_keep_weights_differently_are_of_different_models(folder: Path) -> None:
    digests = {executor(folder, quantize).facts.digest for quantize in ("none", "keep", "int8", "int4")}
    assert len(digests) == 4
    with pytest.raises(LoadFailed, match="quantize 'int3' is not one of none, int8, int4, keep"):
        executor(folder, "int3")


@pytest.mark.skipif("native" not in engines(), reason="no compiler here")
@pytest.mark.parametrize("quantize", ["int8", "int4", "keep"])
def test_activations_in_8_bits_lose_as_much_as_weights_in_8_bits(folder: Path, quantize: str) -> None:
    weights_lose = off(logits(folder, "int8"), logits(folder, "none"))
    path = folder / "Q5_0.gguf" if quantize == "keep" else folder
    exact = logits(path, quantize, "native")
    rounded = logits(path, quantize, "native", int8_activations=True)
    assert weights_lose / 4 < off(rounded, exact) < weights_lose * 4


@pytest.mark.skipif("native" not in engines(), reason="no compiler here")
def test_activations_are_rounded_unasked_where_weights_are_quantised_here(folder: Path) -> None:
    """In compiled code alone; and who rounds them is of another model."""
    for quantize, rounds in (("none", False), ("keep", False), ("int8", True), ("int4", True)):
        assert executor(folder, quantize, "native", int8_activations=None).int8_activations is rounds
        assert not executor(folder, quantize, "torch", int8_activations=None).int8_activations
    packed = folder / "Q8_0.gguf"
    exact, rounded = (executor(packed, "keep", "auto", int8_activations=i) for i in (None, True))
    assert rounded.int8_activations and exact.facts.digest != rounded.facts.digest


def test_activations_that_nothing_would_round_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(quantize: str, engine: str) -> str:
        with pytest.raises(LoadFailed) as refused:
            made = executor(folder, quantize, engine, int8_activations=True)
            made.load(StageSpec(0, 1, 0, made.facts.num_layers, 4, 8, 64))
        return str(refused.value)

    assert "quantize none packs no weights; say keep, int8 or int4" in refusal("none", "auto")
    for engine in ("torch", "device", "transformers"):
        assert f"only compiled code rounds them, and engine {engine} computes" in refusal("int8", engine)
    if "native" in engines():
        assert "quantize keep packs no weights here" in refusal("keep", "auto")
    monkeypatch.setattr(library, "native", lambda: None)
    assert "only compiled code rounds them, and there is none" in refusal("int8", "auto")
    assert not executor(folder, "int8", "auto", int8_activations=None).int8_activations


def formats_of(weights: StageWeights) -> tuple[set[str], set[str]]:
    """Inside the layers, and outside."""
    inside = {
        matrix.format.value
        for layer in weights.layers
        for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)
        for matrix in linear.matrices
    }
    assert weights.embedding is not None and weights.head is not None
    return inside, {m.format.value for m in (weights.embedding, *weights.head.linear.matrices)}


def test_embedding_and_head_keep_eight_bits(folder: Path) -> None:
    whole = stage_weights(open_checkpoint(folder), 0, 6)
    four = prepared_stage(whole, "float32", "int4")
    assert formats_of(four) == ({"q4_1"}, {"q8_0"})
    assert four.head is not None and four.head.linear.matrices[0] is four.embedding  # tied, and once
    assert formats_of(prepared_stage(whole, "bfloat16", "none")) == ({"bf16"}, {"bf16"})
    layer = 64 * (16 * (4 + 2 + 2) + 16 * 4 + 3 * 96)
    assert kept_bytes(whole, "float32", "int4") == 6 * layer * 5 // 8 + 300 * 64 * 34 // 32
    assert kept_bytes(whole, "float32", "none") == (6 * layer + 300 * 64) * 4
    packed = stage_weights(open_checkpoint(folder / "Q5_0.gguf"), 0, 6)
    assert formats_of(prepared_stage(packed, "float32", "int8")) == ({"q5_0"}, {"q5_0"})
    assert formats_of(prepared_stage(packed, "float32", "int4")) == ({"q4_1"}, {"q5_0"})


def test_packed_rows_are_views_of_the_file(folder: Path) -> None:
    """But for Q and K, whose rows lie in another order."""
    layer = stage_weights(open_checkpoint(folder / "Q4_1.gguf"), 0, 6).layers[2]
    assert not layer.down.matrices[0].rows.flags.owndata and not layer.down.matrices[0].rows.flags.writeable
    wanted = stage_weights(open_checkpoint(folder), 0, 6).layers[2]
    for packed, plain in zip(layer.qkv.matrices, wanted.qkv.matrices, strict=True):
        assert packed.format is WeightFormat.Q4_1
        assert off(dequantize(packed), dequantize(plain)) < 0.15
