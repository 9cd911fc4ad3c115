"""The file of API keys: read by gateways, written by `shoal keys`. TOML or JSON, by its name.

Written beside and renamed, readable by its owner alone: a reader sees the old keys or the new ones.
"""

import json
import os
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chassis.api_keys import ApiKey, is_id, render
from chassis.config import ConfigError, from_value

KEYS_LEN_MAX = 100_000
FILE_BYTES_MAX = 64 << 20


def read_keys(path: Path) -> dict[str, ApiKey]:
    """By id. Raises ConfigError, which holds nothing that was in the file but names."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise ConfigError(f"{path}: more than {FILE_BYTES_MAX} bytes")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: cannot be read: not UTF-8") from None
    return parse_keys(text, str(path))


def parse_keys(text: str, where: str) -> dict[str, ApiKey]:
    """Of a file's text. Raises ConfigError."""
    try:
        document: Any = json.loads(text) if where.endswith(".json") else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: {type(error).__name__}: not what its name says") from None
    if not isinstance(document, dict) or document.keys() - {"keys"}:
        raise ConfigError(f"{where}: tables [keys.<id>] and nothing else")
    keys: dict[str, ApiKey] = from_value(document.get("keys", {}), Mapping[str, ApiKey], where)
    check_ids(keys, where)
    return keys


def check_ids(keys: Mapping[str, ApiKey], where: str) -> None:
    """Raises ConfigError."""
    if len(keys) > KEYS_LEN_MAX:
        raise ConfigError(f"{where}: {len(keys)} keys; at most {KEYS_LEN_MAX}")
    for key_id in keys:
        if not is_id(key_id):
            raise ConfigError(f"{where}: {key_id[:40]!r} is no key's id: small letters and digits")


def write_keys(path: Path, keys: Mapping[str, ApiKey]) -> None:
    """Raises OSError."""
    if path.suffix == ".json":
        raise OSError(f"{path}: only TOML is written")
    number, beside = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(render(keys))
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise
