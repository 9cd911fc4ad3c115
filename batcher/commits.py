"""Pure. Filled blocks that kvstore is not told of yet, or is being told of."""

from collections.abc import Callable, Collection, Iterator

from chassis.ids import BlockHash, BlockId

Commit = tuple[BlockId, BlockHash, BlockHash]  # the block, its hash, its parent's


class Commits:
    def __init__(self) -> None:
        self._waiting: list[Commit] = []
        self._waiting_hashes: set[BlockHash] = set()
        self._told: frozenset[BlockHash] = frozenset()  # by the last call

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Commit]:
        return iter(self._waiting)

    def add(self, commit: Commit) -> None:
        self._waiting.append(commit)
        self._waiting_hashes.add(commit[1])

    def take(self) -> tuple[Commit, ...]:
        """For a call."""
        taken = tuple(self._waiting)
        self._told = frozenset(self._waiting_hashes)
        self.clear()
        return taken

    def clear(self) -> None:
        """There are none, or an attach tells them."""
        self._waiting.clear()
        self._waiting_hashes.clear()

    def keep(self, holds: Callable[[BlockId], bool]) -> None:
        """Only of blocks that are held."""
        kept = [commit for commit in self._waiting if holds(commit[0])]
        self.clear()
        for commit in kept:
            self.add(commit)

    def wait(self, chain: Collection[BlockHash]) -> bool:
        """Some of the chain wait for a call."""
        return bool(self._waiting_hashes) and not self._waiting_hashes.isdisjoint(chain)

    def told(self, chain: Collection[BlockHash]) -> bool:
        """Some of the chain are in the last call."""
        return bool(self._told) and not self._told.isdisjoint(chain)
