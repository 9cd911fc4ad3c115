"""Pure. In which order cached blocks are given up: least recently used first, by how long each shall stay.

`keep` 0 is a pin: it goes when nothing else is left, so it can't block anybody. 1 to 10 are a request's
priority and 1: one below the default counts as let go of later than it was, by as many releases as the pool
has blocks; one above by as many earlier. So batch work does not push out conversations, and nothing stays for
ever because of its priority.
A block's `keep` is the best of all who ever released its content, hence a head's is never worse than its
tail's: as a head is also released after its tail, it outlives it, whoever shares it.
"""

from collections import OrderedDict
from collections.abc import Iterator
from heapq import merge

from chassis.ids import BlockId
from chassis.messages.kvstore import KEEP_DEFAULT, KEEP_LEAST, KEEP_PINNED


class EvictionOrder:
    __slots__ = ("_credit", "_filled", "_keep", "_len", "_queues", "_stamp")

    def __init__(self, num_blocks: int) -> None:
        self._keep = bytearray([KEEP_LEAST]) * num_blocks
        self._credit = [num_blocks * (KEEP_DEFAULT - keep) for keep in range(KEEP_LEAST + 1)]
        self._queues: list[OrderedDict[BlockId, tuple[int, float]]] = [
            OrderedDict() for _ in range(KEEP_LEAST + 1)
        ]
        self._filled: list[int] = []  # queues with blocks, but for the pins'
        self._stamp = 0
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __contains__(self, block: BlockId) -> bool:
        return block in self._queues[self._keep[block]]

    def __iter__(self) -> Iterator[BlockId]:
        """Next to go first."""
        queues = [
            [(stamp + self._credit[keep], -keep, block) for block, (stamp, _) in queue.items()]
            for keep, queue in enumerate(self._queues)
        ]
        yield from (block for _, _, block in merge(*queues[KEEP_PINNED + 1 :]))
        yield from self._queues[KEEP_PINNED]

    def by_use(self) -> Iterator[BlockId]:
        """The longest unused first, however long they are to stay."""
        queues = [[(stamp, block) for block, (stamp, _) in queue.items()] for queue in self._queues]
        return (block for _, block in merge(*queues))

    def keep_of(self, block: BlockId) -> int:
        return self._keep[block]

    def forget(self, block: BlockId) -> None:
        """It holds something new, which nobody released yet."""
        self._keep[block] = KEEP_LEAST

    def want(self, block: BlockId, keep: int) -> None:
        """Of a block in use: whoever let go of it wants it kept so long."""
        if keep < self._keep[block]:
            self._keep[block] = keep

    def add(self, block: BlockId, now: float) -> None:
        """Nobody uses it any more: the last to go among its like."""
        self._stamp += 1
        keep = self._keep[block]
        queue = self._queues[keep]
        if not queue and keep != KEEP_PINNED:
            self._filled.append(keep)
        queue[block] = (self._stamp, now)
        self._len += 1

    def remove(self, block: BlockId) -> None:
        """It is in use again, or holds nothing."""
        keep = self._keep[block]
        del self._queues[keep][block]
        self._emptied(keep)

    def pop(self) -> BlockId:
        """The next to go."""
        filled = self._filled
        if len(filled) > 1:
            keep = min(filled, key=self._next_of)
        else:
            keep = filled[0] if filled else KEEP_PINNED
        block, _ = self._queues[keep].popitem(last=False)
        self._emptied(keep)
        return block

    def _next_of(self, keep: int) -> tuple[int, int]:
        stamp, _ = next(iter(self._queues[keep].values()))
        return stamp + self._credit[keep], -keep

    def _emptied(self, keep: int) -> None:
        """A block less in its queue."""
        self._len -= 1
        if not self._queues[keep] and keep != KEEP_PINNED:
            self._filled.remove(keep)

    def since(self, block: BlockId) -> float | None:
        """When its last user let go of it; None while it is in use."""
        entry = self._queues[self._keep[block]].get(block)
        return None if entry is None else entry[1]

    def check(self) -> None:
        assert self._len == sum(map(len, self._queues))
        filled = [keep for keep, queue in enumerate(self._queues) if queue and keep != KEEP_PINNED]
        assert sorted(self._filled) == filled
        for keep, queue in enumerate(self._queues):
            assert all(self._keep[block] == keep for block in queue), "kept otherwise than it lies"
