"""What a configuration file, or the environment, says of what `shoal up` is made of.

It holds for each word that is not given. Services read all the rest themselves.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chassis.config import without_user
from shoal.plan import PORT_MAX, LaunchError, Plan

_DIALLED = (
    ("shard_worker", "listen"),
    ("shard_worker", "rpc_listen"),
    ("batcher", "listen"),
    ("kvstore", "rpc_address"),
)


@dataclass(frozen=True, slots=True)
class Configured:
    """As `Plan`; None: not said."""

    model: str | None = None
    model_name: str | None = None
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
        model_name=said.text("shard_worker", "model_name"),
        repository=Path(repository) if repository else None,
        stages=said.number("batcher", "num_stages"),
        threads=said.number("shard_worker", "threads"),
        tensor_parallel=said.number("shard_worker", "tensor_parallel"),
        port=said.port("gateway", "grpc_address"),
        http_port=said.port("gateway", "http_address"),
    )


def unheeded(plan: Plan, env: Mapping[str, str]) -> list[str]:
    """What is said but not followed, since processes that share a machine are told it one by one; each with
    the word that is. Raises LaunchError."""
    said = _Said(plan.config, env)
    lines: list[str] = []

    def note(section: str, key: str, instead: str) -> None:
        value, where = said.value(section, key)
        lines.append(f"not followed: {where}, {without_user(str(value))!r}: {instead}")

    url = said.text("chassis", "nats_url")
    if url is not None and url != plan.nats_url:
        note("chassis", "nats_url", "--nats names a server, without it `up` starts its own")
    if said.text("chassis", "metrics_address") is not None:
        note("chassis", "metrics_address", "each process has its own, in state.json of the run folder")
    for key in ("grpc_address", "http_address"):
        address = said.value("gateway", key)[0]
        if key == "http_address" and address == "":
            note("gateway", key, f"`up` always serves HTTP, on port {plan.http_port or 'any'}")
        elif address and _host(address) != plan.clients_host:
            note(
                "gateway", key, f"gateways listen on {plan.clients_host}; --listen says where others come in"
            )
    for section, key in _DIALLED:
        address = said.text(section, key)
        if address is not None and (_host(address) != plan.host or not address.endswith(":0")):
            note(section, key, "--listen and --first-port say where services listen")
    return lines


def _host(address: str) -> str:
    """Of `host:port` or `tcp://host:port`."""
    return address.rpartition("://")[2].rpartition(":")[0].strip("[]")


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

    def value(self, section: str, key: str) -> tuple[Any, str]:
        """What is said, and where; None: nothing is."""
        name = f"SHOAL_{section}_{key}".upper()
        if name in self._env:
            return self._env[name], name
        keys = self._sections.get(section)
        return (keys.get(key) if isinstance(keys, dict) else None), f"[{section}] {key} in {self._path}"

    def text(self, section: str, key: str) -> str | None:
        value, where = self.value(section, key)
        if value is not None and not isinstance(value, str):
            raise LaunchError(f"{where}: {value!r} is no text")
        return value or None

    def number(self, section: str, key: str) -> int | None:
        value, where = self.value(section, key)
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
            raise LaunchError(f"{self.value(section, key)[1]}: {value!r} is no host:port")
        return int(port)
