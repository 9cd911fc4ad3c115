"""Whatever is in a model's files: a stage loads, or says LoadFailed. No crash, no hang, no large memory."""

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from shard_worker.executor import LoadFailed, StageSpec
from shard_worker.torch_executor import EngineConfig, TorchExecutor
from shard_worker.weights import open_checkpoint
from tests.shard_worker import tiny_gguf, tiny_models

TAKEN_MAX = 32 << 20  # bytes, for files of 200 KB; hypothesis is in it too
WHOLE = StageSpec(0, 1, 0, 2, 4, 8, 16)
FUZZ = settings(
    deadline=None,
    derandomize=True,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny_models.make(path, hidden_size=32, head_dim=8, num_attention_heads=4, num_hidden_layers=2)
    return path


@pytest.fixture(scope="module")
def gguf(folder: Path) -> Path:
    model = tiny_models.make(folder, hidden_size=32, head_dim=8, num_attention_heads=4, num_hidden_layers=2)
    model_path = folder / "tiny.gguf"
    tiny_gguf.write(model, model_path, GGMLQuantizationType.F32, tokenizer=folder / "tokenizer.json")
    return model_path


def copied(folder: Path, to: Path) -> Path:
    to.mkdir(exist_ok=True)
    for file in folder.iterdir():
        if file.suffix in (".json", ".safetensors"):
            (to / file.name).write_bytes(file.read_bytes())
    return to


def load(path: Path, quantize: str = "none") -> None:
    """All that a worker does with the files before it serves."""
    config = EngineConfig(str(path), quantize=quantize, num_blocks=4, digest_cache_dir=str(path.parent / "d"))
    TorchExecutor(config).load(WHOLE)


def loads_or_says_so(path: Path, quantize: str = "none") -> None:
    tracemalloc.start()
    try:
        load(path, quantize)
    except LoadFailed as error:
        assert str(error)
    finally:
        taken = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert taken < TAKEN_MAX


damage = st.lists(st.tuples(st.floats(0, 1), st.integers(1, 255)), min_size=1, max_size=4)


def damaged(data: bytes, flips: list[tuple[float, int]], within: int, keep: float) -> bytes:
    """Some bytes of the first `within` changed, and all but a share of the file cut off."""
    out = bytearray(data)
    for place, change in flips:
        out[int(place * (min(within, len(out)) - 1))] ^= change
    return bytes(out[: int(len(out) * keep)])


@FUZZ
@given(damage, st.sampled_from([4_000, 40_000, 1 << 30]), st.sampled_from([1.0, 1.0, 0.97, 0.5]))
def test_gguf(gguf: Path, tmp_path: Path, flips: list[tuple[float, int]], within: int, keep: float) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged(gguf.read_bytes(), flips, within, keep))
    loads_or_says_so(path)


