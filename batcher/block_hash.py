"""Pure. What a full block of a prompt is called: a SHA-256 that everything its KV depends on flows into.

Encoding: fields of (tag: 1 byte, length: u32 little-endian, bytes), in this order:
`N` namespace, `P` digest of the block before (32 zero bytes for the first), `T` token ids as u32
little-endian, then each extra that is given: `S` tenant's salt, `A` adapter, `M` media digest.
An extra that is absent leaves no field, so that it differs from an empty one.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from chassis.ids import BlockHash

NO_PARENT = BlockHash(bytes(32))


def _field(tag: bytes, data: bytes) -> bytes:
    return tag + struct.pack("<I", len(data)) + data


def namespace(model_digest: str, dtype: str, layout: str) -> bytes:
    """What all blocks of a pool share. The same encoding, with tags `m`, `d` and `l`."""
    return _field(b"m", model_digest.encode()) + _field(b"d", dtype.encode()) + _field(b"l", layout.encode())


@dataclass(frozen=True, slots=True)
class Extras:
    """What besides the tokens tells one block from another. None: absent."""

    salt: bytes | None = None
    adapter: bytes | None = None
    media: bytes | None = None


NO_EXTRAS = Extras()


class BlockHasher:
    """Hashes the blocks of one sequence, one after another."""

    __slots__ = ("_after", "_before", "_format", "block_size_tokens", "root")

    def __init__(self, namespace: bytes, block_size_tokens: int, extras: Extras = NO_EXTRAS) -> None:
        assert block_size_tokens > 0
        self.block_size_tokens = block_size_tokens
        self._format = f"<{block_size_tokens}I"
        self._before = _field(b"N", namespace) + b"P" + struct.pack("<I", 32)
        extra = ((b"S", extras.salt), (b"A", extras.adapter), (b"M", extras.media))
        self._after = b"".join(_field(tag, data) for tag, data in extra if data is not None)
        # of what is no token: where the digests begin by which workers know their blocks (`sequence_digest`)
        self.root = int.from_bytes(hashlib.sha256(self._before + self._after).digest()[:8], "little")

    def block(self, parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
        """The hash of one full block."""
        size = self.block_size_tokens
        assert len(token_ids) == size and len(parent) == 32
        tokens = b"T" + struct.pack("<I", 4 * size) + struct.pack(self._format, *token_ids)
        return BlockHash(hashlib.sha256(self._before + parent + tokens + self._after).digest())

    def extend(self, hashes: list[BlockHash], token_ids: Sequence[int], num_blocks: int) -> None:
        """Append to `hashes`, which hold those of the first blocks of `token_ids`, until `num_blocks`."""
        size = self.block_size_tokens
        assert num_blocks * size <= len(token_ids)
        parent = hashes[-1] if hashes else NO_PARENT
        for index in range(len(hashes), num_blocks):
            parent = self.block(parent, token_ids[index * size : (index + 1) * size])
            hashes.append(parent)

    def check(self) -> None:
        assert self.block_size_tokens > 0 and self._before[:1] == b"N"


def chain(
    namespace: bytes, token_ids: Sequence[int], block_size_tokens: int, extras: Extras = NO_EXTRAS
) -> tuple[BlockHash, ...]:
    """The hashes of all full blocks."""
    hashes: list[BlockHash] = []
    hasher = BlockHasher(namespace, block_size_tokens, extras)
    hasher.extend(hashes, token_ids, len(token_ids) // block_size_tokens)
    return tuple(hashes)
