"""Pure. What a sequence's ids so far amount to, in 64 bits: by which a worker knows what its blocks hold.

A digest is a root plus one word for each id at its position, modulo 2^64; so it can be carried on from any
position, added up in any order, and a block that is moved, swapped, stale or another tenant's does not fit.
The root stands for all that KV depends on beside ids (`BlockHasher.root`). It finds mistakes; names that
nobody can forge are the SHA-256 of `batcher/block_hash.py`. `shard_worker/native/stamps.cpp` does the same.
"""

import sys
from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]
Ids = NDArray[np.uint32] | Sequence[int]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MUL_1 = np.uint64(0xBF58476D1CE4E5B9)
_MUL_2 = np.uint64(0x94D049BB133111EB)
_30, _27, _31, _32 = (np.uint64(n) for n in (30, 27, 31, 32))
_U32 = next(code for code in "IL" if array(code).itemsize == 4)

assert sys.byteorder == "little"  # as columns are


def words(token_ids: NDArray[np.uint32], positions: U64) -> U64:
    """One for each id; distinct (id, position) have distinct words."""
    x = (token_ids.astype(np.uint64) << _32) + positions + _GOLDEN
    x ^= x >> _30
    x *= _MUL_1
    x ^= x >> _27
    x *= _MUL_2
    x ^= x >> _31
    return x


def carried_on(digest: int, token_ids: Ids, first: int = 0) -> int:
    """The digest after `token_ids`, which stand at `first` and behind."""
    if not len(token_ids):
        return digest
    # of a list this is the quickest way into an array
    ids = np.frombuffer(array(_U32, token_ids), np.uint32) if isinstance(token_ids, list) else token_ids
    positions = np.arange(first, first + len(token_ids), dtype=np.uint64)
    total = int(words(np.asarray(ids, np.uint32), positions).sum(dtype=np.uint64))
    return (digest + total) & ((1 << 64) - 1)
