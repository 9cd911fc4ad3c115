"""The example configurations are ones that the services accept."""

import importlib
import tomllib
from pathlib import Path

import pytest

from chassis.config import effective, load
from chassis.service import ChassisConfig

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
SERVICES = ("gateway", "batcher", "kvstore", "shard_worker")
FILES = sorted(DEPLOY.glob("*.toml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_section_is_somebodys(path: Path) -> None:
    assert set(tomllib.loads(path.read_text())) <= {"chassis", *SERVICES}
    load(ChassisConfig, "chassis", path)
    for service in SERVICES:
        load(importlib.import_module(f"{service}.config").Config, service, path)


def test_what_the_local_one_shows_are_the_defaults() -> None:
    """So that running with it and without it is the same, and it does not go stale."""
    path = DEPLOY / "local.toml"
    shown = tomllib.loads(path.read_text())
    for section, cls in {
        "chassis": ChassisConfig,
        **{s: importlib.import_module(f"{s}.config").Config for s in SERVICES},
    }.items():
        defaults = effective(cls())
        assert shown[section] == {key: defaults[key] for key in shown[section]}, section
