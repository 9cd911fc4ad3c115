"""`shoal model`: what is added is whole and stays as it was; what goes is what was added, nothing else."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from chassis.config import load
from chassis.model_repository import MANIFEST, ModelRepository, default_folder
from shard_worker.config import Config as WorkerConfig
from shoal import models
from shoal.cli import _parser as parser
from shoal.cli import main
from shoal.launcher import LaunchError, model_flags, precision_flags
from shoal.models import Asked, ModelError
from shoal.up_words import plan_of

DIGEST = "d" * 64
TOLD = {
    "family": "llama",
    "digest": DIGEST,
    "num_layers": 4,
    "vocab_size": 300,
    "context_len_max": 256,
    "formats": {"q8_0": 28},
    "stored_bytes": 3 << 20,
    "dtype": "float32",
    "quantize": "int8",
    "int8_activations": True,
    "ids": [1, 2, 3],
    "layer_us": [900.0, 1000.0, 900.0, 900.0],
    "head_us": 1500.0,
    "rows": 16,
    "stages": [
        {
            "first_layer": 0,
            "end_layer": 3,
            "step_us": 2800.0,
            "weight_bytes": 2 << 20,
            "kv_bytes_per_token": 512,
        },
        {
            "first_layer": 3,
            "end_layer": 4,
            "step_us": 2400.0,
            "weight_bytes": 1 << 20,
            "kv_bytes_per_token": 256,
        },
    ],
}


class Worker:
    """Stands for `python -m shard_worker.check`: believes every file, unless it says so inside."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[str, ...]]] = []
        self.digests = [DIGEST]  # the last one stays

    def __call__(self, model: str, repository: ModelRepository, flags: Sequence[str]) -> dict[str, Any]:
        self.asked.append((Path(model).name, tuple(flags)))
        path = Path(model)
        if not path.exists() or (path.is_file() and b"damaged" in path.read_bytes()):
            raise ModelError(f"{model}: not a whole GGUF file")
        weights = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
        digest = self.digests.pop(0) if len(self.digests) > 1 else self.digests[0]
        return TOLD | {"path": str(path), "weights": list(map(str, weights)), "digest": digest}


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    made = Worker()
    monkeypatch.setattr(models, "worker_check", made)
    return made


@pytest.fixture
def repository(tmp_path: Path) -> ModelRepository:
    return ModelRepository(tmp_path / "repository")


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.Q8_0.gguf"
    path.write_bytes(b"weights" * 1000)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "Tiny-HF"
    path.mkdir()
    for name in ("a.safetensors", "b.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"):
        (path / name).write_text(name)
    (path / "pytorch_model.bin").write_bytes(b"a pickle stays where it is")
    return path


def test_a_file_is_copied_and_found(worker: Worker, repository: ModelRepository, gguf: Path) -> None:
    manifest = models.add(repository, str(gguf))
    assert (manifest.name, manifest.version, manifest.family) == ("tiny.Q8_0", "1", "llama")
    gguf.unlink()
    found = repository.find("tiny.Q8_0")
    assert found == manifest
    assert repository.weights_of(manifest).read_bytes() == b"weights" * 1000
    assert [flags for _, flags in worker.asked] == [("--only", "files")] * 2  # before and after it was copied
    models.verify(repository, manifest)


def test_a_folder_is_copied_without_its_pickles(
    worker: Worker, repository: ModelRepository, folder: Path
) -> None:
    manifest = models.add(repository, str(folder), name="tiny", version="v2")
    assert manifest.weights == "." and repository.weights_of(manifest) == repository.place("tiny", "v2")
    copied = {path.name for path in repository.place("tiny", "v2").iterdir()}
    assert copied == {p.name for p in folder.iterdir()} - {"pytorch_model.bin"} | {MANIFEST}
    assert {f.name for f in manifest.files} == copied - {MANIFEST}


