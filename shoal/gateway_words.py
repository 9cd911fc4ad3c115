"""Which gateway a command asks, and as whom: words that `generate`, `chat`, `resume` and `models` share.

Secrets come from the environment: what is said on a command line anybody on the machine can read.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from shoal import secure_folder
from shoal.client import Client, Retry, Tls
from shoal.client.errors import InvalidArgument, ShoalError
from shoal.launcher import read_state, secure_of


def add_words(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address",
        help="host:port of a gateway, or several with commas between (default: what `shoal up` runs)",
    )
    parser.add_argument("--tls", action="store_true", help="with the usual root certificates")
    parser.add_argument("--ca", metavar="FILE", help="TLS with these root certificates (or SHOAL_CA)")
    parser.add_argument("--certificate", metavar="FILE", help="who you are, where gateways ask")
    parser.add_argument("--private-key", metavar="FILE", help="of the certificate")


def client_of(arguments: argparse.Namespace) -> Client:
    """SHOAL_API_KEY is sent with each call. Raises ShoalError, LaunchError."""
    key, addresses = os.environ.get("SHOAL_API_KEY", ""), addresses_of(arguments)
    retry = Retry(on_wait=complaint(addresses))
    return Client(addresses, api_key=key, tls=tls_of(arguments), retry=retry)


def complaint(addresses: Sequence[str]) -> Callable[[ShoalError], None]:
    """Says once why nothing is heard: else a wrong address looks like a slow answer."""
    said = False

    def say(error: ShoalError) -> None:
        nonlocal said
        if not said:
            said = True
            where = ", ".join(addresses)
            sys.stderr.write(f"{where}: {error.message}; trying again for {Retry().patience_s:g} s\n")

    return say


def addresses_of(arguments: argparse.Namespace) -> list[str]:
    """Raises LaunchError when nothing is said and nothing runs."""
    if arguments.address:
        return [address.strip() for address in str(arguments.address).split(",")]
    addresses = read_state(Path(arguments.run_dir))["addresses"]
    assert isinstance(addresses, list)
    return [str(address) for address in addresses]


def tls_of(arguments: argparse.Namespace) -> Tls | bool:
    """Raises InvalidArgument, ConfigError, LaunchError."""
    ca = arguments.ca or os.environ.get("SHOAL_CA")
    if not (ca or arguments.certificate or arguments.private_key):
        if not (arguments.tls or arguments.address):
            return secure_folder.tls_of(secure_of(arguments.run_dir))
        return bool(arguments.tls)
    try:
        return Tls.of_files(ca, arguments.certificate, arguments.private_key)
    except OSError as error:
        raise InvalidArgument("INVALID_ARGUMENT", f"{error.filename}: {error.strerror}") from None
