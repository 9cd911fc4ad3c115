"""What a repository finds: by name, by version, and nothing whose manifest is not of its place."""

import json
from pathlib import Path

import pytest

from chassis.model_repository import (
    MANIFEST,
    BadManifest,
    Manifest,
    ModelRepository,
    StoredFile,
    build_manifest,
    default_folder,
    is_word,
    parse_manifest,
)


def manifest(name: str = "fish", version: str = "1", added_at: str = "2026-01-01T00:00:00Z") -> Manifest:
    files = (StoredFile("model.gguf", 3, "ab"), StoredFile("notes.txt", 2, "cd"))
    return Manifest(name, version, "llama", "d" * 64, "model.gguf", False, added_at, files)


def put(repository: ModelRepository, what: Manifest) -> Path:
    place = repository.place(what.name, what.version)
    place.mkdir(parents=True)
    (place / MANIFEST).write_text(build_manifest(what))
    return place


def test_a_manifest_comes_back() -> None:
    assert parse_manifest(build_manifest(manifest())) == manifest()
    assert manifest().num_bytes == 5


@pytest.mark.parametrize(
    "changes",
    [
        {"files": [{"name": "../model.gguf", "num_bytes": 1, "sha256": ""}]},
        {"files": [{"name": "/model.gguf", "num_bytes": 1, "sha256": ""}], "weights": "."},
        {"files": [{"name": "manifest.json", "num_bytes": 1, "sha256": ""}], "weights": "."},
        {"files": [{"name": ".", "num_bytes": 1, "sha256": ""}], "weights": "."},
        {"files": [], "weights": "."},
        {"files": 5},
        {"weights": "another.gguf"},
        {"weights": "../model.gguf"},
        {"linked": None, "files": None},
    ],
)
def test_a_manifest_that_leads_elsewhere_is_refused(changes: dict[str, object]) -> None:
    raw = json.loads(build_manifest(manifest())) | changes
    with pytest.raises(BadManifest):
        parse_manifest(json.dumps(raw))


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 10_000, '{"files": [1]}'])
def test_what_is_no_manifest_is_refused(text: str) -> None:
    with pytest.raises(BadManifest):
        parse_manifest(text)


def test_names(tmp_path: Path) -> None:
    assert all(map(is_word, ("a", "Qwen2.5-0.5B", "1", "v1.0+q4")))
    assert not any(map(is_word, ("", "..", ".a", "a/b", "a b", "-a", "a:b", "a\n", "x" * 101)))
    assert ModelRepository(tmp_path).versions("../..") == []


def test_versions_by_the_time_they_came(tmp_path: Path) -> None:
    repository = ModelRepository(tmp_path / "models")
    assert repository.models() == [] and repository.find("fish") is None
    for version in ("2", "10", "9"):
        put(repository, manifest(version=version))
    put(repository, manifest(version="old", added_at="2025-01-01T00:00:00Z"))
    put(repository, manifest("bird", "1"))
    assert [m.version for m in repository.versions("fish")] == ["old", "2", "9", "10"]
    assert repository.find("fish") == manifest(version="10")
    found = repository.find("fish:2")
    assert found is not None
    assert repository.weights_of(found) == tmp_path / "models" / "fish" / "2" / "model.gguf"
    assert repository.find("fish:3") is None and repository.find("fish:") is None
    assert [(m.name, m.version) for m in repository.models()][0] == ("bird", "1")


def test_what_is_not_of_its_place_is_not_found(tmp_path: Path) -> None:
    repository = ModelRepository(tmp_path)
    place = put(repository, manifest())
    (tmp_path / "fish" / "2").mkdir()
    (tmp_path / "fish" / "3").symlink_to(place)
    (tmp_path / "fish" / "4").mkdir()
    (tmp_path / "fish" / "4" / MANIFEST).write_text(build_manifest(manifest(version="5")))
    assert [m.version for m in repository.versions("fish")] == ["1"]
    with pytest.raises(BadManifest, match="is of fish:5"):
        repository.manifest("fish", "4")
    with pytest.raises(BadManifest):
        repository.manifest("fish", "2")


def test_the_users_data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "shoal" / "models"
    monkeypatch.delenv("XDG_DATA_HOME")
    assert default_folder().parts[-4:] == (".local", "share", "shoal", "models")
