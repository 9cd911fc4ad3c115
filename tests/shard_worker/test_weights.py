"""A stage reads its own tensors and no others; a file that is not what it says is refused by name."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize
from gguf.quants import quantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from shard_worker.executor import LoadFailed
from shard_worker.formats import dequantize
from shard_worker.gguf_file import GgufCheckpoint, GgufFile
from shard_worker.hf_dir import HfCheckpoint
from shard_worker.model.config import ModelConfig
from shard_worker.model.families import stage_weights
from shard_worker.model.stage_weights import StoredMatrix
from shard_worker.weights import digest_of, find_model, model_name, open_checkpoint
from tests.shard_worker import tiny_gguf, tiny_models


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return tiny_models.make(
        folder, tie_word_embeddings=False, hidden_size=96, head_dim=16, intermediate_size=96
    )


@pytest.fixture(scope="module")
def gguf(model: Any, folder: Path) -> Path:
    path = folder / "tiny.gguf"
    tiny_gguf.write(model, path, tokenizer=folder / "tokenizer.json")
    return path


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: t for name, t in model.state_dict().items() if "rotary" not in name}


def test_both_formats_give_the_models_tensors(model: Any, folder: Path, gguf: Path) -> None:
    for checkpoint in (open_checkpoint(folder), open_checkpoint(gguf)):
        for name, tensor in tensors_of(model).items():
            shape = tuple(tensor.shape)
            assert torch.equal(checkpoint.tensor(name, shape), tensor), name
            if len(shape) == 2:
                numbers = dequantize(checkpoint.matrix(name, (shape[0], shape[1])))
                assert np.array_equal(numbers, tensor.numpy()), name
        assert not checkpoint.config.tied_head


def test_both_formats_give_one_configuration(folder: Path, gguf: Path) -> None:
    ours, theirs = open_checkpoint(folder).config, open_checkpoint(gguf).config
    assert theirs.rms_eps == pytest.approx(ours.rms_eps)
    names = [n for n in ModelConfig.__dataclass_fields__ if n != "rms_eps"]
    assert [getattr(ours, n) for n in names] == [getattr(theirs, n) for n in names]


@pytest.mark.parametrize(
    "kind", [GGMLQuantizationType[k] for k in ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0")]
)
def test_quantised_tensors_are_expanded_before_q_and_k_are_put_in_order(
    model: Any, tmp_path: Path, kind: GGMLQuantizationType
) -> None:
    path = tmp_path / "tiny.gguf"
    tiny_gguf.write(model, path, kind)
    checkpoint = open_checkpoint(path)
    for name, tensor in tensors_of(model).items():
        # Quantisation works along rows, so putting rows in another order changes no number.
        plain = tensor.numpy()
        stored = GGMLQuantizationType.F32 if plain.ndim == 1 else kind
        expected = gguf_dequantize(quantize(plain, stored), stored)
        assert np.array_equal(checkpoint.tensor(name, plain.shape).numpy(), expected), name
        if plain.ndim == 2:
            matrix = checkpoint.matrix(name, (plain.shape[0], plain.shape[1]))
            assert matrix.format.name == kind.name
            assert np.array_equal(dequantize(matrix), expected), name


class Spy:
    def __init__(self, inner: HfCheckpoint | GgufCheckpoint) -> None:
        self.inner, self.asked = inner, set[str]()
        self.config, self.path, self.content_paths = inner.config, inner.path, inner.content_paths

    def names_under(self, prefix: str) -> list[str]:
        return self.inner.names_under(prefix)

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        self.asked.add(name)
        return self.inner.tensor(name, shape)

    def matrix(self, name: str, shape: tuple[int, int]) -> StoredMatrix:
        self.asked.add(name)
        return self.inner.matrix(name, shape)


def test_a_stage_reads_its_own_layers_only(model: Any, gguf: Path) -> None:
    seen: list[set[str]] = []
    for first, end in [(0, 2), (2, 5), (5, 6)]:
        spy = Spy(open_checkpoint(gguf))
        stage_weights(spy, first, end)
        seen.append(spy.asked)
        layers = {int(n.split(".")[2]) for n in spy.asked if ".layers." in n}
        assert layers == set(range(first, end))
    assert set.union(*seen) == set(tensors_of(model))
    assert sum(map(len, seen)) == len(tensors_of(model))
    outside = [{n for n in names if ".layers." not in n} for names in seen]
    assert outside == [{"model.embed_tokens.weight"}, set(), {"model.norm.weight", "lm_head.weight"}]


def test_tied_head_reads_the_embedding_on_both_ends(tmp_path: Path) -> None:
    tiny_models.make(tmp_path, tie_word_embeddings=True)
    for first, end, reads in [(0, 2, True), (2, 4, False), (4, 6, True)]:
        spy = Spy(open_checkpoint(tmp_path))
        stage_weights(spy, first, end)
        assert ("model.embed_tokens.weight" in spy.asked) == reads
        assert "lm_head.weight" not in spy.asked


def test_shards(model: Any, tmp_path: Path) -> None:
    tiny_models.make(
        tmp_path,
        tie_word_embeddings=False,
        hidden_size=96,
        head_dim=16,
        intermediate_size=96,
        max_shard_size="200KB",
    )
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    checkpoint = open_checkpoint(tmp_path)
    for name, tensor in tensors_of(model).items():
        assert torch.equal(checkpoint.tensor(name, tuple(tensor.shape)), tensor), name
    assert len(checkpoint.content_paths) > 3
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(LoadFailed, match="not a safetensors file in this folder"):
        open_checkpoint(tmp_path)


def test_a_wrong_missing_or_odd_tensor_is_named(folder: Path, gguf: Path, tmp_path: Path) -> None:
    for checkpoint in (open_checkpoint(folder), open_checkpoint(gguf)):
        with pytest.raises(LoadFailed, match=r"shape \(96,\), the configuration says \(97,\)"):
            checkpoint.tensor("model.norm.weight", (97,))
        with pytest.raises(LoadFailed, match="no tensor"):
            checkpoint.tensor("model.layers.6.mlp.up_proj.weight", (96, 96))
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(LoadFailed, match="stored as I32"):
        open_checkpoint(tmp_path).tensor("model.norm.weight", (96,))


# ---- damage -----------------------------------------------------------------------------------------


def test_a_gguf_file_cut_off_anywhere_is_refused(gguf: Path, tmp_path: Path) -> None:
    whole = gguf.read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [0, 3, 4, 8, 20, 24, 25, 100, 1000, 5000, 20000, len(whole) // 2, len(whole) - 100]:
        cut.write_bytes(whole[:size])
        with pytest.raises(LoadFailed, match=r"cut\.gguf"):
            open_checkpoint(cut)


@settings(
    deadline=None,
    derandomize=True,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(at=st.integers(0, 12000), value=st.integers(0, 255))
def test_a_damaged_header_never_does_more_than_fail(gguf: Path, tmp_path: Path, at: int, value: int) -> None:
    data = bytearray(gguf.read_bytes())
    data[at] = value
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(data)
    try:
        checkpoint = open_checkpoint(damaged)
        stage_weights(checkpoint, 5, 6)
    except LoadFailed as error:
        assert "damaged.gguf" in str(error)


def test_other_gguf_files_are_refused(tmp_path: Path, gguf: Path) -> None:
    path = tmp_path / "other.gguf"
    data = gguf.read_bytes()
    path.write_bytes(b"GGML" + data[4:])
    with pytest.raises(LoadFailed, match="not a GGUF file"):
        open_checkpoint(path)
    path.write_bytes(data[:4] + struct.pack("<I", 9) + data[8:])
    with pytest.raises(LoadFailed, match="version 9"):
        open_checkpoint(path)
    path.write_bytes(data.replace(b"llama", b"mamba"))
    with pytest.raises(LoadFailed, match="architecture 'mamba' is not one of llama"):
        open_checkpoint(path)


def test_a_damaged_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match=r"no config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(LoadFailed, match="not readable as JSON"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(LoadFailed, match=r"neither model\.safetensors nor"):
        open_checkpoint(tmp_path)
    weights = (folder / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(LoadFailed, match="not a whole safetensors file"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.bin").write_bytes(b"a pickle is never opened")
    with pytest.raises(LoadFailed, match=r"model\.bin is a pickle, which is never opened"):
        open_checkpoint(tmp_path)


# ---- names and digests ------------------------------------------------------------------------------


def test_the_packaged_model_is_found() -> None:
    path = find_model("smollm2")
    assert path.suffix == ".gguf" and model_name("smollm2", path) == "smollm2"
    file = GgufFile(path)
    assert len(file.tensors) == 272 and file.metadata["llama.block_count"] == 30


def test_names_and_paths(folder: Path, gguf: Path) -> None:
    assert find_model(str(folder)) == folder
    assert model_name(str(folder), folder) == folder.name
    assert model_name(str(gguf), gguf) == "tiny"
    with pytest.raises(LoadFailed, match="no such file or folder"):
        find_model("nonsense")


def test_digest_is_of_the_content_and_kept(folder: Path, gguf: Path, tmp_path: Path) -> None:
    copy, cache = tmp_path / "copy.gguf", tmp_path / "cache"
    copy.write_bytes(gguf.read_bytes())
    digest = digest_of(open_checkpoint(copy), cache)
    assert digest == digest_of(open_checkpoint(gguf), cache) != digest_of(open_checkpoint(folder), cache)
    notes = list(cache.iterdir())
    assert len(notes) == 3
    for note in notes:
        note.write_text("f" * 64)
    assert digest_of(open_checkpoint(copy), cache) == "f" * 64  # not read again
    for note in notes:
        note.write_text("rubbish")
    assert digest_of(open_checkpoint(copy), cache) == digest
    data = bytearray(copy.read_bytes())
    data[-1] ^= 1
    copy.write_bytes(data)
    assert digest_of(open_checkpoint(copy), cache) != digest


def test_a_cache_that_cannot_be_written_is_none(gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert len(digest_of(open_checkpoint(gguf), tmp_path / "file" / "cache")) == 64
