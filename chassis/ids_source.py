"""Where ids and seeds come from, outside simulation.

Ids are ULIDs in lower-case base32 (26 letters and digits): they sort by time and are safe in a subject.
"""

import secrets
from collections.abc import Callable

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


def ulid(wall_ms: int, chance: int) -> str:
    """48 bits of time, 80 of chance."""
    value = (wall_ms & (1 << 48) - 1) << 80 | chance & (1 << 80) - 1
    return "".join(_ALPHABET[value >> shift & 31] for shift in range(125, -1, -5))


def id_source(wall_ns: Callable[[], int]) -> Callable[[], str]:
    """Fresh ids; the operating system gives the chance in them."""
    return lambda: ulid(wall_ns() // 1_000_000, secrets.randbits(80))


def new_seed() -> int:
    """64 random bits."""
    return secrets.randbits(64)
