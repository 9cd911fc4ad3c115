"""Reads Hugging Face directories: config.json, and safetensors files, single or in shards, memory-mapped.

Only tensors that are asked for are read. Nothing is ever unpickled.
"""

import json
import re
from pathlib import Path

import numpy as np
import torch

from shard_worker.executor import LoadFailed
from shard_worker.model.config import ModelConfig
from shard_worker.model.hf_config import DEFAULTS, config_from_hf
from shard_worker.model.stage_weights import StoredMatrix, WeightFormat
from shard_worker.safetensors_file import SafetensorsFile
from shard_worker.transformers_config import config_from_transformers

JSON_BYTES_MAX = 64 << 20
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LAYER = re.compile(r"(?:language_model\.)?model\.(?:language_model\.)?layers\.(\d+)\.")
FILES_MAX = 1024
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
FORMATS = {format.name: format for format in (WeightFormat.F32, WeightFormat.F16, WeightFormat.BF16)}
FLOATS = {
    WeightFormat.F32: torch.float32,
    WeightFormat.F16: torch.float16,
    WeightFormat.BF16: torch.bfloat16,
}


def read_json(path: Path) -> dict[str, object]:
    """An object; empty where there is no such file. Raises LoadFailed."""
    if not path.exists():
        return {}
    try:
        if path.stat().st_size > JSON_BYTES_MAX:
            raise LoadFailed(f"{path}: larger than {JSON_BYTES_MAX} bytes")
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise LoadFailed(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(value, dict):
        raise LoadFailed(f"{path}: not a JSON object")
    return value


class HfCheckpoint:
    """A model in a Hugging Face directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.raw_config = read_json(path / "config.json")
        if not self.raw_config:
            raise LoadFailed(f"{path}: no config.json")
        try:
            self.config: ModelConfig = self._read_config()
        except LoadFailed as error:
            raise LoadFailed(f"{path}: {error}") from None
        self._file_of = self._find_tensors()
        self._check_vocabulary()

    def _read_config(self) -> ModelConfig:
        """Raises LoadFailed."""
        if self.raw_config.get("model_type") in DEFAULTS:
            return config_from_hf(self.raw_config)
        try:
            return config_from_transformers(self.path)
        except LoadFailed as error:
            try:
                return config_from_hf(self.raw_config)
            except LoadFailed as unknown:
                raise LoadFailed(f"{unknown}, and {error}") from None

    @property
    def content_paths(self) -> tuple[Path, ...]:
        return (self.path / "config.json", *sorted({file.path for file in self._file_of.values()}))

    def _check_vocabulary(self) -> None:
        """Before anything of that size is made. Raises LoadFailed."""
        for name, file in self._file_of.items():
            rows = file.tensors[name].shape[:1]
            if name.endswith("embed_tokens.weight") and rows != (self.config.vocab_size,):
                raise LoadFailed(
                    f"{file.path}: {name} has shape {file.tensors[name].shape},"
                    f" the configuration says {self.config.vocab_size} rows"
                )

    def _find_tensors(self) -> dict[str, SafetensorsFile]:
        """Where each tensor lies. Raises LoadFailed."""
        if (self.path / SINGLE).exists():
            return self._all_in([SINGLE])
        if not (self.path / INDEX).exists():
            raise LoadFailed(f"{self.path}: neither {SINGLE} nor {INDEX}{_only_pickles(self.path)}")
        index = read_json(self.path / INDEX).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise LoadFailed(f"{self.path / INDEX}: no weight_map")
        for file in index.values():
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                raise LoadFailed(f"{self.path / INDEX}: {file!r} is not a safetensors file in this folder")
        if len(names := sorted(set(index.values()))) > FILES_MAX:
            raise LoadFailed(f"{self.path / INDEX}: {len(names)} files are more than {FILES_MAX}")
        found = self._all_in(names)
        for name, file in index.items():
            if name not in found or found[name].path.name != file:
                raise LoadFailed(f"{self.path / file}: no tensor {name}, which {INDEX} promises")
        return found

    def _all_in(self, names: list[str]) -> dict[str, SafetensorsFile]:
        found: dict[str, SafetensorsFile] = {}
        for name in names:
            file = SafetensorsFile(self.path / name)
            if twice := found.keys() & file.tensors.keys():
                raise LoadFailed(f"{file.path}: {min(twice)} is in {found[min(twice)].path.name} too")
            found |= dict.fromkeys(file.tensors, file)
        return found

    def let_go(self) -> None:
        for file in dict.fromkeys(self._file_of.values()):
            file.let_go()

    def names_under(self, prefix: str) -> list[str]:
        """Of all tensors whose names begin so."""
        return [name for name in self._file_of if name.startswith(prefix)]

    @property
    def layers_found(self) -> int:
        return len({found[1] for name in self._file_of if (found := LAYER.match(name))})

    def matrix(self, name: str, shape: tuple[int, int]) -> StoredMatrix:
        """A view of the file. Raises LoadFailed when it is missing or has another shape."""
        file, format = self._described(name, shape)
        return StoredMatrix(format, file.bytes_of(name).reshape(shape[0], -1), shape[1])

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """In the file's own precision, copied. Raises LoadFailed when it is missing or has another shape."""
        file, format = self._described(name, shape)
        copied = torch.from_numpy(np.array(file.bytes_of(name)))
        return copied.view(FLOATS[format]).view(shape)

    def _described(self, name: str, shape: tuple[int, ...]) -> tuple[SafetensorsFile, WeightFormat]:
        file = self._file_of.get(name)
        if file is None:
            raise LoadFailed(f"{self.path}: no tensor {name}")
        info = file.tensors[name]
        if info.shape != shape:
            raise LoadFailed(f"{file.path}: {name} has shape {info.shape}, the configuration says {shape}")
        if info.dtype not in FORMATS:
            raise LoadFailed(f"{file.path}: {name} is stored as {info.dtype}, which can't be read")
        return file, FORMATS[info.dtype]


def _only_pickles(path: Path) -> str:
    """What to say of a folder whose weights are pickled: to read those means to run what they say."""
    pickles = sorted(f.name for ending in PICKLED for f in path.glob(f"*{ending}"))
    if not pickles:
        return ""
    return f"; {pickles[0]} is a pickle, which is never opened: convert it to safetensors"
