"""Pure. The blocks of one pool, and what its batcher may do with them (`kvstore/ledger.py`).

Each call is done whole or refused with nothing changed (`RpcRejected`: INVALID_ARGUMENT names the field).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from chassis.errors import RpcRejected
from chassis.ids import BlockHash, BlockId
from chassis.messages.cache import Held, PoolTotals
from chassis.messages.kvstore import (
    KEEP_DEFAULT,
    KEEP_LEAST,
    NO_PARENT,
    Attach,
    Commit,
    Exchange,
    Exchanged,
)
from kvstore.block import BlockTable
from kvstore.changes import Changes
from kvstore.prefix import PrefixIndex

PIECE_BLOCKS = 4096  # of a pool, read at once


def bad(field: str, why: str) -> RpcRejected:
    return RpcRejected("INVALID_ARGUMENT", f"{field}: {why}")


@dataclass(slots=True)
class Tally:
    """Blocks since the start, and calls refused as ghosts."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    old_epochs: int = 0
    bad_blocks: int = 0  # that did not hold what they were said to


class Pool:
    """The blocks of one generation. Methods validate before they change anything."""

    __slots__ = (
        "_changes", "_own", "_tally", "as_of", "attach", "disowned", "doubtful", "index", "now", "ref",
        "table", "unused",
    )  # fmt: skip

    def __init__(
        self, attach: Attach, before: "Pool | None", tally: Tally, changes: Changes, now: float
    ) -> None:
        """Takes `attach` as the truth; content that nobody holds stays cached as `before` had it."""
        held = _inventory(attach)
        self.ref = attach.pool
        self.as_of = attach.pool  # content is as it was under this attach: a later one may not have been used
        self.attach = attach
        self.now = now  # of the call under way
        self._tally = tally
        self._changes = changes
        self._own: Counter[BlockId] = Counter()  # references of kvstore itself: contents that move
        self.doubtful = False  # a block may be written by a call whose end is not known: attach anew
        # for whoever moves contents: what nobody uses any more, what proved wrong; None: nobody does
        self.unused: list[BlockId] | None = None
        self.disowned: list[BlockHash] = []
        self.index = PrefixIndex(attach.num_blocks)
        known = before.index if before is not None and before._knows(attach) else None
        if before is not None and known is not None:
            self.as_of = before.as_of
            for block in before._unheld(held):
                content = known.content(block)
                assert content is not None
                self.index.cache(block, content, known, now)
        for block, content in attach.committed:
            self.index.commit(block, content, None)
            if known is not None:
                self.index.recall(known, content)
        self.table = BlockTable(attach.num_blocks, held, self.index.cached_blocks())
        self._tell(known)

    def _tell(self, known: PrefixIndex | None) -> None:
        """What an attach changed; all of it, where nothing was known before."""
        changes, index = self._changes, self.index
        if known is None:
            changes.cleared(self.attach)
        elif changes.wanted:
            for content, _ in known.hashes():
                if index.holder(content) is None:
                    changes.evicted(self.attach, content)
        else:
            changes.missed = True
        for _, content in self.attach.committed:
            changes.stored(self.attach, content, index.parent(content))

    def _knows(self, attach: Attach) -> bool:
        """Whether nobody wrote the memory elsewhere since."""
        seen = ((ref.epoch, ref.attachment) for ref in (self.ref, self.as_of))
        epoch, number = attach.prior_epoch, attach.prior_attachment
        return epoch > 0 and any(epoch == known[0] and number in (0, known[1]) for known in seen)

    def _unheld(self, held: "Counter[BlockId]") -> Sequence[BlockId]:
        """Known content outside `held`, the longest unused first: cached, then leased, tails before heads."""
        index = self.index
        cached = [b for b in index.cached_by_use() if b not in held]
        references = self.table.references
        leased = [b for _, b in index.hashes() if references[b] and b not in held]
        return cached + leased[::-1]

    def match(self, chains: Sequence[Sequence[BlockHash]]) -> tuple[tuple[BlockId, ...], ...]:
        references, index = self.table.references, self.index
        matched = []
        for chain in chains:
            found = index.find(chain)
            for block in found:
                if references[block] == 0:
                    index.revive(block)
                references[block] += 1
            if found:
                index.count_hit(chain[len(found) - 1])
            self._tally.hits += len(found)
            self._tally.misses += len(chain) - len(found)
            matched.append(tuple(found))
        return tuple(matched)

    def exchange(self, call: Exchange) -> Exchanged:
        """Bad blocks are forgotten, then commits, releases, leases."""
        for block in call.bad:
            if block >= len(self.table.references) or not self._leased(block):
                raise bad("bad_blocks", f"{block} is not leased")
        self._validate_commits(call.commits)
        self._validate_releases(call.releases)
        if call.keeps and len(call.keeps) != len(call.releases):
            raise bad("release_keeps", f"{len(call.keeps)} for {len(call.releases)} releases")
        if any(keep > KEEP_LEAST for keep in call.keeps):
            raise bad("release_keeps", f"above {KEEP_LEAST}")
        index = self.index
        self._disown(call.bad)
        for block, content, parent in call.commits:
            displaced = index.commit(block, content, parent)
            if displaced is not None:
                self.table.free.append(displaced)
            self._changes.stored(self.attach, content, parent)
        references = self.table.references
        keeps = call.keeps or (KEEP_DEFAULT,) * len(call.releases)
        for block, keep in zip(reversed(call.releases), reversed(keeps), strict=True):
            references[block] -= 1
            if references[block]:
                index.let_go(block, keep)
            elif not index.settle(block, keep, self.now):
                self.table.free.append(block)
            elif self.unused is not None:
                self.unused.append(block)
        return Exchanged(self._lease(call.lease_count), len(self.table.free), self.index.cached)

    def _disown(self, blocks: Sequence[BlockId]) -> None:
        for block in blocks:
            if self.unused is not None and (named := self.index.content(block)) is not None:
                self.disowned.append(named)
            content = self.index.disown(block)
            self._tally.bad_blocks += 1
            if content is not None:
                self._changes.evicted(self.attach, content)

    def _lease(self, count: int) -> tuple[BlockId, ...]:
        """As many as there are, up to `count`: free ones first, then the least recently used cached ones."""
        free, references = self.table.free, self.table.references
        leased = [free.pop() for _ in range(min(count, len(free)))]
        evicted = [self.index.evict() for _ in range(min(count - len(leased), self.index.cached))]
        self._tally.evictions += len(evicted)
        for block, content in evicted:
            self._changes.evicted(self.attach, content)
            leased.append(block)
        for block in leased:
            assert references[block] == 0
            references[block] = 1
        return tuple(leased)

    # ---- contents that move between tiers: references of our own, which no batcher knows of

    def hold(self, blocks: Sequence[BlockId]) -> None:
        """They keep what they hold until they are let go."""
        references = self.table.references
        for block in blocks:
            assert self.index.content(block) is not None
            if references[block] == 0:
                self.index.revive(block)
            references[block] += 1
            self._own[block] += 1

    def take(self, count: int) -> tuple[BlockId, ...]:
        """As a lease to ourselves, to be filled."""
        taken = self._lease(count)
        self._own.update(taken)
        return taken

    def fill(self, block: BlockId, content: BlockHash, parent: BlockHash | None) -> None:
        """What a block of `take` holds from now on."""
        assert self._own[block]
        displaced = self.index.commit(block, content, parent)
        self.index.let_go(block, KEEP_DEFAULT)
        if displaced is not None:
            self.table.free.append(displaced)
        self._changes.stored(self.attach, content, parent)

    def let_go(self, blocks: Sequence[BlockId], now: float) -> None:
        """Head of a chain first. How long each is to stay does not change."""
        references = self.table.references
        for block in reversed(blocks):
            assert self._own[block]
            self._own[block] -= 1
            if not self._own[block]:
                del self._own[block]
            references[block] -= 1
            if not references[block] and not self.index.settle(block, KEEP_LEAST, now):
                self.table.free.append(block)

    @property
    def num_own(self) -> int:
        """References of our own."""
        return self._own.total()

    def _leased(self, block: BlockId) -> int:
        """References of the batcher."""
        return self.table.references[block] - self._own.get(block, 0)

    def _validate_commits(self, commits: Sequence[Commit]) -> None:
        references = self.table.references
        said: dict[BlockId, BlockHash] = {}
        for block, content, _ in commits:
            if block >= len(references):
                raise bad("commit_blocks", f"{block} is not below {len(references)}")
            if not self._leased(block):
                raise bad("commit_blocks", f"{block} is not leased")
            if content == NO_PARENT:
                raise bad("commit_hashes", f"block {block}: zeros name no content")
            known = self.index.content(block) or said.setdefault(block, content)
            if known != content:
                raise bad("commit_hashes", f"block {block} holds other content")

    def _validate_releases(self, releases: Sequence[BlockId]) -> None:
        references = self.table.references
        distinct = set(releases)
        for block in releases:
            if block >= len(references):
                raise bad("release_blocks", f"{block} is not below {len(references)}")
            if not self._leased(block):
                raise bad("release_blocks", f"{block} is not leased")
        if len(distinct) < len(releases):
            for block, count in Counter(releases).items():
                if count > self._leased(block):
                    raise bad("release_blocks", f"{block} has {self._leased(block)} references, not {count}")

    def totals(self) -> PoolTotals:
        attach, free, cached = self.attach, len(self.table.free), self.index.cached
        leased = attach.num_blocks - free - cached
        return PoolTotals(
            self.ref, attach.namespace, attach.block_size_tokens, attach.num_blocks, free, leased, cached
        )

    def piece(self, first_block: int, now: float) -> tuple[Held, ...]:
        """What the blocks from `first_block` on hold, `PIECE_BLOCKS` of them."""
        index, references, held = self.index, self.table.references, []
        for number in range(first_block, min(first_block + PIECE_BLOCKS, self.attach.num_blocks)):
            content = index.content(block := BlockId(number))
            if content is not None:
                since = index.unused_since(block)
                unused_ms = None if since is None else max(0, round(1000 * (now - since)))
                held.append(
                    Held(
                        content, index.parent(content), references[block], index.hits(content),
                        index.keep_of(block), unused_ms,
                    )
                )  # fmt: skip
        return tuple(held)

    def check(self) -> None:
        """Asserts conservation: free + leased + cached = total, and a consistent index."""
        leased = self.table.check(self.index.cached_blocks())
        assert len(self.table.free) + leased + self.index.cached == self.attach.num_blocks
        assert all(0 < count <= self.table.references[block] for block, count in self._own.items())
        self.index.check(self.table.references)


def _inventory(attach: Attach) -> "Counter[BlockId]":
    """References per block of a validated attach."""
    if attach.num_blocks < 1:
        raise bad("num_blocks", "must be at least 1")
    held = Counter(attach.held)
    for block in held:
        if block >= attach.num_blocks:
            raise bad("held", f"{block} is not below {attach.num_blocks}")
    said: dict[BlockId, BlockHash] = {}
    for block, content in attach.committed:
        if block not in held:
            raise bad("committed", f"{block} is not held")
        if content == NO_PARENT:
            raise bad("committed_hashes", f"block {block}: zeros name no content")
        if said.setdefault(block, content) != content:
            raise bad("committed_hashes", f"block {block} holds two contents")
    return held
