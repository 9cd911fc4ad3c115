"""What this machine must have to join a deployment that runs elsewhere: an address, files, a range of layers.

All that can be known before a service starts is looked at here, so that what is wrong is said at once and by
its name. Nothing here starts anything.
"""

import asyncio
import os
import re
import socket
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from chassis.config import without_user
from chassis.nats_access import access_of, with_options
from shoal.listening import NATS_PORT, is_dialled
from shoal.nats_server import is_taken
from shoal.plan import LaunchError

SERVICES = {"kvstore": "kvstore", "worker": "shard_worker", "batcher": "batcher", "gateway": "gateway"}
ROLES = tuple(SERVICES)  # in the order in which they start
BUS_TIMEOUT_S = 5.0
LAYERS_MAX = 100_000

_RPC = ("rpc/ca.pem", "rpc/service.pem", "rpc/service.key")
_FRONT = ("keys.toml", "gateway/certificate.pem", "gateway/key.pem")


async def reached_from(url: str, service: str) -> str:
    """The address of this machine by which it reaches the bus. Raises LaunchError, ConfigError."""
    why: object = "no servers"
    for server in access_of(url, service).servers:
        try:
            parts = urlsplit(server if "://" in server else f"//{server}")
        except ValueError:  # a bracket too few
            parts = urlsplit("")
        if parts.scheme not in ("nats", "tls") or not parts.hostname:
            raise LaunchError(f"{without_user(server)!r}: nats://HOST:PORT or tls://HOST:PORT")
        try:
            async with asyncio.timeout(BUS_TIMEOUT_S):
                _, writer = await asyncio.open_connection(parts.hostname, parts.port or NATS_PORT)
        except TimeoutError:
            why = f"no answer in {BUS_TIMEOUT_S:g} s"
        except socket.gaierror as error:  # its numbers are not those of the system
            why = error.strerror
        except (OSError, ValueError) as error:  # ValueError: a port that is none
            why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error
        else:
            address = str(writer.get_extra_info("sockname")[0])
            writer.close()
            return address
    raise LaunchError(f"no NATS at {without_user(url.partition('?')[0])}: {why}")


def check_host(host: str, flag: str) -> None:
    """Raises LaunchError for an address on which nothing here can listen, or that others cannot dial."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM) if host else []
        if not is_dialled(host) or not all(is_dialled(str(address[0])) for *_, address in found):
            raise LaunchError(f"{flag} {host}: others dial this address; name the one of this machine")
        is_taken(0, host)
    except (OSError, UnicodeError) as error:  # UnicodeError: what can't be a name
        raise LaunchError(f"{flag} {host} is no address of this machine: {error}") from None


def layers_of(text: str) -> range | None:
    """Of `auto` or `A:B`. Raises LaunchError."""
    if text == "auto":
        return None
    found = re.fullmatch(r"(\d+):(\d+)", text)
    if found is None or not int(found[1]) < int(found[2]) <= LAYERS_MAX:
        raise LaunchError(f"--layers {text}: auto, or FIRST:END as in 0:15, END not among them")
    return range(int(found[1]), int(found[2]))


def secured_url(url: str, secure: Path | None) -> str:
    """With what `shoal init` wrote, unless the URL names files itself."""
    if secure is None or "?" in url:
        return url
    return with_options(url, ca=secure / "nats" / "ca.pem", credentials=secure / "nats" / "credentials")


def secure_flags(secure: Path, roles: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """By service. Raises LaunchError for a file that a role needs and this machine has not got."""
    flags: dict[str, tuple[str, ...]] = {}
    for role in dict.fromkeys(roles):
        service = SERVICES[role]
        credentials = f"nats/credentials/{service}.toml"
        files = ["nats/ca.pem", credentials, *(_FRONT if role == "gateway" else _RPC)]
        for file in files:
            if not (secure / file).is_file():
                raise LaunchError(f"--secure {secure}: a {role} needs {file}, as `shoal init` wrote it")
        if role == "gateway":
            names = ("--keys-file", "--tls-certificate-file", "--tls-key-file")
            flags[service] = tuple(
                word for n, f in zip(names, _FRONT, strict=True) for word in (n, str(secure / f))
            )
        else:
            flags[service] = ("--rpc-tls-dir", str(secure / "rpc"))
    return flags


def is_guarded(config: Path | None) -> bool:
    """Whether gateways with this configuration ask for keys, over TLS."""
    if config is None:
        return False
    try:
        gateway = tomllib.loads(config.read_text(encoding="utf-8")).get("gateway", {})
    except (OSError, ValueError):  # whoever uses it says so
        return False
    return bool((gateway.get("keys_file") or gateway.get("keys")) and gateway.get("tls_key_file"))
