"""Pure. Typed reading of a dictionary that came from outside: a model's configuration or metadata.

A value of another type is LoadFailed, never a guess. Null counts as absent.
"""

import math
from collections.abc import Mapping

from shard_worker.executor import LoadFailed

Settings = Mapping[str, object]


def whole(settings: Settings, key: str, default: int | None = None) -> int:
    value = settings.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise LoadFailed(f"model configuration: {key} is {value!r}, not a whole number")
    return value


def number(settings: Settings, key: str, default: float | None = None) -> float:
    value = settings.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise LoadFailed(f"model configuration: {key} is {value!r}, not a number")
    return float(value)


def positive(settings: Settings, key: str, default: float | None = None) -> float:
    value = number(settings, key, default)
    if not 0 < value < math.inf:
        raise LoadFailed(f"model configuration: {key} = {value} is not positive")
    return value


def flag(settings: Settings, key: str, default: bool = False) -> bool:
    value = settings.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise LoadFailed(f"model configuration: {key} is {value!r}, not true or false")
    return value


def numbers(settings: Settings, key: str) -> tuple[float, ...]:
    value = settings.get(key)
    if not isinstance(value, list) or not all(
        isinstance(v, int | float) and not isinstance(v, bool) for v in value
    ):
        raise LoadFailed(f"model configuration: {key} is not a list of numbers")
    return tuple(float(v) for v in value)


def section(settings: Settings, key: str) -> Settings:
    """A dictionary within; empty when absent."""
    value = settings.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise LoadFailed(f"model configuration: {key} is not an object")
    return value
