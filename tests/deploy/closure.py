"""What a service's image has: its requirements and what those need, by the metadata of what is installed."""

import importlib.util
import re
import tomllib
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def constraints() -> dict[str, str]:
    """Exact versions by name."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {normal(name): version for name, version in pairs}


@cache
def _script() -> ModuleType:
    path = ROOT / "deploy" / "containers" / "requirements.py"
    spec = importlib.util.spec_from_file_location("container_requirements", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def requirements_of(extras: Iterable[str]) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: list[str] = _script().requirements(project, extras)
    return found


def closure(lines: Iterable[str]) -> set[str]:
    """Names of all distributions that these need here, themselves too."""
    waiting = [Requirement(line) for line in lines]
    found: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        wanted = waiting.pop()
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        key = (normal(wanted.name), frozenset(wanted.extras))
        if key in found:
            continue
        found.add(key)
        for line in metadata.requires(wanted.name) or ():
            inner = Requirement(line)
            extras = wanted.extras or {""}
            if inner.marker is None or any(
                inner.marker.evaluate({"extra": extra}) for extra in extras | {""}
            ):
                inner.marker = None
                waiting.append(inner)
    return {name for name, _ in found}


def modules_outside(lines: Iterable[str]) -> set[str]:
    """Modules that are installed here and would not be in the image."""
    inside = closure(lines) | {"pip", "setuptools"}
    return {
        module
        for module, owners in metadata.packages_distributions().items()
        if not any(normal(owner) in inside for owner in owners)
    }
