"""How a NATS server is reached: `SERVERS[?ca=FILE&credentials=PATH&certificate=FILE&key=FILE]`.

A URL with options travels as one value through flags, environments and state files, and holds no secret:
those stay in files. `credentials` is a TOML file with `user` and `password`, or a folder with one per service
(`gateway.toml`, ...); who is no service is the operator.
"""

import ssl
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode

from chassis.bus_rights import OPERATOR, inbox_prefix, rights
from chassis.config import ConfigError

OPTIONS = ("ca", "credentials", "certificate", "key")


@dataclass(frozen=True, slots=True)
class NatsAccess:
    servers: tuple[str, ...]
    user: str = ""
    password: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Of the client library's `connect`."""
        options: dict[str, Any] = {}
        if self.user:
            options |= {"user": self.user, "password": self.password}
            options["inbox_prefix"] = inbox_prefix(self.user).encode()
        if self.tls is not None:
            options["tls"] = self.tls
        return options


def access_of(url: str, service: str) -> NatsAccess:
    """Raises ConfigError."""
    servers, _, query = url.partition("?")
    options = {name: values[-1] for name, values in parse_qs(query, keep_blank_values=True).items()}
    for name in options:
        if name not in OPTIONS:
            raise ConfigError(f"nats_url: unknown option {name!r}; known are {', '.join(OPTIONS)}")
    user, password = (
        _credentials(Path(options["credentials"]), service) if "credentials" in options else ("", "")
    )
    return NatsAccess(tuple(server.strip() for server in servers.split(",")), user, password, _tls(options))


def with_options(servers: str, **options: Path | str) -> str:
    return f"{servers}?{urlencode({name: str(value) for name, value in options.items()}, safe='/')}"


def _credentials(path: Path, service: str) -> tuple[str, str]:
    """Raises ConfigError, which holds nothing of what is in the file."""
    if path.is_dir():
        path = path / f"{service if service in rights() else OPERATOR}.toml"
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
        user, password = found["user"], found["password"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"nats_url: credentials: {path}: {type(error).__name__}") from None
    if not isinstance(user, str) or not isinstance(password, str):
        raise ConfigError(f"nats_url: credentials: {path}: user and password are strings")
    return user, password


def _tls(options: dict[str, str]) -> ssl.SSLContext | None:
    """Raises ConfigError."""
    if not {"ca", "certificate", "key"} & options.keys():
        return None
    try:
        context = ssl.create_default_context(cafile=options.get("ca"))
        if "certificate" in options:
            context.load_cert_chain(options["certificate"], options.get("key"))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"nats_url: TLS files: {error}") from None
    return context
