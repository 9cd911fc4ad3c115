"""The words of `shoal init`: all that a guarded deployment needs, in one folder, once.

    ca.pem  ca.key                  the authority of gateways and of clients' certificates
    gateway/  client/               certificate.pem, key.pem
    rpc/                            ca.pem, service.pem, service.key: calls between services
    nats/                           ca.pem, certificate.pem, key.pem, authorization.conf: of the server
    nats/credentials/<service>.toml user and password of each service, of the operator too
    keys.toml                       API keys, one to begin with
    shoal.toml                      a configuration that uses all of it

Only their owner can read them. A machine gets the files of the services that run on it, no others.
"""

import argparse
import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from chassis.api_keys_file import write_keys
from chassis.bus_rights import OPERATOR, Rights, rights
from chassis.config import ConfigError
from chassis.nats_access import with_options
from shoal.keys_words import new_key

LOCAL = ("localhost", "127.0.0.1", "::1")
RPC_NAME = "service.shoal.internal"
PASSWORD_BYTES = 32
DAYS = 825


def add_words(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--secure", type=Path, required=True, metavar="DIR", help="where to write; new, or empty"
    )
    parser.add_argument(
        "--host", action="append", default=[], help="name or address of a machine, in certificates"
    )
    parser.add_argument("--tenant", default="default", help="of the first API key")
    parser.add_argument("--days", type=int, default=DAYS, help=f"that certificates are valid ({DAYS})")


def run(arguments: argparse.Namespace) -> tuple[str, str]:
    """The first API key, and what to say beside it. Raises ConfigError, OSError."""
    folder: Path = arguments.secure.resolve()
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: nothing is written over what may be in use")
    if not 0 < arguments.days <= 3650:
        raise ConfigError(f"--days {arguments.days}; 1 to 3650")
    if not all(arguments.host):
        raise ConfigError("--host: an empty name")
    hosts = (*LOCAL, *arguments.host)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    try:
        _write_certificates(folder, hosts, arguments.days)
    except ValueError as error:
        raise ConfigError(f"--host: {error}") from None
    passwords = {user: secrets.token_urlsafe(PASSWORD_BYTES) for user in rights()}
    for user, password in passwords.items():
        _write(folder / "nats" / "credentials" / f"{user}.toml", _credentials(user, password))
    _write(folder / "nats" / "authorization.conf", authorization(folder / "nats", passwords))
    try:
        token, key_id, key = new_key(tenant=arguments.tenant)
    except AssertionError as error:
        raise ConfigError(f"--tenant: {error}") from None
    write_keys(folder / "keys.toml", {key_id: key})
    _write(folder / "shoal.toml", _configuration(folder))
    beside = f"`shoal up --config {folder / 'shoal.toml'}` uses it. The key above is not shown again"
    return token, f"{beside}: `shoal generate` takes it from SHOAL_API_KEY"


def _write_certificates(folder: Path, hosts: Sequence[str], days: int) -> None:
    """Raises ValueError for a host that can be in none."""
    from shoal.certificates import Authority

    front, inside = Authority("Shoal clients and gateways"), Authority("Shoal services")
    _write(folder / "ca.pem", front.pair.certificate)
    _write(folder / "ca.key", front.pair.key)
    _write(folder / "rpc" / "ca.pem", inside.pair.certificate)
    _write(folder / "rpc" / "ca.key", inside.pair.key)
    _write(folder / "nats" / "ca.pem", inside.pair.certificate)
    gateway = front.sign("Shoal gateway", hosts, days, server=True, client=False)
    client = front.sign("Shoal client", (), days, server=False, client=True)
    nats = inside.sign("Shoal NATS", hosts, days, server=True, client=False)
    for name, pair in (("gateway", gateway), ("client", client), ("nats", nats)):
        _write(folder / name / "certificate.pem", pair.certificate)
        _write(folder / name / "key.pem", pair.key)
    service = inside.sign("Shoal service", (RPC_NAME,), days, server=True, client=True)
    _write(folder / "rpc" / "service.pem", service.certificate)
    _write(folder / "rpc" / "service.key", service.key)


def _write(path: Path, content: str | bytes) -> None:
    """For its owner alone, from its first byte on."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(number, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)


def _credentials(user: str, password: str) -> str:
    return f"user = {json.dumps(user)}\npassword = {json.dumps(password)}\n"


def authorization(folder: Path, passwords: dict[str, str]) -> str:
    """Of nats-server's configuration: TLS from this folder, and each user with its rights."""
    files = {"cert_file": "certificate.pem", "key_file": "key.pem", "ca_file": "ca.pem"}
    lines = ["tls {", *(f"  {name}: {json.dumps(str(folder / file))}" for name, file in files.items()), "}"]
    lines += ["authorization {", "  users = ["]
    for user, may in rights().items():
        password = json.dumps(passwords[user])
        lines.append(f"    {{ user: {user}, password: {password}, permissions: {{")
        lines += _permissions(may)
        lines.append("    } }" if user == OPERATOR else "    } },")
    return "\n".join([*lines, "  ]", "}", ""])


def _permissions(may: Rights) -> list[str]:
    return [
        f"      publish: {{ allow: {json.dumps(list(may.publish))} }}",
        f"      subscribe: {{ allow: {json.dumps(list(may.subscribe))} }}",
        "      allow_responses: true",
    ]


def _configuration(folder: Path) -> str:
    credentials = folder / "nats" / "credentials"
    url = with_options("tls://127.0.0.1:4222", ca=folder / "nats" / "ca.pem", credentials=credentials)
    path = {
        name: json.dumps(str(folder / name))
        for name in ("", "rpc", "keys.toml", "gateway/certificate.pem", "gateway/key.pem", "ca.pem")
    }
    return f"""# Written by `shoal init --secure`. Links that carry tensors (of stages, batcher, kvstore) are
# not encrypted: keep them on a private network.

[up]                              # of `shoal up` alone
secure = {path[""]}

[chassis]
nats_url = {json.dumps(url)}
rpc_tls_dir = {path["rpc"]}

[gateway]
grpc_address = "127.0.0.1:50051"  # with keys other machines may be let in: 0.0.0.0:50051
# (`shoal up` itself stays on loopback)
http_address = "127.0.0.1:8000"
keys_file = {path["keys.toml"]}
tls_certificate_file = {path["gateway/certificate.pem"]}
tls_key_file = {path["gateway/key.pem"]}
# tls_client_ca_file = {path["ca.pem"]}
"""
