"""The compiled code is built once, whoever asks; where it can't be, there is none, and that is said."""

import ctypes
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from chassis import log
from shard_worker.native import build, library
from tests.shard_worker.native import small_sources

needs_compiler = pytest.mark.skipif(library.native() is None, reason="no compiler here")
ROOT = Path(__file__).parents[3]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Sources that compile in a moment, instead of ours."""
    folder = tmp_path / "sources"
    small_sources.write(folder)
    monkeypatch.setattr(build, "SOURCES", folder)
    return folder


@needs_compiler
def test_is_built_once_and_kept(small: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = build.library_path(cache)
    assert first is not None and first.parent == cache
    made = first.stat().st_mtime_ns
    assert build.library_path(cache) == first and first.stat().st_mtime_ns == made
    assert sorted(path.name for path in cache.iterdir()) == sorted(["lock", first.name])
    (small / "one.cpp").write_text(small_sources.ONE.replace("40", "41"))
    assert build.library_path(cache) != first


@needs_compiler
@pytest.mark.parametrize("damage", ["cut off", "a hole", "empty"])
def test_what_is_damaged_is_built_anew(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    made = build.library_path(tmp_path / "cache")
    assert made is not None and build.is_built(tmp_path / "cache")
    answer = ctypes.CDLL(str(made)).answer()
    content = made.read_bytes()
    half = len(content) // 2
    holed = content[:half] + bytes(4096) + content[half + 4096 :]
    made.unlink()  # which is still mapped
    made.write_bytes({"cut off": content[:half], "a hole": holed, "empty": b""}[damage])
    assert not build.is_built(tmp_path / "cache")
    lines: list[bytes] = []
    monkeypatch.setattr(log, "_default", log._Bound(write=lines.append))
    again = build.library_path(tmp_path / "cache")
    assert again == made and b"is damaged" in lines[0] and build.is_built(tmp_path / "cache")
    assert ctypes.CDLL(str(again)).answer() == answer == 42


@needs_compiler
def test_the_digest_hangs_on_all_that_decides(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = build.find_compiler()
    digests = [build.digest_of(compiler, small)]
    assert build.digest_of(compiler, small) == digests[0]
    (small / "two.h").write_text("// changed\n" + small_sources.TWO)
    digests.append(build.digest_of(compiler, small))
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DOTHER"))
    digests.append(build.digest_of(compiler, small))
    monkeypatch.setattr(build, "FLAGS", tuple(f for f in build.FLAGS if f != "-march=native"))
    digests.append(build.digest_of(compiler, small))  # as on another processor
    assert len(dict.fromkeys(digests)) == 4


@needs_compiler
def test_two_that_start_at_once_build_it_once(small: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from shard_worker.native import build\n"
        "build.SOURCES = Path(sys.argv[1])\n"
        "print(build.library_path(Path(sys.argv[2])))\n"
    )
    command = [sys.executable, "-c", program, str(small), str(tmp_path / "cache")]
    both = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    answers = [process.communicate(timeout=120) for process in both]
    assert answers[0][0] == answers[1][0] and Path(answers[0][0].strip()).exists()
    assert sum("compiled the stage" in errors for _, errors in answers) == 1


@needs_compiler
def test_what_does_not_compile_is_none_and_leaves_nothing(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[bytes] = []
    monkeypatch.setattr(log, "_default", log._Bound(write=lines.append))
    (small / "one.cpp").write_text("int f() { return nothing; }\n")
    assert build.library_path(tmp_path / "cache") is None
    assert b"no compiled stage" in lines[-1] and b"nothing" in lines[-1]
    (small / "one.cpp").write_text("int missing(); int f() { return missing(); }\n")
    assert build.library_path(tmp_path / "cache") is None
    assert b"missing" in lines[-1]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["lock"]


def test_without_a_compiler_there_is_none(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[bytes] = []
    monkeypatch.setattr(log, "_default", log._Bound(write=lines.append))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.library_path(tmp_path / "cache") is None
    assert b"no-such-compiler" in lines[-1]
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.library_path(tmp_path / "cache") is None
    assert b"g++, c++, clang++ not found" in lines[-1]
    assert not (tmp_path / "cache").exists()


def test_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_NATIVE", "0")
    assert build.library_path(tmp_path) is None
    assert not list(tmp_path.iterdir())


@needs_compiler
def test_old_builds_go(small: Path, tmp_path: Path) -> None:
    for i in range(build.KEPT_MAX + 3):
        old = tmp_path / f"{i}.so"
        old.touch()
        os.utime(old, (i + 1, i + 1))
    (tmp_path / "tmpkilled").mkdir()
    newest = build.library_path(tmp_path)
    kept = sorted(path.name for path in tmp_path.glob("*.so") if path != newest)
    assert newest is not None and newest.exists() and not (tmp_path / "tmpkilled").exists()
    assert kept == sorted(f"{i}.so" for i in range(4, build.KEPT_MAX + 3))


@needs_compiler
def test_a_warm_start_only_asks_the_compiler_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    build.library_path()
    asked: list[list[str]] = []
    run = build._run

    def noted(command: list[str], timeout_s: float) -> bytes:
        asked.append(command)
        return run(command, timeout_s)

    monkeypatch.setattr(build, "_run", noted)
    path = build.library_path()
    assert path is not None and library.load(path) is not None
    assert len(asked) == 1 and "-dM" in asked[0]


def test_the_sources_are_part_of_the_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "shard_worker.native" in settings["packages"]
    patterns = settings["package-data"]["shard_worker.native"]
    kept = {path.name for pattern in patterns for path in build.SOURCES.glob(pattern)}
    needed = {path.name for path in build.SOURCES.iterdir() if path.suffix not in (".py", "")}
    assert kept == needed and "stage.cpp" in kept
