"""What `shoal init --secure` wrote, for those that use it on this machine: the launcher and the command."""

import ssl
from pathlib import Path

from chassis.config import ConfigError
from shoal.client import Tls


def folder_of(table: object) -> Path | None:
    """Of a configuration's section `[up]`. Raises ConfigError."""
    match table:
        case {"secure": str(folder), **rest} if not rest:
            return Path(folder)
        case {**rest} if not rest:
            return None
        case _:
            raise ConfigError("[up] holds secure = DIR and nothing else")


def tls_of(secure: Path | None) -> Tls | bool:
    """For clients of gateways that use it. Raises ConfigError."""
    if secure is None:
        return False
    client = secure / "client"
    try:
        return Tls.of_files(secure / "ca.pem", client / "certificate.pem", client / "key.pem")
    except OSError as error:
        raise ConfigError(f"{secure}: {error}") from None


def context_of(secure: Path | None) -> ssl.SSLContext | None:
    """The same for clients of its HTTP door. Raises ConfigError."""
    if secure is None:
        return None
    client = secure / "client"
    try:
        context = ssl.create_default_context(cafile=secure / "ca.pem")
        context.load_cert_chain(client / "certificate.pem", client / "key.pem")
    except OSError as error:
        raise ConfigError(f"{secure}: {error}") from None
    return context
