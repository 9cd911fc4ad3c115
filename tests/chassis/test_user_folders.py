"""A user without a home folder gets one of their own, which nobody else can write to."""

from pathlib import Path

import pytest

from chassis import log, user_folders
from chassis.user_folders import cache_folder, data_folder


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    written: list[bytes] = []
    monkeypatch.setattr(log, "_default", log._Bound(write=written.append))
    return written


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    for variable in ("XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(variable, raising=False)
    user_folders._instead.cache_clear()
    return tmp_path


def test_where_the_user_says_or_at_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "ann"))
    assert cache_folder() == tmp_path / "shoal"
    assert data_folder() == tmp_path / "ann/.local/share/shoal"


def test_without_a_home_folder(homeless: Path, lines: list[bytes]) -> None:
    first = cache_folder()
    assert first.parts[-2:] == (".cache", "shoal") and cache_folder() == first
    home = first.parents[1]
    assert home.parent == homeless and home.stat().st_mode & 0o777 == 0o700
    assert data_folder().is_relative_to(home)
    assert len(lines) == 1 and b"no home folder" in lines[0] and str(home).encode() in lines[0]
    user_folders._instead.cache_clear()
    assert cache_folder() == first  # at the next start too


@pytest.mark.parametrize("trap", ["open to all", "a link", "a file"])
def test_a_folder_that_others_may_have_made_is_not_used(
    homeless: Path, lines: list[bytes], trap: str
) -> None:
    home = cache_folder().parents[1]
    home.rmdir()
    match trap:
        case "open to all":
            home.mkdir()
            home.chmod(0o777)
        case "a link":
            (homeless / "elsewhere").mkdir()
            home.symlink_to(homeless / "elsewhere")
        case _:
            home.write_text("")
    user_folders._instead.cache_clear()
    other = cache_folder().parents[1]
    assert trap == "a file" or other != home and other.stat().st_mode & 0o777 == 0o700
    assert len(lines) == 2
