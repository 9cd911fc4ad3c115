"""Where a value comes from, and what happens to one that is wrong."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Literal

import pytest

from chassis.config import ConfigError, effective, load


@dataclass(frozen=True, slots=True)
class Config:
    port: int = 1
    ratio: float = 0.5
    name: str = "default"
    on: bool = False
    maybe: bool | None = None
    sizes: tuple[int, ...] = (1, 2)
    limit: int | None = None
    mode: Literal["a", "b"] = "a"
    api_key: str = field(default="", metadata={"secret": True})
    url: str = "nats://user:pass@host:4222"

    def __post_init__(self) -> None:
        assert self.port > 0, "port: above 0"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "c.toml"
    path.write_text(text)
    return path


def test_each_source_overrides_the_ones_before(tmp_path: Path) -> None:
    path = write(tmp_path, '[s]\nport = 2\nratio = 2\nname = "file"\n[other]\nunknown = 1\n')
    env = {"SHOAL_S_NAME": "env", "SHOAL_S_RATIO": "3.5", "SHOAL_OTHER_PORT": "9"}
    assert load(Config, "s") == Config()
    assert load(Config, "s", path) == Config(port=2, ratio=2.0, name="file")
    assert load(Config, "s", path, env) == Config(port=2, ratio=3.5, name="env")
    assert load(Config, "s", path, env, ["--name", "flag"]) == Config(port=2, ratio=3.5, name="flag")


def test_values_take_the_type_of_their_field(tmp_path: Path) -> None:
    flags = ["--on", "--sizes", "4, 5", "--limit=none", "--mode", "b"]
    assert load(Config, "s", flags=flags) == Config(on=True, sizes=(4, 5), mode="b")
    assert load(Config, "s", flags=["--no-on", "--limit", "7"]) == Config(limit=7)
    assert load(Config, "s", flags=["--on", "false"]) == Config(on=False)
    assert load(Config, "s", flags=["--maybe", "--port", "2"]) == Config(maybe=True, port=2)
    assert load(Config, "s", flags=["--no-maybe"]) == Config(maybe=False)
    assert load(Config, "s", flags=["--maybe=none"]) == Config()
    assert load(Config, "s", write(tmp_path, "[s]\nsizes = [7]\nlimit = 3\n")) == Config(sizes=(7,), limit=3)
    assert load(Config, "s", env={"SHOAL_S_SIZES": ""}) == Config(sizes=())


@pytest.mark.parametrize(
    ("text", "env", "flags", "named"),
    [
        ("[s]\nprot = 2", {}, [], "'prot'.*did you mean port"),
        ("", {"SHOAL_S_PORTS": "1"}, [], "SHOAL_S_PORTS"),
        ("", {}, ["--prot", "1"], "--prot"),
        ("[s]\nport = '2'", {}, [], "port.*not a int"),
        ("[s]\nport = true", {}, [], "port.*not a int"),
        ("[s]\nsizes = 2", {}, [], "sizes.*not a list"),
        ("", {"SHOAL_S_ON": "maybe"}, [], "SHOAL_S_ON"),
        ("", {}, ["--port", "x"], "--port"),
        ("", {}, ["--port"], "--port wants a value"),
        ("", {}, ["port"], "'port' is not a flag"),
        ("", {}, ["--mode", "c"], "none of a, b"),
        ("", {}, ["--port", "0"], "port: above 0"),
        ("[s", {}, [], "c.toml"),
        ("s = 1", {}, [], "not a table"),
    ],
)
def test_a_wrong_key_or_value_is_named(
    tmp_path: Path, text: str, env: dict[str, str], flags: list[str], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        load(Config, "s", write(tmp_path, text), env, flags)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere.toml"):
        load(Config, "s", tmp_path / "nowhere.toml")


def test_what_is_logged_holds_no_secret() -> None:
    shown = effective(Config(api_key="hush"))
    assert shown["api_key"] == "***"
    assert shown["url"] == "nats://***@host:4222"
    assert shown["port"] == 1


class Action(Enum):
    KEEP = "keep"
    DROP = "drop"


@dataclass(frozen=True)
class Policy:
    size: int = 0
    action: Action = Action.KEEP

    def __post_init__(self) -> None:
        assert self.size >= 0, "size: at least 0"


@dataclass(frozen=True)
class Tabled:
    weights: Mapping[str, float] = field(default_factory=dict)
    policies: Mapping[int, Policy] = field(default_factory=dict)
    policy: Policy = Policy()


def test_tables_fill_mappings_and_dataclasses(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        '[s]\nweights = { acme = 3, "a b" = 0.5 }\npolicy = { size = 7 }\n'
        '[s.policies.9]\nsize = 2\naction = "drop"\n'
    )
    found = load(Tabled, "s", path)
    assert found.weights == {"acme": 3.0, "a b": 0.5}
    assert found.policies == {9: Policy(2, Action.DROP)} and found.policy == Policy(7)
    shown = effective(found)
    assert shown["policies"] == {"9": {"size": 2, "action": "drop"}}
    flags = ["--weights", "{ acme = 1.5 }", "--policies={ 0 = { size = 1 } }"]
    given = load(Tabled, "s", env={"SHOAL_S_POLICY": "{ size = 3 }"}, flags=flags)
    assert given == Tabled({"acme": 1.5}, {0: Policy(1)}, Policy(3))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("policies = { 9 = { sise = 2 } }", "did you mean size"),
        ("policies = { x = { size = 2 } }", "'x' is not a int"),
        ("policies = { 9 = 2 }", "is not a table"),
        ("policies = { 9 = { size = -1 } }", "size: at least 0"),
        ('weights = { a = "b" }', "is not a float"),
        ("weights = 3", "is not a table"),
        ('policy = { action = "wipe" }', "'wipe' is not a Action"),
    ],
)
def test_tables_that_do_not_fit_are_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f"[s]\n{text}\n")
    with pytest.raises(ConfigError, match=re.escape(said)):
        load(Tabled, "s", path)
    with pytest.raises(ConfigError, match="not an inline table"):
        load(Tabled, "s", flags=["--weights", "a=2"])
