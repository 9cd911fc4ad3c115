"""Pure. The ledger: pools of blocks by generation, and what their batchers may do with them.

Rules: the caller's inventory is the truth when it attaches; each call is done whole or refused with
nothing changed (`RpcRejected`: INVALID_ARGUMENT names the field, FAILED_PRECONDITION means attach anew).
Late calls are ghosts: an attach must be newer, by (epoch, attachment), than every one before it that named
the pool or one of its workers' KV memories; other calls must name exactly the last attach. A KV memory
(stamp) serves one pool: the pools that shared it are dropped when another one attaches. Content that nobody
holds is kept only if the attach under which the memory was last written is the one it was known under here.
`changes` notes what came and went, for whoever listens.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from chassis.errors import RpcRejected
from chassis.ids import BlockHash, BlockId, Epoch
from chassis.messages.cache import Held, PoolTotals
from chassis.messages.kvstore import (
    KEEP_DEFAULT,
    KEEP_LEAST,
    NO_PARENT,
    Attach,
    Attached,
    Commit,
    Exchange,
    Exchanged,
    PoolRef,
    Stats,
)
from kvstore.block import BlockTable
from kvstore.changes import Changes
from kvstore.prefix import PrefixIndex

FENCES_MAX = 4096
STAMPS_MAX = 1024
PIECE_BLOCKS = 4096  # of a pool, read at once


def bad(field: str, why: str) -> RpcRejected:
    return RpcRejected("INVALID_ARGUMENT", f"{field}: {why}")


def stale(why: str) -> RpcRejected:
    return RpcRejected("FAILED_PRECONDITION", why)


@dataclass(slots=True)
class Tally:
    """Blocks since the start, and calls refused as ghosts."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    old_epochs: int = 0


class Pool:
    """The blocks of one generation. Methods validate before they change anything."""

    __slots__ = ("_changes", "_tally", "as_of", "attach", "index", "now", "ref", "table")

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
        """Commits, releases, leases, in this order."""
        self._validate_commits(call.commits)
        self._validate_releases(call.releases)
        if call.keeps and len(call.keeps) != len(call.releases):
            raise bad("release_keeps", f"{len(call.keeps)} for {len(call.releases)} releases")
        if any(keep > KEEP_LEAST for keep in call.keeps):
            raise bad("release_keeps", f"above {KEEP_LEAST}")
        index = self.index
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
        return Exchanged(self._lease(call.lease_count), len(self.table.free), self.index.cached)

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

    def _validate_commits(self, commits: Sequence[Commit]) -> None:
        references = self.table.references
        said: dict[BlockId, BlockHash] = {}
        for block, content, _ in commits:
            if block >= len(references):
                raise bad("commit_blocks", f"{block} is not below {len(references)}")
            if not references[block]:
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
            if not references[block]:
                raise bad("release_blocks", f"{block} is not leased")
        if len(distinct) < len(releases):
            for block, count in Counter(releases).items():
                if count > references[block]:
                    raise bad("release_blocks", f"{block} has {references[block]} references, not {count}")

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