def test_a_link_leads_to_the_file_and_going_leaves_it(
    worker: Worker, repository: ModelRepository, gguf: Path
) -> None:
    manifest = models.add(repository, str(gguf), "tiny", link=True)
    assert repository.weights_of(manifest).is_symlink() and manifest.linked
    gguf.write_bytes(b"others" * 1000)
    with pytest.raises(ModelError, match="is not what was added: 6000 bytes"):
        models.check(repository, "tiny", Asked())
    models.remove(repository, "tiny")
    assert gguf.exists() and repository.models() == []


def test_versions_count_up(worker: Worker, repository: ModelRepository, gguf: Path) -> None:
    assert [models.add(repository, str(gguf), "tiny").version for _ in range(3)] == ["1", "2", "3"]
    models.add(repository, str(gguf), "tiny", "beta")
    assert models.add(repository, str(gguf), "tiny").version == "4"
    with pytest.raises(ModelError, match="tiny:beta is there already"):
        models.add(repository, str(gguf), "tiny", "beta")


@pytest.mark.parametrize(
    ("name", "version"), [("../x", ""), ("x", "../1"), ("a b", ""), ("x", "1/2"), (".x", "")]
)
def test_names_that_lead_elsewhere_are_refused(
    worker: Worker, repository: ModelRepository, gguf: Path, name: str, version: str
) -> None:
    with pytest.raises(ModelError, match="letters, digits"):
        models.add(repository, str(gguf), name, version)
    assert not repository.folder.exists()


def test_what_the_loader_refuses_is_not_added(
    worker: Worker, repository: ModelRepository, gguf: Path
) -> None:
    gguf.write_bytes(b"damaged")
    with pytest.raises(ModelError, match="not a whole GGUF file"):
        models.add(repository, str(gguf))
    assert not repository.folder.exists()


def test_what_changed_meanwhile_leaves_nothing(
    worker: Worker, repository: ModelRepository, gguf: Path
) -> None:
    worker.digests = [DIGEST, "e" * 64]
    with pytest.raises(ModelError, match="changed while it was copied"):
        models.add(repository, str(gguf), "tiny")
    assert list((repository.folder / "tiny").iterdir()) == []
    assert repository.models() == []


def test_check_verifies_before_it_runs(worker: Worker, repository: ModelRepository, gguf: Path) -> None:
    manifest = models.add(repository, str(gguf), "tiny")
    worker.asked.clear()
    checked, told = models.check(repository, "tiny:1", Asked(3, "bfloat16", "int4", threads=2))
    assert checked == manifest and told["digest"] == DIGEST
    flags = "--stages 3 --dtype bfloat16 --quantize int4 --device cpu --threads 2".split()
    assert worker.asked == [("tiny.Q8_0.gguf", tuple(flags))]
    assert "--no-int8-activations" in Asked(int8_activations=False).flags
    on_device = Asked(int8_activations=True, device="cuda")
    assert on_device.flags[6:9] == ("--int8-activations", "--device", "cuda")
    path = repository.weights_of(manifest)
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)
    worker.asked.clear()
    with pytest.raises(ModelError, match="is not what was added"):
        models.check(repository, "tiny", Asked())
    path.unlink()
    with pytest.raises(ModelError, match="No such file"):
        models.check(repository, "tiny", Asked())
    assert worker.asked == []
    with pytest.raises(ModelError, match="not a whole"):
        models.check(repository, "unknown", Asked())


def test_remove_takes_what_was_added_and_nothing_else(
    worker: Worker, repository: ModelRepository, gguf: Path, tmp_path: Path
) -> None:
    first, second = (models.add(repository, str(gguf), "tiny") for _ in range(2))
    for model, message in [
        ("tiny", "has versions 1, 2: say tiny:VERSION"),
        ("tiny:3", "is not in"),
        ("other", "is not in"),
        ("../tiny:1", "is not in"),
        (str(gguf), "is not in"),
    ]:
        with pytest.raises(ModelError, match=message):
            models.remove(repository, model)
    mine = repository.place("tiny", "1") / "mine.txt"
    mine.write_text("of somebody")
    with pytest.raises(ModelError, match=r"holds mine\.txt, which nobody added"):
        models.remove(repository, "tiny:1")
    models.verify(repository, first)
    mine.unlink()
    models.remove(repository, "tiny:1")
    assert repository.models() == [second]
    assert models.remove(repository, "tiny") == second
    assert not (repository.folder / "tiny").exists() and gguf.exists()


