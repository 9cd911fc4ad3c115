"""What `shoal model` does: fills, lists, checks and empties a folder of models with versions.

Whether a model is one, a worker's own loader says: `python -m shard_worker.check`. Files are copied aside,
hashed, and appear under their name whole or not at all. Only what a manifest names is ever removed.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chassis.model_repository import (
    MANIFEST,
    Manifest,
    ModelRepository,
    StoredFile,
    build_manifest,
    is_word,
)

CHECK_TIMEOUT_S = 1800.0
READ_BYTES = 8 << 20
BESIDE = (".json", ".jinja", ".txt", ".model")  # what a Hugging Face folder needs beside its weights
_ROOT = Path(__file__).resolve().parent.parent


class ModelError(Exception):
    """What was asked cannot be done; the message says why."""


@dataclass(frozen=True, slots=True)
class Asked:
    """How `check` shall run the model."""

    stages: int = 2
    dtype: str = "float32"
    quantize: str = "none"
    int8_activations: bool | None = None  # None: as a worker has it
    device: str = "cpu"
    threads: int = 1

    @property
    def flags(self) -> tuple[str, ...]:
        asked = {None: (), True: ("--int8-activations",), False: ("--no-int8-activations",)}
        return (
            "--stages", str(self.stages), "--dtype", self.dtype, "--quantize", self.quantize,
            *asked[self.int8_activations], "--device", self.device, "--threads", str(self.threads),
        )  # fmt: skip


def add(
    repository: ModelRepository, source: str, name: str = "", version: str = "", link: bool = False
) -> Manifest:
    """Copies or links a model of which the loader thinks well. Raises ModelError."""
    seen = worker_check(source, repository, ("--only", "files"))
    path = Path(str(seen["path"]))
    name = name or (source if is_word(source) else path.name if path.is_dir() else path.stem)
    version = version or _next_version(repository, name)
    for what, word in (("name", name), ("version", version)):
        if not is_word(word):
            raise ModelError(f"{what} {word!r}: letters, digits, dots, dashes and plus signs, at most 100")
    place = repository.place(name, version)
    if place.exists():
        raise ModelError(f"{name}:{version} is there already")
    weights = [Path(file) for file in seen["weights"]]
    files = sorted({*weights, *_beside(path)}) if path.is_dir() else weights
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".adding-", dir=place.parent))
        try:
            stored = tuple(_take(file, aside / file.name, link) for file in files)
            manifest = Manifest(
                name=name,
                version=version,
                family=str(seen["family"]),
                digest=str(seen["digest"]),
                weights="." if path.is_dir() else path.name,
                linked=link,
                added_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                files=stored,
            )
            again = worker_check(str(aside / manifest.weights), repository, ("--only", "files"))
            if again["digest"] != manifest.digest:
                raise ModelError(f"{source} changed while it was copied")
            (aside / MANIFEST).write_text(build_manifest(manifest), "utf-8")
            aside.chmod(0o755)
            aside.rename(place)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
    except OSError as error:
        raise ModelError(f"{name}:{version}: {error}") from None
    return manifest


def check(repository: ModelRepository, model: str, asked: Asked) -> tuple[Manifest | None, dict[str, Any]]:
    """Of one in the repository, every digest first; then the worker's own test. Raises ModelError."""
    manifest = repository.find(model)
    source = model
    if manifest is not None:
        verify(repository, manifest)
        source = str(repository.weights_of(manifest))
    told = worker_check(source, repository, asked.flags)
    if manifest is not None and told["digest"] != manifest.digest:
        raise ModelError(f"{model}: the weights' digest is {told['digest']}, not {manifest.digest}")
    return manifest, told


def verify(repository: ModelRepository, manifest: Manifest) -> None:
    """Every file is there with the content it was added with. Raises ModelError."""
    place = repository.place(manifest.name, manifest.version)
    for file in manifest.files:
        try:
            found = _described(place / file.name)
        except OSError as error:
            raise ModelError(f"{manifest.name}:{manifest.version}: {error}") from None
        if found != file:
            raise ModelError(
                f"{place / file.name} is not what was added: {found.num_bytes} bytes with SHA-256"
                f" {found.sha256}, not {file.num_bytes} with {file.sha256}"
            )


def remove(repository: ModelRepository, model: str) -> Manifest:
    """Of the files only those that its manifest names; links go, not what they lead to. Raises ModelError."""
    name, _, version = model.partition(":")
    found = repository.versions(name)
    if not version and len(found) > 1:
        raise ModelError(f"{name} has versions {', '.join(m.version for m in found)}: say {name}:VERSION")
    manifest = repository.find(model)
    if manifest is None:
        raise ModelError(f"{model} is not in {repository.folder}")
    place = repository.place(manifest.name, manifest.version)
    strangers = sorted(
        {entry.name for entry in place.iterdir()} - {f.name for f in manifest.files} - {MANIFEST}
    )
    if strangers:
        raise ModelError(f"{place} holds {strangers[0]}, which nobody added: take it away first")
    try:
        (place / MANIFEST).unlink()  # first: from here on there is no such model
        for file in manifest.files:
            (place / file.name).unlink(missing_ok=True)
        place.rmdir()
        if not any(place.parent.iterdir()):
            place.parent.rmdir()
    except OSError as error:
        raise ModelError(f"{model}: {error}") from None
    return manifest


def worker_check(model: str, repository: ModelRepository, flags: Sequence[str]) -> dict[str, Any]:
    """What `python -m shard_worker.check` says of a model. Raises ModelError."""
    argv = [sys.executable, "-m", "shard_worker.check", "--model", model, *flags]
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        done = subprocess.run(
            [*argv, "--repository", str(repository.folder)],
            capture_output=True,
            text=True,
            timeout=CHECK_TIMEOUT_S,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            check=False,
        )
        told = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        raise ModelError(f"{model}: no answer within {CHECK_TIMEOUT_S:g} s") from None
    except (IndexError, ValueError):
        lines = done.stderr.strip().splitlines()
        why = lines[-1] if lines else "without a word"
        raise ModelError(f"{model}: the check ended with code {done.returncode}: {why}") from None
    if "error" in told:
        raise ModelError(str(told["error"]))
    return dict(told)


def _next_version(repository: ModelRepository, name: str) -> str:
    taken = [int(m.version) for m in repository.versions(name) if m.version.isdecimal()]
    return str(max(taken, default=0) + 1)


def _beside(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.suffix in BESIDE and path.is_file()]


def _take(source: Path, target: Path, link: bool) -> StoredFile:
    if link:
        target.symlink_to(source.resolve())
        return _described(target)
    with source.open("rb") as file, target.open("xb") as copy:
        return StoredFile(target.name, *_hashed(file, copy))


def _described(path: Path) -> StoredFile:
    with path.open("rb") as file:
        return StoredFile(path.name, *_hashed(file, None))


def _hashed(file: Any, copy: Any) -> tuple[int, str]:
    """Length and SHA-256 of what is left of a file, which is also written to `copy`."""
    total, num_bytes = hashlib.sha256(), 0
    while data := file.read(READ_BYTES):
        total.update(data)
        num_bytes += len(data)
        if copy is not None:
            copy.write(data)
    return num_bytes, total.hexdigest()
