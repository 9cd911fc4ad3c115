"""One frozen dataclass per service holds all that can be set; this file fills it.

Rules: defaults < TOML `[section]` < environment `SHOAL_<SECTION>_<FIELD>` < flags `--field-name VALUE`; an
unknown key is an error that names it; every value has the type its field declares. A field that is a mapping
or a dataclass is a TOML table, as text an inline one: `{ acme = 3.0 }`. Nothing else in Shoal reads the
environment or a configuration file.
"""

import dataclasses
import difflib
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

C = TypeVar("C")

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_SECRET = re.compile(r"(^|_)(secret|password|token|credentials|key)$")
_USER_INFO = re.compile(r"(?<=://)[^/@\s]+@")


class ConfigError(Exception):
    """A configuration that cannot be used; the message names the key and where it came from."""


def load(
    cls: type[C],
    section: str,
    path: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> C:
    """Fills the dataclass `cls` from its four sources. `flags` are command line words, `defaults` go before
    the class's own. Raises ConfigError."""
    values: dict[str, Any] = dict(defaults or {})
    types_by_name = _types(cls)
    for key, value in _from_file(section, path).items():
        _known(key, types_by_name, f"[{section}] in {path}")
        values[key] = _from_toml(value, types_by_name[key], f"[{section}] {key} in {path}")
    prefix = f"SHOAL_{section.upper()}_"
    for name, text in sorted((env or {}).items()):
        if name.startswith(prefix):
            key = name[len(prefix) :].lower()
            _known(key, types_by_name, f"environment variable {name}")
            values[key] = _from_text(text, types_by_name[key], name)
    for key, text in split_flags(cls, flags):
        values[key] = _from_text(text, types_by_name[key], _flag(key))
    try:
        return cls(**values)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"[{section}] {error}") from error


def split_flags(cls: type[Any], flags: Sequence[str]) -> list[tuple[str, str]]:
    """(field, text) for each flag. `--f VALUE`, `--f=VALUE`; a bool also as `--f` and `--no-f`."""
    types_by_name = _types(cls)
    pairs: list[tuple[str, str]] = []
    words = list(flags)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise ConfigError(f"{word!r} is not a flag")
        name, equals, text = word[2:].partition("=")
        key = name.replace("-", "_")
        if key.startswith("no_") and not equals and _unwrap(types_by_name.get(key[3:]))[0] is bool:
            pairs.append((key[3:], "false"))
            continue
        _known(key, types_by_name, "flag " + word.partition("=")[0])
        if not equals:
            is_switch = _unwrap(types_by_name[key])[0] is bool
            if is_switch and (not words or words[0].lower() not in _TRUE | _FALSE):
                text = "true"
            elif words:
                text = words.pop(0)
            else:
                raise ConfigError(f"{word} wants a value")
        pairs.append((key, text))
    return pairs


def from_value(value: Any, kind: Any, where: str) -> Any:
    """What a TOML or JSON value is as a field of type `kind`. Raises ConfigError, naming `where`."""
    return _from_toml(value, kind, where)


def fields_of(cls: type[Any]) -> frozenset[str]:
    """The names that can be set."""
    return frozenset(_types(cls))


def effective(config: Any) -> dict[str, Any]:
    """What is in force, for the log: secrets and the user part of addresses are blanked."""
    shown: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        secret = field.metadata.get("secret", bool(_SECRET.search(field.name)))
        if secret and isinstance(value, str):
            shown[field.name] = "***" if value else ""
        elif isinstance(value, str):
            shown[field.name] = without_user(value)
        else:
            shown[field.name] = _plain(value)
    return shown


def _plain(value: Any) -> Any:
    """As JSON can say it."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if dataclasses.is_dataclass(value):
        return effective(value)
    return value


def without_user(address: str) -> str:
    """An address fit for a log: the user and password in it are blanked."""
    return _USER_INFO.sub("***@", address)


def _types(cls: type[Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def _from_file(section: str, path: str | Path | None) -> Mapping[str, Any]:
    if path is None:
        return {}
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    table = document.get(section, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: {section} is not a table")
    return table


def _known(key: str, names: Iterable[str], where: str) -> None:
    if key not in names:
        near = difflib.get_close_matches(key, list(names), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"unknown key {key!r} ({where}){hint}")


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def _unwrap(kind: Any) -> tuple[Any, bool]:
    """The type inside an optional, and whether None is allowed."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        inner = [k for k in typing.get_args(kind) if k is not types.NoneType]
        assert len(inner) == 1, f"configuration fields are plain or optional, not {kind}"
        return inner[0], True
    supertype = getattr(kind, "__supertype__", None)  # NewType
    return (supertype, False) if supertype is not None else (kind, False)


def _from_text(text: str, kind: Any, where: str) -> Any:
    kind, optional = _unwrap(kind)
    if optional and text.lower() in ("", "none"):
        return None
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)[0]
        return tuple(_from_text(part.strip(), inner, where) for part in text.split(",") if part.strip())
    if typing.get_origin(kind) is Mapping or dataclasses.is_dataclass(kind):
        try:
            value = tomllib.loads(f"x = {text}")["x"]
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{where}: {text!r} is not an inline table: {error}") from None
        return _from_toml(value, kind, where)
    if kind is bool:
        if text.lower() in _TRUE | _FALSE:
            return text.lower() in _TRUE
        raise ConfigError(f"{where}: {text!r} is not a bool")
    return _convert(text, kind, where)


def _from_toml(value: Any, kind: Any, where: str) -> Any:
    kind, _ = _unwrap(kind)
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)[0]
        if not isinstance(value, list):
            raise ConfigError(f"{where}: {value!r} is not a list")
        return tuple(_from_toml(part, inner, where) for part in value)
    if typing.get_origin(kind) is Mapping or dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: {value!r} is not a table")
        return _from_table(value, kind, where)
    if kind is float and type(value) is int:
        return float(value)
    if kind in (int, float, bool, str):
        if type(value) is not kind:
            raise ConfigError(f"{where}: {value!r} is not a {kind.__name__}")
        return value
    return _convert(value, kind, where)


def _from_table(table: Mapping[str, Any], kind: Any, where: str) -> Any:
    if not dataclasses.is_dataclass(kind):
        name, inner = typing.get_args(kind)
        return {
            _convert(key, name, where): _from_toml(value, inner, f"{where}: {key}")
            for key, value in table.items()
        }
    types_by_name = _types(kind)  # type: ignore[arg-type]
    for key in table:
        _known(key, types_by_name, where)
    values = {k: _from_toml(value, types_by_name[k], f"{where}: {k}") for k, value in table.items()}
    try:
        return kind(**values)  # type: ignore[operator]
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"{where}: {error}") from error


def _convert(value: Any, kind: Any, where: str) -> Any:
    if typing.get_origin(kind) is typing.Literal:
        if value in typing.get_args(kind):
            return value
        raise ConfigError(f"{where}: {value!r} is none of {', '.join(map(str, typing.get_args(kind)))}")
    try:
        return kind(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{where}: {value!r} is not a {getattr(kind, '__name__', kind)}") from None
