"""Pure. To which kvstore a pool belongs: of all there are, who weighs most with it (rendezvous hash).

Whoever knows the same kvstores says the same. One that joins takes only the pools that weigh most with it,
a fair share; one that leaves gives up only its own, each to the next in that pool's order.
"""

import hashlib
from collections.abc import Iterable


def ranked(pool: str, kvstores: Iterable[str]) -> list[str]:
    """Names of kvstores, the pool's owner first."""
    return sorted(kvstores, key=lambda name: (-weight(pool, name), name))


def weight(pool: str, kvstore: str) -> int:
    """0 to 2^64 - 1."""
    one, other = pool.encode(), kvstore.encode()
    named = b"%d:%b%d:%b" % (len(one), one, len(other), other)
    return int.from_bytes(hashlib.sha256(named).digest()[:8], "big")
