"""Pure. Leased blocks that no table names, without known content: the batcher's stock.

A block may come here while a row that still writes it is on its way (its sequence ended, or lost its place).
Whoever takes it next is in a later step, which a stage runs after that one: harmless. But kvstore may fill a
free block from elsewhere at any moment, so a block leaves for kvstore only when every step that was in flight
as it came here has come back. Content that is known is written by nobody, and does not pass here.
"""

from collections import deque
from collections.abc import Iterable, Iterator

from chassis.ids import BlockId


class IdleBlocks:
    """The longest idle goes first."""

    def __init__(self) -> None:
        self._blocks: deque[tuple[BlockId, int]] = deque()  # and the last step that may write it; 0: none
        self._sent = self._returned = 0  # steps of this epoch

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[BlockId]:
        return (block for block, _ in self._blocks)

    @property
    def next_step(self) -> int:
        return self._sent + 1

    def sent(self, step: int) -> None:
        self._sent = step

    def returned(self, step: int) -> None:
        self._returned = step

    def new_epoch(self) -> None:
        """Its workers formed after their last step was over: nothing writes any more."""
        self._sent = self._returned = 0
        self._blocks = deque((block, 0) for block in self)

    def clear(self) -> None:
        self._blocks.clear()

    def put(self, block: BlockId) -> None:
        """Of a table: rows in flight may write it."""
        self._blocks.append((block, self._sent))

    def put_leased(self, blocks: Iterable[BlockId]) -> None:
        self._blocks.extend((block, 0) for block in blocks)

    def take(self, count: int) -> list[BlockId]:
        """Up to `count`, for a table."""
        blocks = self._blocks
        return [blocks.popleft()[0] for _ in range(min(count, len(blocks)))]

    def give_back(self, count: int) -> list[BlockId]:
        """Up to `count` that nothing in flight may write: those before the first that it may."""
        blocks = self._blocks
        given: list[BlockId] = []
        while len(given) < count and blocks and blocks[0][1] <= self._returned:
            given.append(blocks.popleft()[0])
        return given

    def lacking(self, shortage: int, low: int, high: int) -> int:
        """How many to ask for: if there are fewer than `low` or a step lacked some, up to `high` beside."""
        return max(0, shortage + high - len(self)) if shortage > 0 or len(self) < low else 0

    def check(self) -> None:
        assert self._returned <= self._sent
        assert all(step <= self._sent for _, step in self._blocks)
