"""Pure. The ledger: pools of blocks by generation, and what their batchers may do with them.

Rules: the caller's inventory is the truth when it attaches; each call is done whole or refused with
nothing changed (`RpcRejected`: INVALID_ARGUMENT names the field, FAILED_PRECONDITION means attach anew).
Late calls are ghosts: an attach must be newer, by (epoch, attachment), than every one before it that named
the pool or one of its workers' KV memories; other calls must name exactly the last attach. A KV memory
(stamp) serves one pool: the pools that shared it are dropped when another one attaches. Content that nobody
holds is kept only if the attach under which the memory was last written is the one it was known under here.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from chassis.errors import RpcRejected
from chassis.ids import BlockHash, BlockId, Epoch
from chassis.messages.kvstore import Attach, Attached, Commit, Exchange, Exchanged, PoolRef, Stats
from kvstore.block import BlockTable
from kvstore.prefix import NO_PARENT, PrefixIndex

FENCES_MAX = 4096
STAMPS_MAX = 1024


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

    __slots__ = ("_tally", "as_of", "attach", "index", "ref", "table")

    def __init__(self, attach: Attach, before: "Pool | None", tally: Tally) -> None:
        """Takes `attach` as the truth; content that nobody holds stays cached as `before` had it."""
        held = _inventory(attach)
        self.ref = attach.pool
        self.as_of = attach.pool  # content is as it was under this attach: a later one may not have been used
        self.attach = attach
        self._tally = tally
        self.index = PrefixIndex()
        if before is not None and before._knows(attach):
            self.as_of = before.as_of
            for block in before._unheld(held):
                content = before.index.content(block)
                assert content is not None
                self.index.keep(block, content, before.index.parent(content))
        for block, content in attach.committed:
            self.index.commit(block, content, None)
        self.table = BlockTable(attach.num_blocks, held, self.index.cached_blocks())

    def _knows(self, attach: Attach) -> bool:
        """Whether nobody wrote the memory elsewhere since."""
        seen = ((ref.epoch, ref.attachment) for ref in (self.ref, self.as_of))
        epoch, number = attach.prior_epoch, attach.prior_attachment
        return epoch > 0 and any(epoch == known[0] and number in (0, known[1]) for known in seen)

    def _unheld(self, held: "Counter[BlockId]") -> Sequence[BlockId]:
        """Known content outside `held`, in order of eviction: cached before leased, tails before heads."""
        index = self.index
        cached = [b for b in index.cached_blocks() if b not in held]
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
            self._tally.hits += len(found)
            self._tally.misses += len(chain) - len(found)
            matched.append(tuple(found))
        return tuple(matched)

    def exchange(self, call: Exchange) -> Exchanged:
        """Commits, releases, leases, in this order."""
        self._validate_commits(call.commits)
        self._validate_releases(call.releases)
        for block, content, parent in call.commits:
            displaced = self.index.commit(block, content, None if parent == NO_PARENT else parent)
            if displaced is not None:
                self.table.free.append(displaced)
        references = self.table.references
        for block in reversed(call.releases):
            references[block] -= 1
            if references[block] == 0 and not self.index.settle(block):
                self.table.free.append(block)
        return Exchanged(self._lease(call.lease_count), len(self.table.free), self.index.cached)

    def _lease(self, count: int) -> tuple[BlockId, ...]:
        """As many as there are, up to `count`: free ones first, then the least recently used cached ones."""
        free, references = self.table.free, self.table.references
        leased = [free.pop() for _ in range(min(count, len(free)))]
        evicted = [self.index.evict() for _ in range(min(count - len(leased), self.index.cached))]
        self._tally.evictions += len(evicted)
        leased += evicted
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
        self.pools: OrderedDict[str, Pool] = OrderedDict()  # least recently used first
        self._fences: OrderedDict[str, tuple[Epoch, int]] = OrderedDict()  # by generation and by stamp

    def attach(self, call: Attach) -> Attached:
        """Raises RpcRejected; see the rules above. Costs time in the size of the pool."""
        self._validate_attach(call)
        stamps = frozenset(call.worker_stamps)
        rivals = [p for p in self.pools.values() if not stamps.isdisjoint(p.attach.worker_stamps)]
        before = self.pools.get(call.pool.generation)
        self._refuse_ghost(call, rivals if before is None else [*rivals, before])
        if before is not None and not _same_blocks(before.attach, call):
            before = None
        pool = Pool(call, before, self.tally)
        for rival in rivals:
            del self.pools[rival.ref.generation]
        self.pools[call.pool.generation] = pool
        self.pools.move_to_end(call.pool.generation)
        while len(self.pools) > self.pools_max:
            self.pools.popitem(last=False)
        self._fence(call)
        return Attached(len(pool.table.free), pool.index.cached)

    def match(self, ref: PoolRef, chains: Sequence[Sequence[BlockHash]]) -> tuple[tuple[BlockId, ...], ...]:
        """Leases the longest cached prefix of each chain, in order: a later one sees an earlier one's effect.

        Returns one tuple of block ids per chain. Raises RpcRejected.
        """
        return self._pool(ref).match(chains)

    def exchange(self, call: Exchange) -> Exchanged:
        """Commits filled blocks, releases, and leases up to `lease_count`. Raises RpcRejected."""
        return self._pool(call.pool).exchange(call)

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
