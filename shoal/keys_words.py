"""The words of `shoal keys`: API keys in a file that gateways look at again when it changes.

A key is shown once, when it is made: the file holds its SHA-256. A key that is revoked stays in the file,
disabled, so that its id still says whose it was.
"""

import argparse
import base64
import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path

from chassis.api_keys import CLASSES, ID_LEN, LIMITS, SECRET_BYTES, ApiKey, digest_of, make_token
from chassis.api_keys_file import read_keys, write_keys
from chassis.config import ConfigError

ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"


def add_words(parser: argparse.ArgumentParser) -> None:
    words = parser.add_subparsers(required=True, metavar="WORD", dest="word")
    add = words.add_parser("add", help="make a key and show it, this once")
    add.add_argument("--tenant", required=True, help="whose requests, cache and jobs are kept apart")
    add.add_argument("--models", default="*", help="names with commas between; * or beginning* (default: *)")
    add.add_argument("--priorities", default="0-9", metavar="BEST-WORST", help="it may ask for (0 is first)")
    add.add_argument("--class", dest="service_class", choices=CLASSES, default=CLASSES[0])
    for name in LIMITS:
        add.add_argument("--" + name.replace("_", "-"), type=int, default=0, metavar="N", help="0: no limit")
    add.add_argument("--expires", default="", help="its last day (2031-12-31), or a moment with its offset")
    listing = words.add_parser("list", help="the keys of the file")
    revoke = words.add_parser("revoke", help="refuse a key from now on")
    revoke.add_argument("id", nargs="+", help="as `list` shows it")
    default = Path(os.environ.get("SHOAL_GATEWAY_KEYS_FILE", "keys.toml"))
    for word in (add, listing, revoke):
        word.add_argument(
            "--file", type=Path, default=default, help="default: SHOAL_GATEWAY_KEYS_FILE, else keys.toml"
        )


def new_key(**terms: object) -> tuple[str, str, ApiKey]:
    """The key itself, its id, and what is kept of it. Raises ValueError, AssertionError for bad terms."""
    key_id = "".join(secrets.choice(ALPHABET) for _ in range(ID_LEN))
    secret = base64.urlsafe_b64encode(secrets.token_bytes(SECRET_BYTES)).decode().rstrip("=")
    token = make_token(key_id, secret)
    return token, key_id, ApiKey(digest_of(token), **terms)  # type: ignore[arg-type]


def run(arguments: argparse.Namespace) -> tuple[str, str]:
    """What to print, and what to say beside it. Raises ConfigError, OSError."""
    path: Path = arguments.file
    if arguments.word == "list":
        if not path.exists():
            raise ConfigError(f"{path}: there is none; --file names another, `shoal keys add` begins one")
        return render_list(read_keys(path)), ""
    with _alone(path):
        keys = read_keys(path) if path.exists() else {}
        if arguments.word == "revoke":
            for key_id in arguments.id:
                if key_id not in keys:
                    raise ConfigError(f"{path}: no key {key_id}")
                keys[key_id] = replace(keys[key_id], disabled=True)
            write_keys(path, keys)
            return "", f"revoked: {', '.join(arguments.id)}"
        try:
            token, key_id, key = new_key(**_terms(arguments))
        except (ValueError, AssertionError) as error:
            raise ConfigError(str(error)) from None
        write_keys(path, {**keys, key_id: key})
    return token, f"key {key_id} of tenant {key.tenant!r}, kept as a digest in {path}: it is not shown again"


def _terms(arguments: argparse.Namespace) -> dict[str, object]:
    """Raises ValueError."""
    best, _, worst = arguments.priorities.partition("-")
    names = {f.name for f in fields(ApiKey)} - {"sha256", "models", "disabled"}
    terms = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    models = tuple(name.strip() for name in arguments.models.split(",") if name.strip())
    return {**terms, "models": models, "priority_best": int(best), "priority_worst": int(worst or best)}


def render_list(keys: dict[str, ApiKey]) -> str:
    lines = []
    for key_id, key in keys.items():
        limits = [f"{name.replace('_', ' ')} {value}" for name in LIMITS if (value := getattr(key, name))]
        words = [
            f"tenant {key.tenant!r}",
            f"models {','.join(key.models)}",
            f"priorities {key.priority_best}-{key.priority_worst}",
            *([key.service_class] if key.service_class != CLASSES[0] else []),
            *limits,
            *([f"expires {key.expires}"] if key.expires else []),
            *(["REVOKED"] if key.disabled else []),
        ]
        lines.append(f"{key_id}  {'  '.join(words)}")
    return "\n".join(lines) or "no keys"


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Two commands at once would each write a file without the other's key. Raises OSError."""
    folder = os.open(path.resolve().parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
