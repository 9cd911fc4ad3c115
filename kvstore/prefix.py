"""Pure. Which block holds which content, and which unreferenced content goes first.

Content is named by a hash that names its whole prefix (a chain), so a walk from the head finds the
longest cached prefix, and what lies behind a gap is not found until the gap is filled again.

Rules: one block *holds* a hash; further leased blocks with the same content are its twins. A cached block
(no references) has no twin: the twin takes the hash over and the old block is free. So whoever leases a
chain keeps every hash of it leased. Chains are released tail first, so in order of last use (LRU) a tail
is older than its head and is evicted before it.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from chassis.ids import BlockHash, BlockId

NO_PARENT = BlockHash(bytes(32))


class PrefixIndex:
    __slots__ = ("_content", "_holder", "_lru", "_parent", "_twins")

    def __init__(self) -> None:
        self._holder: dict[BlockHash, BlockId] = {}
        self._content: dict[BlockId, BlockHash] = {}  # of holders and twins
        self._parent: dict[BlockHash, BlockHash] = {}  # of held hashes, where it was told
        self._twins: dict[BlockHash, dict[BlockId, None]] = {}
        self._lru: OrderedDict[BlockId, None] = OrderedDict()  # cached blocks, next to be evicted first

    def __len__(self) -> int:
        return len(self._holder)

    @property
    def cached(self) -> int:
        return len(self._lru)

    def cached_blocks(self) -> Sequence[BlockId]:
        """Next to be evicted first."""
        return tuple(self._lru)

    def hashes(self) -> Iterable[tuple[BlockHash, BlockId]]:
        """Every held hash and its holder, in the order in which the hashes came."""
        return self._holder.items()

    def content(self, block: BlockId) -> BlockHash | None:
        return self._content.get(block)

    def parent(self, content: BlockHash) -> BlockHash | None:
        return self._parent.get(content)

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
        holder = self._holder.get(content)
        if holder is None:
            self._holder[content] = block
            if parent is not None:
                self._parent[content] = parent
            return None
        if holder in self._lru:
            del self._lru[holder]
            del self._content[holder]
            self._holder[content] = block
            return holder
        self._twins.setdefault(content, {})[block] = None
        return None

    def revive(self, block: BlockId) -> None:
        """A holder got its first reference back."""
        del self._lru[block]

    def settle(self, block: BlockId) -> bool:
        """A block lost its last reference. True: it is cached; False: it is free and forgotten."""
        content = self._content.get(block)
        if content is None:
            return False
        twins = self._twins.get(content)
        holds = self._holder[content] == block
        if holds and twins is None:
            self._lru[block] = None
            return True
        assert twins is not None, "neither holder nor twin"
        leaves = block
        if holds:
            leaves = self._holder[content] = next(iter(twins))
        del twins[leaves]
        if not twins:
            del self._twins[content]
        del self._content[block]
        return False

    def keep(self, block: BlockId, content: BlockHash, parent: BlockHash | None) -> None:
        """Puts a cached block into an index that is being made; the order of calls is that of eviction."""
        assert content not in self._holder and block not in self._content
        self._holder[content] = block
        self._content[block] = content
        if parent is not None:
            self._parent[content] = parent
        self._lru[block] = None

    def evict(self) -> BlockId:
        """Forgets the least recently used cached block, which is the caller's now."""
        block, _ = self._lru.popitem(last=False)
        content = self._content.pop(block)
        del self._holder[content]
        self._parent.pop(content, None)
        return block

    def check(self, references: Sequence[int]) -> None:
        """Asserts that the maps agree with each other and with the reference counts."""
        for content, block in self._holder.items():
            assert self._content[block] == content, "a holder does not know its content"
            assert (references[block] == 0) == (block in self._lru), "cached and referenced disagree"
        named = len(self._holder)
        for content, twins in self._twins.items():
            assert twins and self._holder[content] not in twins
            assert self._holder[content] not in self._lru, "a cached block has a twin"
            assert all(self._content[b] == content and references[b] for b in twins)
            named += len(twins)
        assert named == len(self._content), "a block holds content that nobody finds"
        assert self._parent.keys() <= self._holder.keys()
        assert all(self._holder[self._content[b]] == b for b in self._lru)