def test_a_manifest_that_names_other_files_removes_none(
    worker: Worker, repository: ModelRepository, gguf: Path
) -> None:
    models.add(repository, str(gguf), "tiny")
    path = repository.place("tiny", "1") / MANIFEST
    raw = json.loads(path.read_text())
    raw["files"][0]["name"] = str(gguf)
    path.write_text(json.dumps(raw))
    with pytest.raises(ModelError, match="is not in"):
        models.remove(repository, "tiny:1")
    assert gguf.exists()


# ---- the command ------------------------------------------------------------------------------------


def test_the_words(
    worker: Worker, repository: ModelRepository, gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--repository", str(repository.folder)]
    assert main(["model", "list", *where]) == 0
    assert "no models in" in capsys.readouterr().out
    assert main(["model", "add", str(gguf), "--name", "tiny", *where]) == 0
    assert "shoal up --model tiny:1" in capsys.readouterr().out
    assert main(["model", "list", *where]) == 0
    assert capsys.readouterr().out.startswith("tiny:1  llama  0 MiB  20")
    assert main(["model", "check", "tiny", "--quantize", "int8", *where]) == 0
    told = capsys.readouterr().out
    assert "1 files are what was added" in told and "quantize int8, 8-bit activations: 3 greedy" in told
    assert "stage 0: layers 0 to 2, 2.8 ms, weights 2 MiB, KV 0.5 KiB a token" in told
    assert main(["model", "remove", "tiny", *where]) == 0
    assert main(["model", "remove", "tiny", *where]) == 1
    assert capsys.readouterr().err.startswith("shoal: tiny is not in")


def test_up_finds_the_repositorys_models(
    worker: Worker, repository: ModelRepository, gguf: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    models.add(repository, str(gguf), "tiny")
    path = str(repository.place("tiny", "1") / "tiny.Q8_0.gguf")
    assert model_flags("tiny:1", repository.folder) == ("--model", path, "--model-name", "tiny:1")
    assert model_flags("tiny:1", repository.folder, "ours") == ("--model", path, "--model-name", "ours")
    assert model_flags("tiny", repository.folder)[3] == "tiny"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    with pytest.raises(LaunchError, match="no such model: tiny is no file or folder"):
        model_flags("tiny")
    models.add(ModelRepository(default_folder()), str(gguf), "tiny")
    assert model_flags("tiny")[0] == "--model"
    words = ["up", "--model", "tiny", "--repository", "r", "--quantize", "int4", "--dtype", "bfloat16"]
    plan = plan_of(parser().parse_args(words))
    assert (plan.repository, plan.quantize, plan.dtype) == (Path("r"), "int4", "bfloat16")
    assert precision_flags(plan) == ("--dtype", "bfloat16", "--quantize", "int4")
    for word in ("--int8-activations", "--no-int8-activations"):
        assert precision_flags(plan_of(parser().parse_args(["up", word]))) == (word,)
        plain = load(WorkerConfig, "shard_worker", flags=[word, "--threads", "2"])
        assert plain.int8_activations is (word == "--int8-activations")


def test_a_worker_that_dies_is_an_error(repository: ModelRepository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(ModelError, match="the check ended with code 1: without a word"):
        models.worker_check("tiny", repository, ())


def test_a_real_worker_from_add_to_remove(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_models = pytest.importorskip("tests.shard_worker.tiny_models")
    folder, where = tmp_path / "model", ["--repository", str(tmp_path / "repository")]
    tiny_models.make(folder, num_hidden_layers=3)
    assert main(["model", "add", str(folder), *where]) == 0
    assert main(["model", "check", "model", "--stages", "2", *where]) == 0
    told = capsys.readouterr().out
    assert "8 greedy tokens, the same twice" in told and "proposed split over 2:" in told
    assert main(["model", "remove", "model", *where]) == 0
