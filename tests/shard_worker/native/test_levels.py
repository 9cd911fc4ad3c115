"""Compiled code that was made ahead: the best that the processor runs, of these sources, whole; else none."""

import ctypes
import platform
from pathlib import Path

import pytest

from shard_worker.native import build, levels, library, prebuild
from tests.shard_worker.native import small_sources

needs_compiler = pytest.mark.skipif(library.native() is None, reason="no compiler here")
MODERN = frozenset().union(*(level.needs for level in levels.LEVELS if level.machine == "x86_64"))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    small_sources.write(folder)
    monkeypatch.setattr(build, "SOURCES", folder)
    return folder


def names(has: frozenset[str], machine: str = "x86_64") -> list[str]:
    found = levels.candidates(Path("f"), build.SOURCES, build.portable_flags(), machine, has)
    return [path.name.rpartition("-")[0] for path in found]


def test_the_best_that_the_processor_has_comes_first() -> None:
    assert names(MODERN)[0] == "x86-64-v4-bf16"
    assert names(MODERN - {"avx512_bf16"})[0] == "x86-64-v4-vnni"
    assert names(MODERN - {"avx512f"}) == ["x86-64-v3", "x86-64-v2"]
    assert names(MODERN - {"fma"}) == ["x86-64-v2"]
    assert names(frozenset()) == [] == names(MODERN, "aarch64") == names(MODERN, "riscv64")
    assert names(frozenset({"asimd"}), "aarch64") == ["armv8-a"]


def test_each_level_needs_what_those_below_it_need() -> None:
    for machine in ("x86_64", "aarch64"):
        needs = [level.needs for level in levels.of_machine(machine)]
        assert all(below < above for above, below in zip(needs, needs[1:], strict=False))


def test_a_flag_counts_if_every_core_has_it() -> None:
    told = "processor : 0\nflags\t\t: avx2 fma\n\nprocessor : 1\nflags\t\t: fma sse4_1\n"
    assert levels.features(told) == {"fma"}
    assert levels.features("Features\t: asimd crc32\n") == {"asimd", "crc32"}
    assert levels.features("nothing of it") == frozenset()


def test_names_hang_on_sources_and_flags(small: Path) -> None:
    level = levels.LEVELS[0]
    before = levels.file_name(level, small, ("-O3",))
    assert levels.file_name(level, small, ("-O2",)) != before
    (small / "two.h").write_text("// changed\n" + small_sources.TWO)
    assert levels.file_name(level, small, ("-O3",)) != before


@needs_compiler
def test_what_was_made_ahead_is_taken_and_nothing_compiled(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "ahead"
    made = prebuild.prebuild(folder, levels.of_machine(platform.machine()))
    assert sorted(folder.iterdir()) == sorted(made) and made
    monkeypatch.setenv("SHOAL_NATIVE_DIR", str(folder))
    monkeypatch.setenv("CXX", "no-such-compiler")
    runs = [path for path in made if path in candidates_here(folder, small)]
    found = build.library_path(tmp_path / "cache")
    assert found == runs[0] and build.is_built(tmp_path / "cache") and not (tmp_path / "cache").exists()
    assert ctypes.CDLL(str(found)).answer() == 42
    runs[0].write_bytes(runs[0].read_bytes()[:-1])
    assert build.library_path(tmp_path / "cache") == runs[1], "one that is not whole is passed over"
    (small / "one.cpp").write_text(small_sources.ONE.replace("40", "41"))
    assert build.library_path(tmp_path / "cache") is None, "of other sources"


def candidates_here(folder: Path, sources: Path) -> list[Path]:
    return levels.candidates(folder, sources, build.portable_flags(), *levels.here())


@needs_compiler
def test_without_one_that_fits_it_is_compiled_as_ever(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_NATIVE_DIR", str(tmp_path / "none"))
    assert not build.is_built(tmp_path / "cache")
    found = build.library_path(tmp_path / "cache")
    assert found is not None and found.parent == tmp_path / "cache"


def test_the_command_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert prebuild.main([]) == 2
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert prebuild.main([str(tmp_path / "x")]) == 1


@needs_compiler
@pytest.mark.slow
def test_our_sources_compile_for_every_level(tmp_path: Path) -> None:
    """And what this processor runs can be loaded: `library.load` finds every function."""
    made = prebuild.prebuild(tmp_path, levels.of_machine(platform.machine()))
    here = set(candidates_here(tmp_path, build.SOURCES))
    assert here and len(made) == len(levels.of_machine(platform.machine()))
    for path in made:
        if path in here:
            loaded = library.load(path)
            assert loaded.shoal_linear_isa()