@FUZZ
@given(damage, st.sampled_from([100, 2_000, 1 << 30]), st.sampled_from([1.0, 1.0, 0.97, 0.5]))
def test_safetensors(
    folder: Path, tmp_path: Path, flips: list[tuple[float, int]], within: int, keep: float
) -> None:
    path = copied(folder, tmp_path / "model")
    data = (folder / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(damaged(data, flips, within, keep))
    loads_or_says_so(path, "int8")


@FUZZ
@given(
    st.sampled_from(["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]),
    damage,
    st.sampled_from([200, 1 << 30]),
    st.sampled_from([1.0, 1.0, 1.0, 0.9]),
)
def test_the_files_beside(
    folder: Path, tmp_path: Path, name: str, flips: list[tuple[float, int]], within: int, keep: float
) -> None:
    path = copied(folder, tmp_path / "model")
    (path / name).write_bytes(damaged((folder / name).read_bytes(), flips, within, keep))
    loads_or_says_so(path)


# ---- safetensors, by hand ---------------------------------------------------------------------------


def with_header(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("header", "data", "length", "message"),
    [
        (b"{}", b"", 1 << 60, "a header of 1152921504606846976 bytes in a file of 10"),
        (b"{}", b"", 3, "a header of 3 bytes in a file of 10"),
        (b"[1]", b"", None, "not a JSON object"),
        (b"[" * 100_000, b"", None, "can't be read"),
        (b'{"a": 1, "a": 2}', b"", None, "a name comes twice"),
        ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, b"\0" * 12, None, "b begins at byte"),
        ({"a": entry("F32", [2], 4, 12)}, b"\0" * 12, None, "a begins at byte"),
        ({"a": entry("F32", [2], 0, 8)}, b"\0" * 12, None, "its tensors end at byte"),
        ({"a": entry("F32", [2], 0, 8)}, b"\0" * 4, None, "its tensors end at byte"),
        ({"a": entry("F32", [3], 0, 8)}, b"\0" * 8, None, "a is 8 bytes, not what its shape"),
        ({"a": entry("F32", [-2], -8, 0)}, b"\0" * 8, None, "an impossible shape"),
        ({"a": entry("F32", [1 << 62, 1 << 62], 0, 8)}, b"\0" * 8, None, "an impossible shape"),
        ({"a": entry("F32", [1] * 99, 0, 4)}, b"\0" * 4, None, "an impossible shape"),
        ({"a": entry("F31", [2], 0, 8)}, b"\0" * 8, None, "stored as F31, which is not known"),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"\0" * 8, None, "not described by"),
        ({"a": entry("F32", [2], 0, 8) | {"data_offsets": ["0", 8]}}, b"\0" * 8, None, "not described by"),
        ({"a": None}, b"", None, "not described by"),
    ],
)
def test_a_header_that_lies(
    folder: Path, tmp_path: Path, header: object, data: bytes, length: int | None, message: str
) -> None:
    path = copied(folder, tmp_path / "model")
    with_header(path / "model.safetensors", header, data, length)
    with pytest.raises(LoadFailed, match=message):
        open_checkpoint(path)


def test_every_dtype_that_is_known_is_read_or_refused_by_name(folder: Path, tmp_path: Path) -> None:
    path = copied(folder, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    for dtype, known in [(torch.float16, True), (torch.bfloat16, True), (torch.float64, False)]:
        save_file({n: t.to(dtype) for n, t in tensors.items()}, path / "model.safetensors")
        if known:
            load(path)
        else:
            with pytest.raises(LoadFailed, match="stored as F64, which can't be read"):
                load(path)


# ---- shards -----------------------------------------------------------------------------------------


@pytest.fixture
def sharded(folder: Path, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """The model in two files, with its index as a value."""
    path = copied(folder, tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, half in halves.items():
        save_file({n: tensors[n] for n in half}, path / file)
    return path, {"weight_map": {n: file for file, half in halves.items() for n in half}}


def test_shards_load(sharded: tuple[Path, dict[str, Any]]) -> None:
    path, index = sharded
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    load(path)


@pytest.mark.parametrize(
    "name", ["../a.safetensors", "/etc/a.safetensors", "c/a.safetensors", "..", "a.bin", 7, None]
)
def test_an_index_leads_nowhere_else(sharded: tuple[Path, dict[str, Any]], name: object) -> None:
    path, index = sharded
    index["weight_map"]["model.norm.weight"] = name
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(LoadFailed, match="not a safetensors file in this folder"):
        load(path)


def test_an_index_that_lies(sharded: tuple[Path, dict[str, Any]]) -> None:
    path, index = sharded
    file = path / "model.safetensors.index.json"
    for text, message in [
        ("{}", "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        ("[]", "not a JSON"),
    ]:
        file.write_text(text)
        with pytest.raises(LoadFailed, match=message):
            load(path)
    file.write_text(json.dumps({"weight_map": index["weight_map"] | {"more.weight": "a.safetensors"}}))
    with pytest.raises(LoadFailed, match=r"no tensor more\.weight, which"):
        load(path)
    file.write_text(json.dumps({"weight_map": index["weight_map"] | {"more.weight": "c.safetensors"}}))
    with pytest.raises(LoadFailed, match=r"c\.safetensors: can't be read"):
        load(path)
    (path / "a.safetensors").write_bytes((path / "b.safetensors").read_bytes())
    file.write_text(json.dumps(index))
    with pytest.raises(LoadFailed, match=r"is in a\.safetensors too"):
        load(path)


def test_a_pickle_is_never_opened(folder: Path, tmp_path: Path) -> None:
    path = copied(folder, tmp_path / "model")
    (path / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "consolidated.00.pth", "model.pt"):
        (path / name).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
        with pytest.raises(LoadFailed, match=f"{name} is a pickle, which is never opened"):
            load(path)
        with pytest.raises(LoadFailed, match="is a pickle, which is never opened"):
            load(path / name)
        (path / name).unlink()


# ---- gguf, by hand ----------------------------------------------------------------------------------


def test_gguf_tensors_that_overlap_are_refused(gguf: Path, tmp_path: Path) -> None:
    data = gguf.read_bytes()
    name = b"blk.1.ffn_norm.weight"
    place = data.index(name) + len(name) + 4 + 8 + 4
    offset = struct.unpack_from("<Q", data, place)[0]
    path = tmp_path / "overlap.gguf"
    path.write_bytes(data[:place] + struct.pack("<Q", offset - 32) + data[place + 8 :])
    with pytest.raises(LoadFailed, match="overlaps"):
        load(path)


def test_a_gguf_key_that_comes_twice_is_refused(gguf: Path, tmp_path: Path) -> None:
    data = gguf.read_bytes()
    count = struct.unpack_from("<Q", data, 16)[0]
    key = b"general.architecture"
    twin = struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, 5) + b"llama"
    path = tmp_path / "twice.gguf"
    path.write_bytes(data[:16] + struct.pack("<Q", count + 1) + twin + data[24:])
    with pytest.raises(LoadFailed, match=r"general\.architecture comes twice"):
        load(path)


def test_a_norm_that_is_no_number_is_refused(gguf: Path, tmp_path: Path) -> None:
    """One flipped bit made a signalling NaN of a weight: numpy warned of it, and all answers were NaN."""
    data = gguf.read_bytes()
    path = tmp_path / "signals.gguf"
    path.write_bytes(data[:-4] + struct.pack("<I", 0x7F800040))
    with pytest.raises(LoadFailed, match=r"model\.norm\.weight holds what is no number"):
        load(path)


# ---- mismatched and pruned --------------------------------------------------------------------------


def with_config(folder: Path, to: Path, **changes: object) -> Path:
    path = copied(folder, to)
    raw = json.loads((folder / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(raw))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, "2 layers, the configuration says 3"),
        ({"num_hidden_layers": 1 << 23}, "2 layers, the configuration says 8388608"),
        ({"intermediate_size": 64}, r"shape \(80, 32\), the configuration says \(64, 32\)"),
        ({"intermediate_size": [80, 64]}, r"intermediate_size is \[80, 64\], not a whole number"),
        ({"num_attention_heads": [4, 2]}, r"num_attention_heads is \[4, 2\], not a whole number"),
        ({"vocab_size": 1 << 24}, "shape"),
        ({"num_key_value_heads": 1}, "shape"),
    ],
)
def test_a_configuration_that_does_not_fit(
    folder: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(LoadFailed, match=message):
        load(with_config(folder, tmp_path / "model", **changes))


@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
def test_pruned_weights_load(folder: Path, tmp_path: Path, quantize: str) -> None:
    """Nine of ten weights are zero, whole rows and whole matrices too."""
    path = copied(folder, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    for tensor in tensors.values():
        if tensor.ndim == 2:
            tensor[torch.from_numpy(np.random.default_rng(1).random(tensor.shape) < 0.9)] = 0
            tensor[::3] = 0
    tensors["model.layers.1.mlp.up_proj.weight"].zero_()
    save_file(tensors, path / "model.safetensors")
    load(path, quantize)


def test_fewer_heads_and_narrower_layers_load_when_all_are_alike(folder: Path, tmp_path: Path) -> None:
    """Structured pruning: heads gone, so that they don't fill the hidden size, and a narrower inner one."""
    path = with_config(
        folder, tmp_path / "model", num_attention_heads=2, num_key_value_heads=1, intermediate_size=56
    )
    tensors = load_file(folder / "model.safetensors")
    kept = {"q_proj": 16, "k_proj": 8, "v_proj": 8, "gate_proj": 56, "up_proj": 56}
    for name, tensor in tensors.items():
        part = name.split(".")[-2]
        if part in kept:
            tensors[name] = tensor[: kept[part]].clone()
        if part in ("o_proj", "down_proj"):
            tensors[name] = tensor[:, : 16 if part == "o_proj" else 56].clone()
    save_file(tensors, path / "model.safetensors")
    load(path)


def test_layers_of_different_widths_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    path = copied(folder, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    for name in ("gate_proj", "up_proj"):
        tensors[f"model.layers.1.mlp.{name}.weight"] = tensors[f"model.layers.1.mlp.{name}.weight"][
            :64
        ].clone()
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(LoadFailed, match=r"layers\.1\.mlp\.gate_proj\.weight has shape \(64, 32\)"):
        load(path)