class Ledger:
    def __init__(self, pools_max: int = 16, blocks_max: int = 1 << 20) -> None:
        """Above `pools_max` the least recently used pool is dropped; its batcher would attach anew."""
        assert pools_max > 0
        self.pools_max = pools_max
        self.blocks_max = blocks_max
        self.tally = Tally()
        self.changes = Changes()
        self.pools: OrderedDict[str, Pool] = OrderedDict()  # least recently used first
        self._fences: OrderedDict[str, tuple[Epoch, int]] = OrderedDict()  # by generation and by stamp

    def attach(self, call: Attach, now: float = 0.0) -> Attached:
        """Raises RpcRejected; see the rules above. Costs time in the size of the pool."""
        self._validate_attach(call)
        stamps = frozenset(call.worker_stamps)
        rivals = [p for p in self.pools.values() if not stamps.isdisjoint(p.attach.worker_stamps)]
        before = self.pools.get(call.pool.generation)
        self._refuse_ghost(call, rivals if before is None else [*rivals, before])
        if before is not None and not _same_blocks(before.attach, call):
            before = None
        pool = Pool(call, before, self.tally, self.changes, now)
        self.pools.pop(call.pool.generation, None)
        for rival in rivals:
            if rival.ref.generation in self.pools:
                self._drop(rival.ref.generation)
        self.pools[call.pool.generation] = pool
        self.pools.move_to_end(call.pool.generation)
        while len(self.pools) > self.pools_max:
            self._drop(next(iter(self.pools)))
        self._fence(call)
        return Attached(len(pool.table.free), pool.index.cached)

    def _drop(self, generation: str) -> None:
        dropped = self.pools.pop(generation)
        self.changes.cleared(dropped.attach, gone=True)

    def match(self, ref: PoolRef, chains: Sequence[Sequence[BlockHash]]) -> tuple[tuple[BlockId, ...], ...]:
        """Leases the longest cached prefix of each chain, in order: a later one sees an earlier one's effect.

        Returns one tuple of block ids per chain. Raises RpcRejected.
        """
        return self._pool(ref).match(chains)

    def exchange(self, call: Exchange, now: float = 0.0) -> Exchanged:
        """Commits filled blocks, releases, and leases up to `lease_count`. Raises RpcRejected."""
        pool = self._pool(call.pool)
        pool.now = now
        return pool.exchange(call)

    def holdings(
        self, generation: str, first_block: int, now: float
    ) -> tuple[tuple[PoolTotals, ...], tuple[Held, ...], int | None]:
        """All pools, and of one (empty: of none) what a piece holds, and where the next begins.

        Costs time in the piece and the number of pools. A pool that is gone holds nothing.
        """
        totals = tuple(pool.totals() for pool in self.pools.values())
        pool = self.pools.get(generation)
        if pool is None:
            return totals, (), None
        following = first_block + PIECE_BLOCKS
        return (
            totals,
            pool.piece(first_block, now),
            following if following < pool.attach.num_blocks else None,
        )

    def stats(self, generation: str = "") -> Stats:
        """Of one pool, or of all together; the tallies are of all. Raises RpcRejected NOT_FOUND."""
        if generation and generation not in self.pools:
            raise RpcRejected("NOT_FOUND", f"generation: no pool {generation!r}")
        pools = [self.pools[generation]] if generation else list(self.pools.values())
        total = sum(p.attach.num_blocks for p in pools)
        free = sum(len(p.table.free) for p in pools)
        cached = sum(p.index.cached for p in pools)
        return Stats(
            total=total,
            free=free,
            leased=total - free - cached,
            cached=cached,
            hits=self.tally.hits,
            misses=self.tally.misses,
            evictions=self.tally.evictions,
            generations=tuple(self.pools),
            old_epochs=self.tally.old_epochs,
        )

    def check(self) -> None:
        assert len(self.pools) <= self.pools_max and len(self._fences) <= FENCES_MAX
        for generation, pool in self.pools.items():
            assert pool.ref.generation == generation
            pool.check()

    def _refuse_ghost(self, call: Attach, rivals: Sequence[Pool]) -> None:
        """The fences also remember pools that are gone; they are bounded, so present pools are asked too."""
        number = (call.pool.epoch, call.pool.attachment)
        seen = [(p.ref.epoch, p.ref.attachment) for p in rivals]
        names = (call.pool.generation, *call.worker_stamps)
        seen += [self._fences[name] for name in names if name in self._fences]
        if seen and max(seen) >= number:
            self.tally.old_epochs += 1
            raise stale(f"old epoch {number[0]}, attachment {number[1]}: {max(seen)} was attached")

    def _fence(self, call: Attach) -> None:
        for name in (call.pool.generation, *call.worker_stamps):
            self._fences[name] = (call.pool.epoch, call.pool.attachment)
            self._fences.move_to_end(name)
        while len(self._fences) > FENCES_MAX:
            self._fences.popitem(last=False)

    def _pool(self, ref: PoolRef) -> Pool:
        pool = self.pools.get(ref.generation)
        if pool is None:
            raise stale(f"unknown pool {ref.generation!r}: attach first")
        if ref != pool.ref:
            theirs, ours = (ref.epoch, ref.attachment), (pool.ref.epoch, pool.ref.attachment)
            if theirs > ours:
                raise stale(f"epoch {theirs[0]}, attachment {theirs[1]} is not attached")
            self.tally.old_epochs += 1
            raise stale(f"old epoch {theirs[0]}, attachment {theirs[1]}: {ours} is attached")
        self.pools.move_to_end(ref.generation)
        pool.as_of = pool.ref
        return pool

    def _validate_attach(self, call: Attach) -> None:
        if not call.pool.generation:
            raise bad("pool.generation", "must not be empty")
        if call.num_blocks > self.blocks_max:
            raise bad("num_blocks", f"{call.num_blocks} is above {self.blocks_max}")
        if call.block_size_tokens < 1:
            raise bad("block_size_tokens", "must be at least 1")
        if len(call.worker_stamps) > STAMPS_MAX:
            raise bad("worker_stamps", f"more than {STAMPS_MAX}")


def _same_blocks(one: Attach, other: Attach) -> bool:
    """Whether content cached under one attach means the same under the other."""
    return (
        one.num_blocks == other.num_blocks
        and one.block_size_tokens == other.block_size_tokens
        and one.namespace == other.namespace
        and one.worker_stamps == other.worker_stamps
    )
