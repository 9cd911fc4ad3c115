"""Pure. The ledger: pools of blocks by generation, and what their batchers may do with them.

Rules: the caller's inventory is the truth when it attaches; each call is done whole or refused with
nothing changed (`RpcRejected`: INVALID_ARGUMENT names the field, FAILED_PRECONDITION means attach anew).
Late calls are ghosts: an attach must be newer, by (epoch, attachment), than every one before it that named
the pool or one of its workers' KV memories; other calls must name exactly the last attach. A KV memory
(stamp) serves one pool: the pools that shared it are dropped when another one attaches. Content that nobody
holds is kept only if the attach under which the memory was last written is the one it was known under here.
`changes` notes what came and went, for whoever listens.
"""

from collections import OrderedDict
from collections.abc import Sequence

from chassis.errors import RpcRejected
from chassis.ids import BlockHash, BlockId, Epoch
from chassis.messages.cache import Held, PoolTotals
from chassis.messages.kvstore import (
    Attach,
    Attached,
    Exchange,
    Exchanged,
    Locate,
    Located,
    PoolRef,
    Stats,
)
from kvstore.changes import Changes
from kvstore.pool import PIECE_BLOCKS, Pool, Tally, bad

FENCES_MAX = 4096
STAMPS_MAX = 1024
BLOCK_SIZE_TOKENS_MAX = 65_535  # as segments on disk say it


def stale(why: str) -> RpcRejected:
    return RpcRejected("FAILED_PRECONDITION", why)


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

    def detach(self, ref: PoolRef) -> None:
        """Its batcher has attached the pool elsewhere since. Raises RpcRejected."""
        pool = self.pools.get(ref.generation)
        if pool is None or pool.ref != ref:
            raise stale(f"pool {ref.generation!r} is not attached so")
        self._drop(ref.generation)

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

    def locate(self, call: Locate) -> Located:
        """How much of each chain's head the pools hold whose blocks mean the same. Changes nothing."""
        meant = call.namespace, call.block_size_tokens
        pools = [p for p in self.pools.values() if (p.attach.namespace, p.attach.block_size_tokens) == meant]
        held = ((p.ref.generation, tuple(len(p.index.find(c)) for c in call.chains)) for p in pools)
        return tuple((generation, counts) for generation, counts in held if any(counts))

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
            bad_blocks=self.tally.bad_blocks,
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
        if pool.doubtful:
            raise stale("contents are in doubt: attach anew")
        self.pools.move_to_end(ref.generation)
        pool.as_of = pool.ref
        return pool

    def _validate_attach(self, call: Attach) -> None:
        if not call.pool.generation:
            raise bad("pool.generation", "must not be empty")
        if call.num_blocks > self.blocks_max:
            raise bad("num_blocks", f"{call.num_blocks} is above {self.blocks_max}")
        if not 1 <= call.block_size_tokens <= BLOCK_SIZE_TOKENS_MAX:
            raise bad("block_size_tokens", f"must be 1 to {BLOCK_SIZE_TOKENS_MAX}")
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
