"""Pure. The blocks that this batcher leases from kvstore: its inventory, which is the truth.

A reference per table that names a block, one for each idle block, and one for each release not yet sent.
Commits, releases and leases ride in one exchange, one at a time. Whoever holds a block with known content
shares it and never writes it; a block without is held once.

A call that failed may or may not have happened: from then on nothing is called until the pool has been
attached anew with the whole inventory. Meanwhile tables go on growing into idle blocks, and releases that
were not sent are taken back as idle blocks; growth beyond that waits.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from batcher.block_hash import NO_PARENT
from batcher.events import (
    AttachPool,
    BlockEffect,
    BlocksExchanged,
    BlocksMatched,
    ExchangeBlocks,
    MatchBlocks,
    PoolAttached,
)
from chassis.ids import BlockHash, BlockId, RequestId

ATTACH_RETRY_S = 0.25
FLUSH_S = 0.01  # prompts, which others may share, and what is given back
# what was made: a call a step would cost kvstore and batcher as much as the step's tokens
LATER_FLUSH_S = 0.1
FLUSH_LEN = 64


@dataclass(slots=True)
class LeaseStats:
    exchanges: int = 0
    matches: int = 0
    matched_blocks: int = 0
    failed_calls: int = 0
    attaches: int = 0
    reclaimed: int = 0


class Lease:
    def __init__(self, low_blocks: int, high_blocks: int) -> None:
        assert 0 <= low_blocks <= high_blocks and high_blocks >= 1
        self._low_max = low_blocks
        self._high_max = high_blocks
        self._low = self._high = 0
        self.num_blocks = 0
        self._refs: dict[BlockId, int] = {}
        self._idle: deque[BlockId] = deque()
        self._hashes: dict[BlockId, BlockHash] = {}  # held blocks with known content
        self._commits: list[tuple[BlockId, BlockHash, BlockHash]] = []
        self._roots: dict[BlockHash, None] = {}  # first blocks of chains, the latest used last
        self._roots_whole = False  # the pool has no content that was not committed here
        self._releases: list[BlockId] = []
        self._due_at: float | None = None
        self._calls = 0
        self._exchange: ExchangeBlocks | None = None
        self._match: MatchBlocks | None = None
        self._attach: AttachPool | None = None
        self._attached = False
        self._open = False
        self._attach_at = 0.0
        self._shortage = 0
        self.short = False  # the last plan lacked blocks
        self._dry = False  # the pool gave less than asked, and nothing was released since
        self._left = 0  # free or evictable in kvstore, as far as known
        self.stats = LeaseStats()

    # ---- tables ------------------------------------------------------------------------------------

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def available(self) -> int:
        """Blocks that could be had soon, as far as known."""
        return len(self._idle) + (self._left + len(self._releases) if self._attached else 0)

    @property
    def attached(self) -> bool:
        return self._attached

    @property
    def unsettled(self) -> bool:
        """Commits or releases wait, or a call is on its way."""
        calls = (self._exchange, self._match, self._attach)
        return bool(self._commits or self._releases) or any(call is not None for call in calls)

    @property
    def dry(self) -> bool:
        """The pool has no more to give, and nothing that was given back is on its way."""
        return self._attached and self._dry and not self._releases and self._exchange is None

    def begin(self, num_running: int) -> None:
        """A step is planned: what it lacks counts anew. Idle blocks are kept for as many as run, because all
        may need one in the same step; an eighth of the pool at most."""
        self._high = max(1, min(max(self._high_max, 2 * num_running), self.num_blocks // 8))
        self._low = min(max(self._low_max, num_running), self._high // 2)
        self._shortage = 0
        self.short = False

    def lack(self, count: int) -> None:
        """So many blocks more than are idle are wanted."""
        self._shortage += count
        self.short = True

    def take(self, count: int) -> list[BlockId]:
        """Up to `count` idle blocks; their content is unknown."""
        idle = self._idle
        if count > len(idle):
            self._reclaim(count - len(idle))
        return [idle.popleft() for _ in range(min(count, len(idle)))]

    def commit(
        self, block: BlockId, block_hash: BlockHash, parent: BlockHash, now: float, later: bool = False
    ) -> None:
        """The step that filled the block has come back. `later`: nobody asks for it soon."""
        assert self._refs[block] == 1 and block not in self._hashes
        self._hashes[block] = block_hash
        self._commits.append((block, block_hash, parent))
        if parent == NO_PARENT:
            self._used_root(block_hash)
        self._pend(now + (LATER_FLUSH_S if later else FLUSH_S))

    def release(self, table: Iterable[BlockId], now: float) -> None:
        """A table's references end; head of the chain first."""
        for block in table:
            if block in self._hashes:
                self._releases.append(block)
                self._pend(now + FLUSH_S)
            else:
                assert self._refs[block] == 1
                self._idle.append(block)
        surplus = len(self._idle) - 2 * self._high
        if surplus > 0 and self._attached:
            self._releases.extend(self._idle.pop() for _ in range(surplus + self._high))
            self._pend(now + FLUSH_S)

    def tells(self, chain: Iterable[BlockHash], now: float) -> bool:
        """Whether kvstore is not told yet of this chain's blocks that are committed here. It is told next."""
        if not self._attached:
            return False
        waiting = {entry[1] for entry in self._commits}
        on_its_way = {entry[1] for entry in self._exchange.commits} if self._exchange is not None else set()
        if not waiting and not on_its_way:
            return False
        told_next = False
        for block_hash in chain:
            if block_hash in waiting:
                self._pend(now)
                return True
            told_next = told_next or block_hash in on_its_way
        return told_next

    def may_hold(self, root: BlockHash) -> bool:
        """False: the pool has nothing of a chain that begins with this block."""
        return not self._roots_whole or root in self._roots

    def _used_root(self, root: BlockHash) -> None:
        self._roots.pop(root, None)
        self._roots[root] = None
        if len(self._roots) > self.num_blocks:  # the oldest was evicted long ago, or will be next
            del self._roots[next(iter(self._roots))]

    def _pend(self, due_at: float) -> None:
        if self._due_at is None or due_at < self._due_at:
            self._due_at = due_at

    def _reclaim(self, count: int) -> None:
        """Without a standing attachment, unsent releases of blocks that no one else holds are idle blocks.

        Not while an attach is on its way: it says of them that their content is known.
        """
        if self._attached or self._attach is not None or not self._releases:
            return
        kept: list[BlockId] = []
        for block in reversed(self._releases):  # tails first
            if count > 0 and self._refs[block] == 1:
                count -= 1
                self._hashes.pop(block, None)
                self._idle.append(block)
                self.stats.reclaimed += 1
            else:
                kept.append(block)
        self._releases = kept[::-1]
        self._commits = [entry for entry in self._commits if entry[0] in self._hashes]

    # ---- calls -------------------------------------------------------------------------------------

    def reset(self, num_blocks: int, pool_changed: bool, now: float) -> None:
        """A new epoch: whatever was called is void. A changed pool holds nothing of ours."""
        if pool_changed:
            self._refs.clear()
            self._idle.clear()
            self._hashes.clear()
            self._commits.clear()
            self._releases.clear()
            self._roots.clear()
            self._roots_whole = False
            self._due_at = None
        self.num_blocks = num_blocks
        self.begin(0)
        self._exchange = self._match = self._attach = None
        self._attached = False
        self._open = True
        self._attach_at = now
        self._left = 0
        self._dry = False

    def close(self) -> None:
        """The pipeline is lost: no calls until `reset`."""
        self._open = False
        self._attached = False
        self._exchange = self._match = self._attach = None

    def doubt(self, now: float) -> None:
        """The pool has less than it must have: attach it anew."""
        if self._attached:
            self._attached = False
            self._attach_at = now + ATTACH_RETRY_S

    def calls(self, now: float) -> list[BlockEffect]:
        """What is to be called now, besides matches."""
        if not self._open:
            return []
        if not self._attached:
            idle = self._exchange is None and self._match is None and self._attach is None
            return [self._start_attach()] if idle and now >= self._attach_at else []
        if self._exchange is not None:
            return []
        pending = len(self._commits) + len(self._releases)
        due = pending >= FLUSH_LEN or (pending > 0 and self._due_at is not None and now >= self._due_at)
        lacking = self._shortage > 0 or len(self._idle) < self._low
        ask = self._shortage + self._high - len(self._idle) if lacking else 0
        starved = self._dry and not self._releases  # asking again would bring nothing
        if not due and (ask <= 0 or starved):
            return []
        self._calls += 1
        self._exchange = ExchangeBlocks(
            self._calls, tuple(self._commits), tuple(self._releases), 0 if starved else max(0, ask)
        )
        for block in self._releases:
            self._drop(block)
        self._commits.clear()
        self._releases.clear()
        self._due_at = None
        self._shortage = 0
        self.stats.exchanges += 1
        return [self._exchange]

    def wake_at(self) -> float | None:
        """When `calls` has something to call that it has not now."""
        if not self._open:
            return None
        if not self._attached:
            idle = self._exchange is None and self._match is None and self._attach is None
            return self._attach_at if idle else None
        if self._exchange is not None or self._due_at is None:
            return None
        return self._due_at if self._commits or self._releases else None

    @property
    def can_match(self) -> bool:
        return self._attached and self._match is None

    def match(self, request_ids: Sequence[RequestId], chains: Sequence[tuple[BlockHash, ...]]) -> MatchBlocks:
        assert self.can_match
        self._calls += 1
        self._match = MatchBlocks(self._calls, tuple(request_ids), tuple(chains))
        self.stats.matches += 1
        return self._match

    def _start_attach(self) -> AttachPool:
        """What is known of content goes with it, so that waiting commits are done."""
        self._calls += 1
        held = tuple(block for block, count in self._refs.items() for _ in range(count))
        self._attach = AttachPool(self._calls, held, tuple(self._hashes.items()))
        self._commits.clear()
        self.stats.attaches += 1
        return self._attach

    def _drop(self, block: BlockId) -> None:
        count = self._refs[block] - 1
        if count:
            self._refs[block] = count
        else:
            del self._refs[block]
            self._hashes.pop(block, None)

    # ---- completions -------------------------------------------------------------------------------

    def exchanged(self, event: BlocksExchanged) -> bool:
        """False: a ghost."""
        call = self._exchange
        if call is None or call.call != event.call:
            return False
        self._exchange = None
        if event.failed or not self._fits(event.leased):
            self._failed(event.now)
        elif self._attached:
            for block in event.leased:
                self._refs[block] = 1
                self._idle.append(block)
            self._left = event.free + event.cached
            self._dry = len(event.leased) < call.lease or self._left == 0
        return True

    def matched(self, event: BlocksMatched) -> tuple[MatchBlocks, tuple[tuple[BlockId, ...], ...]] | None:
        """The call and, per request, the blocks of its cached prefix, each held once more. None: a ghost."""
        call = self._match
        if call is None or call.call != event.call:
            return None
        self._match = None
        nothing: tuple[tuple[BlockId, ...], ...] = ((),) * len(call.request_ids)
        good = len(event.blocks) == len(call.request_ids) and all(
            map(self._proves, event.blocks, call.chains)
        )
        if event.failed or not good:
            self._failed(event.now)
            return call, nothing
        if not self._attached:
            return call, nothing  # the attach that follows says that they are not held
        for blocks, chain in zip(event.blocks, call.chains, strict=True):
            self.stats.matched_blocks += len(blocks)
            if blocks:
                self._used_root(chain[0])
            for block, block_hash in zip(blocks, chain, strict=False):
                count = self._refs.get(block, 0)
                self._left = max(0, self._left - (count == 0))
                self._refs[block] = count + 1
                self._hashes[block] = block_hash
        return call, event.blocks

    def attached_anew(self, event: PoolAttached) -> bool:
        """False: a ghost."""
        if self._attach is None or self._attach.call != event.call:
            return False
        self._attach = None
        if event.failed:
            self.stats.failed_calls += 1
            self._attach_at = event.now + ATTACH_RETRY_S
        else:
            self._attached = True
            self._left = event.free + event.cached
            self._dry = False
            self._roots_whole = self._roots_whole or event.cached == 0
        return True

    def _failed(self, now: float) -> None:
        self.stats.failed_calls += 1
        if self._attached:
            self._attached = False
            self._attach_at = now

    def _fits(self, leased: tuple[BlockId, ...]) -> bool:
        """A block that is held already cannot be leased again: one of the two ledgers is wrong."""
        return len(dict.fromkeys(leased)) == len(leased) and all(
            0 <= block < self.num_blocks and block not in self._refs for block in leased
        )

    def _proves(self, blocks: tuple[BlockId, ...], chain: tuple[BlockHash, ...]) -> bool:
        """A block that is held already has the content that we know of."""
        return len(blocks) <= len(chain) and all(
            0 <= block < self.num_blocks
            and (block not in self._refs or self._hashes.get(block) == block_hash)
            for block, block_hash in zip(blocks, chain, strict=False)
        )

    # ---- invariants --------------------------------------------------------------------------------

    def inventory(self) -> dict[BlockId, int]:
        """References per held block."""
        return dict(self._refs)

    def check(self, tables: Iterable[Sequence[BlockId]]) -> None:
        """`tables`: of every sequence that holds blocks."""
        counted: dict[BlockId, int] = {}
        for table in (*tables, self._idle, self._releases):
            for block in table:
                counted[block] = counted.get(block, 0) + 1
        assert counted == self._refs, "references differ from the tables"
        for block in self._refs:
            assert 0 <= block < self.num_blocks
        assert all(block in self._refs for block in self._hashes)
        for block in self._idle:
            assert self._refs[block] == 1 and block not in self._hashes
        for block, block_hash, parent in self._commits:
            assert self._hashes[block] == block_hash and len(parent) == len(NO_PARENT)
        assert self._open or not self._attached
