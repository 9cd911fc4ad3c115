"""`shoal keys`: a key is shown once, works, and is revoked."""

import multiprocessing
from pathlib import Path

import pytest

from chassis.api_keys import find
from chassis.api_keys_file import read_keys
from shoal import cli


def shoal_keys(path: Path, *words: str) -> int:
    return cli.main(["keys", words[0], "--file", str(path), *words[1:]])


def test_keys_are_added_listed_and_revoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.toml"
    terms = (
        "--models",
        "smollm2, qwen*",
        "--priorities",
        "4-6",
        "--class",
        "batch",
        "--expires",
        "2031-12-31",
    )
    limits = ("--requests-per-minute", "60", "--tokens-per-day", "1000")
    assert shoal_keys(path, "add", "--tenant", "acme", *terms, *limits) == 0
    assert shoal_keys(path, "add", "--tenant", "other") == 0
    tokens = capsys.readouterr().out.split()
    assert len(set(tokens)) == 2 and all(token not in path.read_text() for token in tokens)
    found = find(read_keys(path), tokens[0])
    assert found is not None
    key_id, key = found
    assert (key.tenant, key.models, key.priority_best, key.priority_worst) == (
        "acme",
        ("smollm2", "qwen*"),
        4,
        6,
    )
    assert (key.service_class, key.requests_per_minute, key.tokens_per_day) == ("batch", 60, 1000)
    assert shoal_keys(path, "revoke", key_id) == 0
    assert shoal_keys(path, "list") == 0
    listed = capsys.readouterr().out.splitlines()
    assert [key_id in line and "REVOKED" in line for line in listed] == [True, False]
    assert "sha256" not in "".join(listed) and "requests per minute 60" in listed[0]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("add", "--tenant", "t", "--priorities", "x"), "invalid literal"),
        (("add", "--tenant", "t", "--models", ","), "models"),
        (("add", "--tenant", "t", "--tokens-per-day", "-1"), "tokens_per_day"),
        (("add", "--tenant", "t", "--expires", "soon"), "soon"),
        (("revoke", "nobody"), "nobody"),
        (("list",), "there is none; --file names another"),
    ],
)
def test_bad_words_change_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    path = tmp_path / "keys.toml"
    assert shoal_keys(path, *words) == 1
    assert says in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_two_commands_at_once_lose_no_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=shoal_keys, args=(path, "add", "--tenant", "t")) for _ in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(30)
        assert writer.exitcode == 0
    assert len(read_keys(path)) == 8
