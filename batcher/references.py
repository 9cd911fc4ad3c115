"""Pure. How many tables name each held block, and how many of those kvstore knows of."""

from collections.abc import Iterable, Mapping, Sequence

from chassis.ids import BlockHash, BlockId


class References(dict[BlockId, int]):
    """By block. Tables that share a block among themselves are one to kvstore."""

    def __init__(self) -> None:
        super().__init__()
        self._shared: dict[BlockId, int] = {}  # beyond what kvstore knows of

    def share(self, table: Iterable[BlockId]) -> None:
        """One table more names these."""
        for block in table:
            self[block] += 1
            self._shared[block] = self._shared.get(block, 0) + 1

    def unshare(self, block: BlockId) -> bool:
        """One table less does. False: kvstore has to be told."""
        others = self._shared.get(block, 0)
        if not others:
            return False
        self[block] -= 1
        if others > 1:
            self._shared[block] = others - 1
        else:
            del self._shared[block]
        return True

    def told(self, block: BlockId) -> int:
        """What kvstore counts."""
        return self[block] - self._shared.get(block, 0)

    def clear(self) -> None:
        super().clear()
        self._shared.clear()

    def num_own(self, table: Sequence[BlockId]) -> int:
        """Blocks of it that nobody else holds."""
        return sum([self[block] == 1 for block in table])

    def fit(self, leased: Sequence[BlockId], num_blocks: int) -> bool:
        """A block that is held already cannot be leased again: one of the two ledgers is wrong."""
        return len(dict.fromkeys(leased)) == len(leased) and all(
            0 <= block < num_blocks and block not in self for block in leased
        )

    def check(self, num_blocks: int) -> None:
        assert all(0 <= block < num_blocks for block in self)
        assert all(self[block] > others > 0 for block, others in self._shared.items())


def proves(
    held: Mapping[BlockId, int],
    hashes: Mapping[BlockId, BlockHash],
    matched: Sequence[Sequence[BlockId]],
    chains: Sequence[Sequence[BlockHash]],
    num_blocks: int,
) -> bool:
    """What kvstore says holds these chains: a block that is held already has the content that we know of."""
    return len(matched) == len(chains) and all(
        len(blocks) <= len(chain)
        and all(
            0 <= block < num_blocks and (block not in held or hashes.get(block) == block_hash)
            for block, block_hash in zip(blocks, chain, strict=False)
        )
        for blocks, chain in zip(matched, chains, strict=True)
    )
