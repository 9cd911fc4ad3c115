"""Pure. Held blocks that do not hold what they were said to, as workers found: no content is claimed of them.

Whoever holds one until then holds it on: which of the blocks of a table is the wrong one is not known.
"""

from chassis.ids import BlockId


class Distrusted:
    def __init__(self) -> None:
        self._blocks: dict[BlockId, None] = {}
        self._untold: dict[BlockId, None] = {}  # kvstore still takes them for what they were said to hold

    def __len__(self) -> int:
        """That kvstore is to be told of."""
        return len(self._untold)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._blocks

    def add(self, block: BlockId) -> None:
        self._blocks[block] = self._untold[block] = None

    def take(self) -> tuple[BlockId, ...]:
        """For a call. An attach tells them by claiming nothing of them."""
        taken = tuple(self._untold)
        self._untold.clear()
        return taken

    def drop(self, block: BlockId) -> None:
        """It is held no more."""
        self._blocks.pop(block, None)
        self._untold.pop(block, None)

    def clear(self) -> None:
        self._blocks.clear()
        self._untold.clear()
