"""Pure. Which block holds which content, and which unreferenced content goes first.

Content is named by a hash that names its whole prefix (a chain), so a walk from the head finds the
longest cached prefix, and what lies behind a gap is not found until the gap is filled again.

Rules: one block *holds* a hash; further leased blocks with the same content are its twins. A cached block
(no references) has no twin: the twin takes the hash over and the old block is free. So whoever leases a
chain keeps every hash of it leased. Chains are released tail first, so a tail is unused for longer than
its head and is evicted before it (`kvstore/eviction.py`).
"""

from collections.abc import Iterable, Sequence

from chassis.ids import BlockHash, BlockId
from chassis.messages.kvstore import KEEP_DEFAULT
from kvstore.eviction import EvictionOrder


class PrefixIndex:
    __slots__ = ("_content", "_hits", "_holder", "_order", "_parent", "_twins")

    def __init__(self, num_blocks: int) -> None:
        self._holder: dict[BlockHash, BlockId] = {}
        self._content: dict[BlockId, BlockHash] = {}  # of holders and twins
        self._parent: dict[BlockHash, BlockHash] = {}  # of held hashes, where it was told
        self._twins: dict[BlockHash, dict[BlockId, None]] = {}
        self._hits: dict[BlockHash, int] = {}  # matches that ended at this content
        self._order = EvictionOrder(num_blocks)  # cached blocks

    def __len__(self) -> int:
        return len(self._holder)

    @property
    def cached(self) -> int:
        return len(self._order)

    def cached_blocks(self) -> Sequence[BlockId]:
        """Next to be evicted first."""
        return tuple(self._order)

    def cached_by_use(self) -> Sequence[BlockId]:
        """The longest unused first."""
        return tuple(self._order.by_use())

    def hashes(self) -> Iterable[tuple[BlockHash, BlockId]]:
        """Every held hash and its holder, in the order in which the hashes came."""
        return self._holder.items()

    def content(self, block: BlockId) -> BlockHash | None:
        return self._content.get(block)

    def parent(self, content: BlockHash) -> BlockHash | None:
        return self._parent.get(content)

    def holder(self, content: BlockHash) -> BlockId | None:
        return self._holder.get(content)

    def hits(self, content: BlockHash) -> int:
        """Matches that ended here, or behind it at content that has been evicted since."""
        return self._hits.get(content, 0)

    def keep_of(self, block: BlockId) -> int:
        return self._order.keep_of(block)

    def unused_since(self, block: BlockId) -> float | None:
        """None: it is in use, or holds nothing."""
        return self._order.since(block)

    def count_hit(self, content: BlockHash, count: int = 1) -> None:
        self._hits[content] = self._hits.get(content, 0) + count

    def find(self, chain: Iterable[BlockHash]) -> list[BlockId]:
        """Holders of the longest held prefix of a chain."""
        holder = self._holder
        found = []
        for content in chain:
            block = holder.get(content)
            if block is None:
                break
            found.append(block)
        return found

    def commit(self, block: BlockId, content: BlockHash, parent: BlockHash | None) -> BlockId | None:
        """Says what a leased block holds; a cached block with the same content is returned, free now."""
        known = self._content.get(block)
        if known is not None:
            assert known == content, "a committed block changed its content"
            return None
        self._content[block] = content
        self._order.forget(block)
        if parent is not None:
            self._parent.setdefault(content, parent)
        holder = self._holder.get(content)
        if holder is None:
            self._holder[content] = block
            return None
        if holder in self._order:
            self._order.remove(holder)
            self._order.want(block, self._order.keep_of(holder))
            del self._content[holder]
            self._holder[content] = block
            return holder
        self._twins.setdefault(content, {})[block] = None
        return None

    def revive(self, block: BlockId) -> None:
        """A holder got its first reference back."""
        self._order.remove(block)

    def let_go(self, block: BlockId, keep: int) -> None:
        """A reference ends, of whoever wants the content kept so long."""
        self._order.want(block, keep)

    def settle(self, block: BlockId, keep: int, now: float) -> bool:
        """Its last reference ends, as in `let_go`. True: it is cached; False: it is free and forgotten."""
        content = self._content.get(block)
        if content is None:
            return False
        self._order.want(block, keep)
        twins = self._twins.get(content)
        holds = self._holder[content] == block
        if holds and twins is None:
            self._order.add(block, now)
            return True
        assert twins is not None, "neither holder nor twin"
        stays = self._holder[content] = next(iter(twins)) if holds else self._holder[content]
        self._order.want(stays, self._order.keep_of(block))
        del twins[stays if holds else block]
        if not twins:
            del self._twins[content]
        del self._content[block]
        return False

    def disown(self, block: BlockId) -> BlockHash | None:
        """A leased block does not hold what was said. Returns the content that nobody holds any more."""
        content = self._content.pop(block, None)
        if content is None:
            return None
        self._order.forget(block)
        twins = self._twins.get(content)
        if twins is None:
            del self._holder[content]
            self._parent.pop(content, None)
            self._hits.pop(content, None)
            return content
        if self._holder[content] == block:
            self._holder[content] = next(iter(twins))
            block = self._holder[content]
        del twins[block]
        if not twins:
            del self._twins[content]
        return None

    def recall(self, before: "PrefixIndex", content: BlockHash) -> None:
        """What an older index knew of content that this one holds."""
        block, then = self._holder[content], before.holder(content)
        if then is None:
            return
        self._order.want(block, before.keep_of(then))
        if (parent := before.parent(content)) is not None:
            self._parent.setdefault(content, parent)
        if hits := before.hits(content):
            self._hits[content] = hits

    def cache(self, block: BlockId, content: BlockHash, before: "PrefixIndex", now: float) -> None:
        """Puts a block that nobody holds into an index that is being made: the longest unused first."""
        assert content not in self._holder and block not in self._content
        self._holder[content] = block
        self._content[block] = content
        self.recall(before, content)
        since = before.unused_since(block)
        if since is None:  # whoever used it is gone, and did not say
            self._order.want(block, KEEP_DEFAULT)
        self._order.add(block, now if since is None else since)

    def evict(self) -> tuple[BlockId, BlockHash]:
        """Forgets what a cached block holds, the next in order; the block is the caller's now."""
        block = self._order.pop()
        content = self._content.pop(block)
        del self._holder[content]
        parent = self._parent.pop(content, None)
        hits = self._hits.pop(content, 0)
        if hits and parent in self._holder:
            self.count_hit(parent, hits)
        return block, content

    def check(self, references: Sequence[int]) -> None:
        """Asserts that the maps agree with each other and with the reference counts."""
        for content, block in self._holder.items():
            assert self._content[block] == content, "a holder does not know its content"
            assert (references[block] == 0) == (block in self._order), "cached and referenced disagree"
        named = len(self._holder)
        for content, twins in self._twins.items():
            assert twins and self._holder[content] not in twins
            assert self._holder[content] not in self._order, "a cached block has a twin"
            assert all(self._content[b] == content and references[b] for b in twins)
            named += len(twins)
        assert named == len(self._content), "a block holds content that nobody finds"
        assert self._parent.keys() <= self._holder.keys() and self._hits.keys() <= self._holder.keys()
        assert all(self._holder[self._content[b]] == b for b in self._order)
        self._order.check()
