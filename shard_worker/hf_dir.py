"""Reads Hugging Face directories: config.json, and safetensors files, single or in shards, memory-mapped.

Only tensors that are asked for are read. Nothing is ever unpickled.
"""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from shard_worker.executor import LoadFailed
from shard_worker.model.config import ModelConfig, config_from_hf

JSON_BYTES_MAX = 64 << 20
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


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
            self.config: ModelConfig = config_from_hf(self.raw_config)
        except LoadFailed as error:
            raise LoadFailed(f"{path}: {error}") from None
        self._file_of = self._find_tensors()

    @property
    def content_paths(self) -> tuple[Path, ...]:
        return (self.path / "config.json", *sorted(set(self._file_of.values())))

    def _find_tensors(self) -> dict[str, Path]:
        if (self.path / SINGLE).exists():
            return dict.fromkeys(self._names_in(self.path / SINGLE), self.path / SINGLE)
        index = read_json(self.path / INDEX).get("weight_map")
        if not isinstance(index, dict):
            raise LoadFailed(f"{self.path}: neither {SINGLE} nor {INDEX} with a weight_map")
        files: dict[str, Path] = {}
        for name, file in index.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise LoadFailed(f"{self.path / INDEX}: {file!r} is not the name of a file in this folder")
            files[name] = self.path / file
        for file in sorted(set(files.values())):
            present = set(self._names_in(file))
            missing = [n for n, f in files.items() if f == file and n not in present]
            if missing:
                raise LoadFailed(f"{file}: no tensor {missing[0]}, which {INDEX} promises")
        return files

    @staticmethod
    def _names_in(path: Path) -> list[str]:
        try:
            with safe_open(path, framework="pt") as file:
                return list(file.keys())
        except (OSError, SafetensorError) as error:
            raise LoadFailed(f"{path}: not a whole safetensors file: {error}") from None

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """In the file's own precision. Raises LoadFailed when it is missing or has another shape."""
        file = self._file_of.get(name)
        if file is None:
            raise LoadFailed(f"{self.path}: no tensor {name}")
        try:
            with safe_open(file, framework="pt") as opened:
                tensor: torch.Tensor = opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise LoadFailed(f"{file}: {name} can't be read: {error}") from None
        if tuple(tensor.shape) != shape:
            raise LoadFailed(
                f"{file}: {name} has shape {tuple(tensor.shape)}, the configuration says {shape}"
            )
        if tensor.dtype not in FLOATS:
            raise LoadFailed(f"{file}: {name} is stored as {tensor.dtype}, which can't be read")
        return tensor
