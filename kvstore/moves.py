"""Pure. What moves between one pool and the tiers, while the pool stands under one attach.

Saved is what nobody uses any more, the longest unused first, so that the order of eviction stays what it
was; a bounded number waits, and the oldest of them gives way. Restored is what a prompt begins with and the
pool lacks, if that is long enough to be worth it. Blocks that move have a reference of kvstore's own. With
the next attach all of it is void: the workers refuse what was under way, from that attach's number on.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from chassis.ids import BlockHash, BlockId
from chassis.messages.kvstore import NO_PARENT
from kvstore.catalog import Origin
from kvstore.pool import Pool

CALL_BLOCKS = 16  # moved by one call
BACKLOG_MAX = 1 << 14
ROOM_SHARE = 8  # of the pool: one part is left to those who run

Whole = Callable[[BlockHash], bool]  # whether the tiers hold it in the layouts and layers of all stages


@dataclass(frozen=True, slots=True)
class Move:
    """Contents and their blocks, in the order of a chain."""

    blocks: tuple[BlockId, ...]
    contents: tuple[BlockHash, ...]
    origins: tuple[Origin, ...]

    def only(self, places: Sequence[int]) -> "Move":
        return Move(
            tuple(self.blocks[i] for i in places),
            tuple(self.contents[i] for i in places),
            tuple(self.origins[i] for i in places),
        )


@dataclass(slots=True)
class Restore:
    """`held`: all blocks of the chain's beginning, those to be filled too."""

    held: tuple[BlockId, ...]
    moves: tuple[Move, ...]
    left: int = field(init=False)  # moves that have not ended

    def __post_init__(self) -> None:
        self.left = len(self.moves)


class Moves:
    def __init__(self, pool: Pool, restore_min_blocks: int) -> None:
        assert restore_min_blocks > 0
        self.pool = pool
        self.void = False
        self.dropped = 0  # from the backlog
        self._restore_min = restore_min_blocks
        self._backlog: dict[BlockHash, None] = {}
        self._loading: dict[BlockHash, Restore] = {}
        pool.unused = []
        for block in pool.index.cached_by_use():
            self._want(block)

    # ---- from the pool to the tiers

    def learn(self) -> tuple[BlockHash, ...]:
        """What a call left unused waits to be saved. Returns contents that proved wrong."""
        pool = self.pool
        unused = pool.unused
        if unused:
            for block in unused:
                self._want(block)
            unused.clear()
        if not pool.disowned:
            return ()
        wrong = tuple(pool.disowned)
        pool.disowned.clear()
        for content in wrong:
            self._backlog.pop(content, None)
        return wrong

    def _want(self, block: BlockId) -> None:
        content = self.pool.index.content(block)
        if content is not None:
            self._backlog.pop(content, None)
            self._backlog[content] = None
            if len(self._backlog) > BACKLOG_MAX:
                del self._backlog[next(iter(self._backlog))]
                self.dropped += 1

    @property
    def backlog(self) -> int:
        return len(self._backlog)

    def next_save(self, whole: Whole) -> Move | None:
        """What to save now, held until `saved`."""
        index = self.pool.index
        found: list[tuple[BlockId, BlockHash]] = []
        while self._backlog and len(found) < CALL_BLOCKS:
            content = next(iter(self._backlog))
            del self._backlog[content]
            block = index.holder(content)
            if block is not None and not whole(content):
                found.append((block, content))
        if not found:
            return None
        blocks = tuple(block for block, _ in found)
        self.pool.hold(blocks)
        size = self.pool.attach.block_size_tokens
        origins = tuple(Origin(index.parent(content), size) for _, content in found)
        return Move(blocks, tuple(content for _, content in found), origins)

    def saved(self, move: Move, now: float) -> tuple[int, ...]:
        """Which of them were what they are called to the end."""
        if self.void:
            return ()
        content = self.pool.index.content
        good = [i for i, block in enumerate(move.blocks) if content(block) == move.contents[i]]
        self.pool.let_go(move.blocks[::-1], now)  # tails came first
        return tuple(good)

    # ---- and back

    def restore(self, chain: Sequence[BlockHash], whole: Whole) -> Restore | None:
        """The rest of what the tiers hold of a chain's beginning; None: nothing, too little, or no room."""
        pool, index = self.pool, self.pool.index
        known: list[BlockId | None] = list(index.find(chain))
        if len(known) == len(chain) or chain[len(known)] in self._loading:
            return None
        begin = len(known)
        for content in chain[begin:]:
            block = index.holder(content)
            if block is None and (content in self._loading or not whole(content)):
                break
            known.append(block)
        if len(known) - begin < self._restore_min:
            return None
        present = tuple(block for block in known if block is not None)
        pool.hold(present)
        room = len(pool.table.free) + index.cached - pool.attach.num_blocks // ROOM_SHARE
        known = _cut(known, room)
        if len(known) - begin < self._restore_min:
            pool.let_go(present, pool.now)
            return None
        kept = {block for block in known if block is not None}
        pool.let_go(tuple(block for block in present if block not in kept), pool.now)
        return self._take(chain, known)

    def _take(self, chain: Sequence[BlockHash], known: Sequence[BlockId | None]) -> Restore:
        pool, size = self.pool, self.pool.attach.block_size_tokens
        places = [i for i, block in enumerate(known) if block is None]
        taken = dict(zip(places, pool.take(len(places)), strict=True))
        moves = []
        for at in range(0, len(places), CALL_BLOCKS):
            some = places[at : at + CALL_BLOCKS]
            origins = tuple(Origin(chain[i - 1] if i else NO_PARENT, size) for i in some)
            moves.append(Move(tuple(taken[i] for i in some), tuple(chain[i] for i in some), origins))
        held = tuple(taken[i] if block is None else block for i, block in enumerate(known))
        restore = Restore(held, tuple(moves))
        for i in places:
            self._loading[chain[i]] = restore
        return restore

    def under_way(self, chain: Sequence[BlockHash]) -> Restore | None:
        """What brings the first content of a chain that the pool lacks."""
        found = len(self.pool.index.find(chain))
        return self._loading.get(chain[found]) if found < len(chain) else None

    def restored(self, restore: Restore, move: Move, good: Iterable[int], now: float) -> None:
        """One of its moves ended: these contents are in their blocks on all stages, the others are not."""
        restore.left -= 1
        for content in move.contents:
            self._loading.pop(content, None)
        if self.void:
            return
        for i in good:
            self.pool.fill(move.blocks[i], move.contents[i], move.origins[i].parent)
        if not restore.left:
            self.pool.let_go(restore.held, now)

    def doubt(self, restore: Restore, move: Move) -> None:
        """Nobody knows whether these blocks will still be written: the pool has to be attached anew."""
        restore.left -= 1
        for content in move.contents:
            self._loading.pop(content, None)
        self.pool.doubtful = True

    def check(self) -> None:
        assert len(self._backlog) <= BACKLOG_MAX
        assert all(restore.left > 0 for restore in self._loading.values())


def _cut(known: list[BlockId | None], room: int) -> list[BlockId | None]:
    """Only so far that no more than `room` blocks are to be filled."""
    for i, block in enumerate(known):
        if block is None:
            room -= 1
            if room < 0:
                return known[:i]
    return known
