"""What a configuration file, or the environment, says of what `shoal up` is made of.

It holds for each word that is not given. Services read all the rest themselves.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.plan import PORT_MAX, LaunchError


@dataclass(frozen=True, slots=True)
class Configured:
    """As `Plan`; None: not said."""

    model: str | None = None
    repository: Path | None = None
    stages: int | None = None
    threads: int | None = None
    tensor_parallel: int | None = None
    port: int | None = None
    http_port: int | None = None


def configured(path: Path | None, env: Mapping[str, str]) -> Configured:
    """Raises LaunchError: no file, or a value that is none. The environment goes before the file."""
    said = _Said(path, env)
    repository = said.text("shard_worker", "repository")
    executor, model = said.text("shard_worker", "executor"), said.text("shard_worker", "model")
    return Configured(
        model="fake" if executor == "fake" else model,
        repository=Path(repository) if repository else None,
        stages=said.number("batcher", "num_stages"),
        threads=said.number("shard_worker", "threads"),
        tensor_parallel=said.number("shard_worker", "tensor_parallel"),
        port=said.port("gateway", "grpc_address"),
        http_port=said.port("gateway", "http_address"),
    )


class _Said:
    def __init__(self, path: Path | None, env: Mapping[str, str]) -> None:
        self._env = env
        self._path = path
        self._sections: dict[str, Any] = {}
        if path is not None:
            try:
                self._sections = tomllib.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise LaunchError(f"{path}: {error}") from None

    def _value(self, section: str, key: str) -> tuple[Any, str]:
        """What is said, and where; None: nothing is."""
        name = f"SHOAL_{section}_{key}".upper()
        if name in self._env:
            return self._env[name], name
        keys = self._sections.get(section)
        return (keys.get(key) if isinstance(keys, dict) else None), f"[{section}] {key} in {self._path}"

    def text(self, section: str, key: str) -> str | None:
        value, where = self._value(section, key)
        if value is not None and not isinstance(value, str):
            raise LaunchError(f"{where}: {value!r} is no text")
        return value or None

    def number(self, section: str, key: str) -> int | None:
        value, where = self._value(section, key)
        if value is None:
            return None
        try:
            if isinstance(value, bool | float):
                raise ValueError
            return int(value)
        except (TypeError, ValueError):
            raise LaunchError(f"{where}: {value!r} is no whole number") from None

    def port(self, section: str, key: str) -> int | None:
        value = self.text(section, key)
        if value is None:
            return None
        port = value.rpartition(":")[2]
        if not (port.isascii() and port.isdigit() and int(port) <= PORT_MAX):
            raise LaunchError(f"{self._value(section, key)[1]}: {value!r} is no host:port")
        return int(port)
