"""The folder of models with versions, `<name>/<version>/` with a model's files and a manifest: where a worker
finds what `shoal model add` put there.

A version without a manifest that fits its place is none. Nothing outside the folder is named or touched.
"""

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from chassis.user_folders import data_folder

MANIFEST = "manifest.json"
MANIFEST_BYTES_MAX = 1 << 20
MODELS_MAX = 10_000
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")


class BadManifest(Exception):
    """The manifest of a version does not say what it must; the message says why."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    name: str  # in the version's folder
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    name: str
    version: str
    family: str
    digest: str  # of the weights, as workers tell it
    weights: str  # the file to load, or "." for the folder
    linked: bool  # files lie elsewhere
    added_at: str  # UTC, as YYYY-MM-DDTHH:MM:SSZ
    files: tuple[StoredFile, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


def is_word(text: str) -> bool:
    """Whether it can name a model or a version: letters, digits and, but first, `.`, `-`, `+`, `_`."""
    return _WORD.fullmatch(text) is not None


def default_folder() -> Path:
    """In the user's data folder."""
    return data_folder() / "models"


def build_manifest(manifest: Manifest) -> str:
    return json.dumps(asdict(manifest), indent=2) + "\n"


def parse_manifest(text: str) -> Manifest:
    """Raises BadManifest."""
    try:
        raw = json.loads(text)
        files = tuple(StoredFile(str(f["name"]), int(f["num_bytes"]), str(f["sha256"])) for f in raw["files"])
        words = {key: str(raw[key]) for key in ("name", "version", "family", "digest", "weights", "added_at")}
        manifest = Manifest(**words, linked=raw["linked"] is True, files=files)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadManifest(f"not a manifest: {error!r}") from None
    names = {file.name for file in files}
    inside = [name for name in (*names, manifest.weights) if Path(name).name != name and name != "."]
    if inside or not names or "." in names or MANIFEST in names or manifest.weights not in {".", *names}:
        raise BadManifest("its files are not names in its folder")
    return manifest


class ModelRepository:
    """What lies in `folder`, which needn't exist. Reads anew at every call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def place(self, name: str, version: str) -> Path:
        assert is_word(name) and is_word(version)
        return self.folder / name / version

    def manifest(self, name: str, version: str) -> Manifest:
        """Raises BadManifest: also when there is no such version."""
        path = self.place(name, version) / MANIFEST
        try:
            if path.stat().st_size > MANIFEST_BYTES_MAX:
                raise BadManifest(f"{path}: larger than {MANIFEST_BYTES_MAX} bytes")
            manifest = parse_manifest(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise BadManifest(f"{path}: {error}") from None
        except BadManifest as error:
            raise BadManifest(f"{path}: {error}") from None
        if (manifest.name, manifest.version) != (name, version):
            raise BadManifest(f"{path}: is of {manifest.name}:{manifest.version}")
        return manifest

    def versions(self, name: str) -> list[Manifest]:
        """The one added last comes last. What has no good manifest is left out."""
        found = []
        for entry in _folders(self.folder / name) if is_word(name) else []:
            try:
                found.append(self.manifest(name, entry))
            except BadManifest:
                continue
        return sorted(found, key=lambda m: (m.added_at, _natural(m.version)))

    def models(self) -> list[Manifest]:
        return [m for name in _folders(self.folder) for m in self.versions(name)]

    def find(self, model: str) -> Manifest | None:
        """`name:version`, or `name` for the version added last."""
        name, colon, version = model.partition(":")
        found = [m for m in self.versions(name) if not colon or m.version == version]
        return found[-1] if found else None

    def weights_of(self, manifest: Manifest) -> Path:
        """What a worker loads: a GGUF file or a Hugging Face folder."""
        return self.place(manifest.name, manifest.version) / manifest.weights


def _folders(path: Path) -> list[str]:
    """Names of the folders in a folder, in order; links are none."""
    try:
        with os.scandir(path) as entries:
            names = sorted(e.name for e in entries if e.is_dir(follow_symlinks=False) and is_word(e.name))
    except OSError:
        return []
    return names[:MODELS_MAX]


def _natural(version: str) -> tuple[tuple[int, str], ...]:
    """1.10 after 1.9."""
    return tuple((int(part or 0), word) for word, part in re.findall(r"(\D*)(\d*)", version))
