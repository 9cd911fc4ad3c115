"""Pure. The blocks that this batcher leases from kvstore: its inventory, which is the truth.

A reference per table that names a block, one for each idle block, and one for each release not yet sent.
Commits, releases and leases ride in one exchange, one at a time. Whoever holds a block with known content
shares it and never writes it; a block without is held once.

A call that failed may or may not have happened: from then on nothing is called until the pool has been
attached anew with the whole inventory. Meanwhile tables go on growing into idle blocks, and releases that
were not sent are taken back as idle blocks; growth beyond that waits.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from math import inf

from batcher.beginnings import Beginnings
from batcher.block_hash import NO_PARENT
from batcher.commits import Commits
from batcher.distrusted import Distrusted
from batcher.dryness import Dryness
from batcher.events import (
    AttachPool,
    BlockEffect,
    BlocksExchanged,
    BlocksMatched,
    ExchangeBlocks,
    MatchBlocks,
    PoolAttached,
)
from batcher.idle_blocks import IdleBlocks
from batcher.lease_stats import LeaseStats
from batcher.references import References, proves
from chassis.ids import BlockHash, BlockId, RequestId
from chassis.messages.kvstore import KEEP_DEFAULT

ATTACH_RETRY_S = 0.25
# A call takes batcher and kvstore as long as a dozen commits: it waits for company. Who comes with a prompt
# whose beginning is not told yet, or lacks blocks, hastens it.
FLUSH_S = 0.05  # prompts, which others may share, and what is given back
LATER_FLUSH_S = 0.1  # what was made
FLUSH_LEN = 256


class Lease:
    def __init__(self, low_blocks: int, high_blocks: int) -> None:
        assert 0 <= low_blocks <= high_blocks and high_blocks >= 1
        self._low_max = low_blocks
        self._high_max = high_blocks
        self._low = self._high = 0
        self.num_blocks = 0
        self.refs = References()
        self._given_up: deque[tuple[BlockId, int, int]] = deque()  # and the step that copies it
        self._idle = IdleBlocks()
        self._hashes: dict[BlockId, BlockHash] = {}  # held blocks with known content
        self._commits = Commits()
        self._beginnings = Beginnings()
        self._distrusted = Distrusted()
        self._releases: list[tuple[BlockId, int]] = []  # and how long its content is to stay
        self._due_at: float | None = None
        self._calls = 0
        self.fence = 0  # attaches of lower numbers know of blocks that are written anew since
        self._exchange: ExchangeBlocks | None = None
        self._match: MatchBlocks | None = None
        self._attach: AttachPool | None = None
        self._attached = False
        self._open = False
        self._attach_at = 0.0
        self._shortage = 0
        self.short = False  # the last plan lacked blocks
        self._dry = Dryness()
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
        return self._num_untold > 0 or any((self._exchange, self._match, self._attach))

    @property
    def _num_untold(self) -> int:
        return len(self._commits) + len(self._releases) + len(self._distrusted)

    @property
    def dry(self) -> bool:
        """The pool has no more to give, and nothing that was given back is on its way."""
        return self._attached and bool(self._dry) and not self._releases and self._exchange is None

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
        if count > len(self._idle):
            self._reclaim(count - len(self._idle))
        return self._idle.take(count)

    def give_up(self, block: BlockId, keep: int) -> None:
        """A table names it no more once the step that is being made, which copies it, has come back."""
        self._given_up.append((block, keep, self._idle.next_step))

    def commit(
        self, block: BlockId, block_hash: BlockHash, parent: BlockHash, now: float, later: bool = False
    ) -> None:
        """The step that filled the block has come back. `later`: nobody asks for it soon."""
        assert self.refs.told(block) == 1 and block not in self._hashes
        self._hashes[block] = block_hash
        self._commits.add((block, block_hash, parent))
        if parent == NO_PARENT:
            self._beginnings.used(block_hash, self.num_blocks)
        self._pend(now + (LATER_FLUSH_S if later else FLUSH_S))

    def release(self, table: Iterable[BlockId], now: float, keep: int = KEEP_DEFAULT) -> None:
        """A table's references end; head of the chain first. `keep`: how long its content is to stay."""
        for block in table:
            if self.refs.unshare(block):
                continue
            if block in self._hashes:
                self._releases.append((block, keep))
                self._pend(now + FLUSH_S)
            else:
                assert self.refs[block] == 1
                self._idle.put(block)
        self._give_back(now)

    def distrust(self, blocks: Iterable[BlockId], now: float) -> None:
        """kvstore is to forget what these are said to hold, before they are released."""
        for block in filter(self._hashes.__contains__, blocks):
            self._distrusted.add(block)
        self._commits.keep(lambda block: block not in self._distrusted)
        self._pend(now)

    def _give_back(self, now: float) -> None:
        surplus = len(self._idle) - 2 * self._high
        if surplus > 0 and self._attached and (blocks := self._idle.give_back(surplus + self._high)):
            self._releases.extend((block, KEEP_DEFAULT) for block in blocks)
            self._pend(now + FLUSH_S)

    def _copied(self, number: float, now: float) -> None:
        while self._given_up and self._given_up[0][2] <= number:
            block, keep, _ = self._given_up.popleft()
            self.release((block,), now, keep)

    def step_sent(self, number: int) -> None:
        self._idle.sent(number)

    def step_returned(self, number: int, now: float) -> None:
        """What it wrote is written."""
        self._idle.returned(number)
        self._copied(number, now)
        self._give_back(now)

    def tells(self, chain: Collection[BlockHash], now: float) -> bool:
        """Whether kvstore is not told yet of this chain's blocks that are committed here. It is told next."""
        if self._attached and self._commits.wait(chain):
            self._pend(now)
            return True
        return self._attached and self._exchange is not None and self._commits.told(chain)

    def may_hold(self, root: BlockHash) -> bool:
        """False: the pool has nothing of a chain that begins with this block."""
        return self._beginnings.may_hold(root)

    def _pend(self, due_at: float) -> None:
        if self._due_at is None or due_at < self._due_at:
            self._due_at = due_at

    def _reclaim(self, count: int) -> None:
        """Without a standing attachment, unsent releases of blocks that no one else holds are idle blocks.

        Not while an attach is on its way: it says of them that their content is known.
        """
        if self._attached or self._attach is not None or not self._releases:
            return
        kept: list[tuple[BlockId, int]] = []
        self.fence = self._calls + 1
        for block, keep in reversed(self._releases):  # tails first
            if count > 0 and self.refs[block] == 1:
                count -= 1
                self._hashes.pop(block, None)
                self._distrusted.drop(block)
                self._idle.put(block)
                self.stats.reclaimed += 1
            else:
                kept.append((block, keep))
        self._releases = kept[::-1]
        self._commits.keep(self._hashes.__contains__)

    # ---- calls -------------------------------------------------------------------------------------

    def reset(self, num_blocks: int, pool_changed: bool, now: float) -> None:
        """A new epoch: whatever was called is void. A changed pool holds nothing of ours."""
        if pool_changed:
            self.refs.clear()
            self._given_up.clear()
            self._idle.clear()
            self._hashes.clear()
            self._commits.clear()
            self._releases.clear()
            self._beginnings.clear()
            self._distrusted.clear()
            self._due_at = None
        self._copied(inf, now)
        self._idle.new_epoch()
        self.num_blocks = num_blocks
        self.fence = 0
        self.begin(0)
        self.close()
        self._open = True
        self._attach_at = now
        self._left = 0

    def close(self) -> None:
        """The pipeline is lost: no calls until `reset`."""
        self._open = False
        self._attached = False
        self._exchange = self._match = self._attach = None

    def doubt(self, now: float, wait_s: float = ATTACH_RETRY_S) -> None:
        """The pool has less than it must have, or is to lie elsewhere: attach it anew."""
        if self._attached:
            self._attached = False
            self._attach_at = now + wait_s

    def calls(self, now: float) -> list[BlockEffect]:
        """What is to be called now, besides matches."""
        if not self._open:
            return []
        if not self._attached:
            idle = self._exchange is None and self._match is None and self._attach is None
            return [self._start_attach()] if idle and now >= self._attach_at else []
        if self._exchange is not None:
            return []
        pending = self._num_untold
        due = pending >= FLUSH_LEN or (pending > 0 and self._due_at is not None and now >= self._due_at)
        ask = self._idle.lacking(self._shortage, self._low, self._high)
        starved = not self._releases and self._dry.starves(now)
        if not due and (not ask or starved):
            return []
        self._calls += 1
        self._exchange = ExchangeBlocks(
            self._calls,
            self._commits.take(),
            tuple([block for block, _ in self._releases]),
            0 if starved else ask,
            tuple([keep for _, keep in self._releases]),
            self._distrusted.take(),
        )
        for block, _ in self._releases:
            self._drop(block)
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
        due_at = self._due_at if self._num_untold else None
        lacking = self._idle.lacking(self._shortage, self._low, self._high)
        return None if self._exchange else self._dry.asks_by(due_at) if lacking else due_at

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
        held = tuple(block for block in self.refs for _ in range(self.refs.told(block)))
        known = tuple([entry for entry in self._hashes.items() if entry[0] not in self._distrusted])
        self._attach = AttachPool(self._calls, held, known)
        self._commits.clear()
        self._distrusted.take()
        self.stats.attaches += 1
        return self._attach

    def _drop(self, block: BlockId) -> None:
        count = self.refs[block] - 1
        if count:
            self.refs[block] = count
        else:
            del self.refs[block]
            self._hashes.pop(block, None)
            self._distrusted.drop(block)

    # ---- completions -------------------------------------------------------------------------------

    def exchanged(self, event: BlocksExchanged) -> bool:
        """False: a ghost."""
        call = self._exchange
        if call is None or call.call != event.call:
            return False
        self._exchange = None
        if event.failed or not self.refs.fit(event.leased, self.num_blocks):
            self._failed(event.now)
        elif self._attached:
            self.refs.update(dict.fromkeys(event.leased, 1))
            self._idle.put_leased(event.leased)
            self._left = event.free + event.cached
            self._dry.answered(len(event.leased) < call.lease or self._left == 0, event.now)
        return True

    def matched(self, event: BlocksMatched) -> tuple[MatchBlocks, tuple[tuple[BlockId, ...], ...]] | None:
        """The call and, per request, the blocks of its cached prefix, each held once more. None: a ghost."""
        call = self._match
        if call is None or call.call != event.call:
            return None
        self._match = None
        nothing: tuple[tuple[BlockId, ...], ...] = ((),) * len(call.request_ids)
        good = proves(self.refs, self._hashes, event.blocks, call.chains, self.num_blocks)
        if event.failed or not good:
            self._failed(event.now)
        if not self._attached:
            return call, nothing  # the attach that follows says that they are not held
        for blocks, chain in zip(event.blocks, call.chains, strict=True):
            self.stats.matched_blocks += len(blocks)
            if blocks:
                self._beginnings.used(chain[0], self.num_blocks)
            for block, block_hash in zip(blocks, chain, strict=False):
                count = self.refs.get(block, 0)
                self._left = max(0, self._left - (count == 0))
                self.refs[block] = count + 1
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
            self._dry.attached(event.tiers)
            self._beginnings.attached(event.cached, event.tiers)
        return True

    def _failed(self, now: float) -> None:
        self.stats.failed_calls += 1
        if self._attached:
            self._attached = False
            self._attach_at = now

    # ---- invariants --------------------------------------------------------------------------------

    def check(self, tables: Iterable[Sequence[BlockId]]) -> None:
        counted: dict[BlockId, int] = {}
        self.refs.check(self.num_blocks)
        releases = [b for b, _ in self._releases] + [b for b, _, _ in self._given_up]
        for table in (*tables, [*self._idle], releases):
            for block in table:
                counted[block] = counted.get(block, 0) + 1
        assert counted == self.refs, "references differ from the tables"
        assert all(block in self.refs for block in self._hashes)
        self._idle.check()
        for block in self._idle:
            assert self.refs[block] == 1 and block not in self._hashes
        for block, block_hash, parent in self._commits:
            assert self._hashes[block] == block_hash and len(parent) == len(NO_PARENT)
        assert self._open or not self._attached
