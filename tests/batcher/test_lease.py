"""The inventory: what is held, what is called when, and what a failed call leads to."""

import hashlib

from batcher.block_hash import NO_PARENT
from batcher.dryness import ASK_AGAIN_S
from batcher.events import (
    AttachPool,
    BlocksExchanged,
    BlocksMatched,
    ExchangeBlocks,
    MatchBlocks,
    PoolAttached,
)
from batcher.lease import ATTACH_RETRY_S, FLUSH_LEN, FLUSH_S, Lease
from chassis.ids import BlockHash, BlockId, RequestId
from chassis.messages.kvstore import keep_of_priority

R = (RequestId("r"),)


def name(text: str) -> BlockHash:
    return BlockHash(hashlib.sha256(text.encode()).digest())


def blocks(*ids: int) -> tuple[BlockId, ...]:
    return tuple(map(BlockId, ids))


def attach_call(lease: Lease, now: float = 0.0) -> AttachPool:
    (call,) = lease.calls(now)
    assert isinstance(call, AttachPool)
    return call


def exchange_call(lease: Lease, now: float = 0.0) -> ExchangeBlocks:
    (call,) = lease.calls(now)
    assert isinstance(call, ExchangeBlocks)
    return call


def attached(num_blocks: int = 100, low: int = 2, high: int = 8) -> Lease:
    lease = Lease(low, high)
    lease.reset(num_blocks, pool_changed=True, now=0.0)
    call = attach_call(lease)
    assert lease.attached_anew(PoolAttached(0.0, call.call, num_blocks, 0))
    return lease


def stocked(*ids: int) -> Lease:
    lease = attached(high=len(ids))
    call = exchange_call(lease)
    assert lease.exchanged(BlocksExchanged(0.0, call.call, blocks(*ids), 100 - len(ids), 0))
    lease.check([])
    return lease


def test_the_pool_is_attached_before_anything_is_leased() -> None:
    lease = Lease(2, 8)
    assert lease.calls(0.0) == []
    lease.reset(100, pool_changed=True, now=0.0)
    call = attach_call(lease)
    assert (call.held, call.committed) == ((), ())
    assert lease.calls(9.0) == []  # one at a time
    assert not lease.attached_anew(PoolAttached(9.0, call.call + 1, 1, 1))
    assert lease.attached_anew(PoolAttached(9.0, call.call, 100, 0))
    assert exchange_call(lease).lease == 8  # up to the high mark


def test_leases_in_bulk_and_only_below_the_low_mark() -> None:
    lease = stocked(*range(8))
    taken = lease.take(6)
    assert lease.calls(0.0) == []  # two are left
    taken += lease.take(1)
    assert exchange_call(lease).lease == 7
    assert lease.calls(0.0) == []  # one exchange at a time
    lease.check([taken])


def test_what_a_step_lacks_is_asked_for_on_top() -> None:
    lease = stocked(0, 1)
    table = lease.take(5)
    assert table == [0, 1]
    lease.lack(3)
    assert lease.short
    assert exchange_call(lease).lease == 3 + 2
    lease.begin(1)
    assert not lease.short


def test_commits_and_releases_ride_in_one_exchange() -> None:
    lease = stocked(*range(8))
    table = lease.take(3)
    lease.commit(table[0], name("a"), NO_PARENT, 1.0)
    lease.commit(table[1], name("b"), name("a"), 1.0)
    lease.release(table, 1.0)
    lease.check([])
    assert lease.num_idle == 5 + 1  # the third has no content worth a name
    assert lease.calls(1.0) == []
    assert lease.wake_at() == 1.0 + FLUSH_S
    call = exchange_call(lease, 1.0 + FLUSH_S)
    assert call.commits == ((table[0], name("a"), NO_PARENT), (table[1], name("b"), name("a")))
    assert call.releases == blocks(0, 1)  # head first
    assert call.lease == 0
    lease.check([])


def test_a_release_says_how_long_its_content_is_to_stay() -> None:
    lease = stocked(*range(8))
    urgent, batch = lease.take(2), lease.take(1)
    for block, parent in zip((*urgent, *batch), (NO_PARENT, name("0"), NO_PARENT), strict=True):
        lease.commit(block, name(str(block)), parent, 1.0)
    lease.release(batch, 1.0, keep_of_priority(9))
    lease.release(urgent, 1.0, keep_of_priority(0))
    call = exchange_call(lease, 2.0)
    assert (call.releases, call.keeps) == (blocks(2, 0, 1), (10, 1, 1))


def test_many_pending_do_not_wait() -> None:
    lease = Lease(0, 800)
    lease.reset(8000, True, 0.0)
    lease.attached_anew(PoolAttached(0.0, attach_call(lease).call, 8000, 0))
    lease.lack(1)
    call = exchange_call(lease)
    lease.exchanged(BlocksExchanged(0.0, call.call, blocks(*range(500)), 7500, 0))
    table = lease.take(FLUSH_LEN)
    for block in table:
        lease.commit(block, name(str(block)), NO_PARENT, 1.0)
    assert len(exchange_call(lease, 1.0).commits) == FLUSH_LEN


def test_a_matched_block_is_held_once_more() -> None:
    lease = stocked(*range(8))
    table = lease.take(1)
    lease.commit(table[0], name("a"), NO_PARENT, 0.0)
    call = lease.match(R, ((name("a"), name("b")),))
    assert isinstance(call, MatchBlocks) and not lease.can_match
    answer = lease.matched(BlocksMatched(0.0, call.call, (blocks(0, 40),)))
    assert answer is not None and answer[1] == ((0, 40),)
    lease.check([table, [*answer[1][0]]])
    assert lease.refs[BlockId(0)] == 2
    lease.release(table, 0.0)
    lease.release(answer[1][0], 0.0)
    assert exchange_call(lease, 1.0).releases == blocks(0, 0, 40)
    lease.check([])


def test_a_match_that_contradicts_the_inventory_is_a_failure() -> None:
    """The block is idle here: what it holds is not what the other ledger says."""
    lease = stocked(*range(8))
    call = lease.match(R, ((name("a"),),))
    answer = lease.matched(BlocksMatched(0.0, call.call, (blocks(3),)))
    assert answer is not None and answer[1] == ((),)
    assert not lease.attached
    lease.check([])


def test_a_block_leased_twice_is_a_failure() -> None:
    lease = stocked(0, 1)
    lease.take(2)
    call = exchange_call(lease)
    lease.exchanged(BlocksExchanged(0.0, call.call, blocks(5, 1), 9, 9))
    assert not lease.attached and BlockId(5) not in lease.refs


def test_after_a_failure_nothing_is_called_before_the_whole_inventory_is_told() -> None:
    lease = stocked(*range(8))
    table = lease.take(8)
    for index, block in enumerate(table[:3]):
        lease.commit(block, name(str(index)), NO_PARENT, 0.0)
    match = lease.match(R, ((name("x"),),))
    exchange = exchange_call(lease)
    lease.exchanged(BlocksExchanged(0.0, exchange.call, (), 0, 0, failed=True))
    assert not lease.can_match
    assert lease.calls(0.0) == []  # the match may still happen
    lease.matched(BlocksMatched(0.0, match.call, (blocks(50),)))
    assert BlockId(50) not in lease.refs  # the attach takes it back
    lease.release(table[:1], 0.0)
    attach = attach_call(lease)
    assert attach.held == blocks(*range(8))  # the release has not been told
    assert attach.committed == ((0, name("0")), (1, name("1")), (2, name("2")))
    lease.attached_anew(PoolAttached(0.0, attach.call, 0, 0, failed=True))
    assert lease.calls(0.0) == []
    assert lease.wake_at() == ATTACH_RETRY_S
    attach = attach_call(lease, ATTACH_RETRY_S)
    lease.attached_anew(PoolAttached(1.0, attach.call, 40, 2))
    call = exchange_call(lease, 1.0)
    assert (call.commits, call.releases) == ((), blocks(0))  # the attach told what was committed
    lease.check([table[1:]])


def test_without_kvstore_releases_are_taken_back() -> None:
    lease = stocked(*range(8))
    table, other = lease.take(6), lease.take(2)
    call = exchange_call(lease)
    lease.exchanged(BlocksExchanged(0.0, call.call, (), 0, 0, failed=True))
    for block in (*table, *other):
        lease.commit(block, name(str(block)), NO_PARENT, 0.0)
    lease.release(table, 0.0)
    assert lease.take(2) == [5, 4]  # tails first
    lease.check([other, [BlockId(5), BlockId(4)]])
    attach = attach_call(lease)
    assert attach.held == blocks(*range(8))
    assert sorted(block for block, _ in attach.committed) == [0, 1, 2, 3, 6, 7]
    assert lease.take(1) == []  # the attach on its way says that it is known
    lease.check([other, [BlockId(5), BlockId(4)]])


def test_what_is_taken_back_is_fenced_off_from_who_still_believes_to_know_it() -> None:
    lease = stocked(*range(8))
    table = lease.take(8)
    call = exchange_call(lease)
    lease.exchanged(BlocksExchanged(0.0, call.call, (), 0, 0, failed=True))
    for block in table:
        lease.commit(block, name(str(block)), NO_PARENT, 0.0)
    lease.release(table, 0.0)
    assert lease.fence <= 1, "nothing is written anew"
    lease.take(1)
    fence = lease.fence
    assert fence > call.call
    attach = attach_call(lease)
    assert attach.call >= fence, "who attaches next knows"
    lease.attached_anew(PoolAttached(0.0, attach.call, 0, 0, failed=True))
    lease.take(1)
    assert lease.fence > attach.call, "it may have been done for all that"
    assert attach_call(lease, 1.0).call >= lease.fence


def test_a_block_that_another_table_still_names_is_not_taken_back() -> None:
    lease = stocked(*range(8))
    table = lease.take(8)
    lease.commit(table[0], name("a"), NO_PARENT, 0.0)
    match = lease.match(R, ((name("a"),),))
    lease.matched(BlocksMatched(0.0, match.call, (blocks(0),)))
    lease.doubt(0.0)
    lease.release(blocks(0), 0.0)
    assert lease.take(1) == []
    lease.check([table])


def test_late_answers_of_an_epoch_that_is_over_are_ghosts() -> None:
    lease = stocked(*range(8))
    table = lease.take(7)
    exchange = exchange_call(lease)
    match = lease.match(R, ((name("x"),),))
    lease.close()
    assert lease.calls(0.0) == []
    lease.reset(100, pool_changed=False, now=1.0)
    assert not lease.exchanged(BlocksExchanged(1.0, exchange.call, blocks(20), 1, 1))
    assert lease.matched(BlocksMatched(1.0, match.call, (blocks(21),))) is None
    assert attach_call(lease, 1.0).held == blocks(*range(7), 7)
    lease.check([table])


def test_another_pool_holds_nothing() -> None:
    lease = stocked(*range(8))
    lease.take(3)
    lease.close()
    lease.reset(50, pool_changed=True, now=1.0)
    assert attach_call(lease, 1.0).held == ()
    lease.check([])


def test_a_dry_pool_is_not_asked_again_until_something_was_released() -> None:
    lease = stocked(0, 1, 2, 3)
    table = lease.take(4)
    lease.commit(table[0], name("a"), NO_PARENT, 0.0)
    lease.lack(4)
    call = exchange_call(lease)
    lease.exchanged(BlocksExchanged(0.0, call.call, (), 0, 0))
    assert lease.dry
    lease.lack(4)
    assert lease.calls(0.0) == []
    lease.release(table[:1], 0.0)
    assert not lease.dry
    call = exchange_call(lease)
    assert (call.releases, call.lease) == (blocks(0), 4 + 4)


def test_a_dry_pool_with_tiers_is_asked_again_after_a_while() -> None:
    """Its kvstore held blocks that were being saved: that they can be had again, nobody is told."""
    lease = Lease(2, 4)
    lease.reset(100, pool_changed=True, now=0.0)
    lease.attached_anew(PoolAttached(0.0, attach_call(lease).call, 0, 0, tiers=True))
    lease.lack(1)
    assert lease.exchanged(BlocksExchanged(0.0, exchange_call(lease).call, (), 0, 0))
    lease.lack(1)
    assert lease.dry and lease.calls(0.0) == [] and lease.wake_at() == ASK_AGAIN_S
    call = exchange_call(lease, ASK_AGAIN_S)
    assert call.lease > 0 and lease.wake_at() is None
    assert lease.exchanged(BlocksExchanged(1.0, call.call, blocks(*range(call.lease)), 9, 0))
    assert not lease.dry and lease.wake_at() is None
    lease.check([])


def test_doubt_leads_to_a_new_attach() -> None:
    lease = stocked(0, 1)
    table = lease.take(2)
    lease.doubt(1.0)
    assert lease.calls(1.0) == []
    assert lease.wake_at() == 1.0 + ATTACH_RETRY_S
    assert attach_call(lease, 1.0 + ATTACH_RETRY_S).held == blocks(0, 1)
    lease.check([table])


def test_idle_blocks_are_kept_for_as_many_as_run() -> None:
    lease = stocked(*range(4))
    lease.begin(5)
    assert exchange_call(lease).lease == 10 - 4
    lease.begin(1000)
    lease.check([])


def test_too_many_idle_blocks_go_back() -> None:
    lease = stocked(*range(8))
    call = lease.take(8)
    lease.lack(20)
    exchange = exchange_call(lease)
    lease.exchanged(BlocksExchanged(0.0, exchange.call, blocks(*range(8, 36)), 60, 0))
    lease.release(call, 1.0)
    assert lease.num_idle == 8
    assert len(exchange_call(lease, 2.0).releases) == 28
    lease.check([])


def test_a_chain_that_begins_with_nothing_committed_here_cannot_be_cached() -> None:
    lease = stocked(1, 2)
    root, other = name("root"), name("other")
    assert not lease.may_hold(root)
    lease.take(2)
    lease.commit(BlockId(1), root, NO_PARENT, 0.0)
    lease.commit(BlockId(2), other, root, 0.0)
    assert lease.may_hold(root)
    assert not lease.may_hold(other), "it is no beginning"


def test_content_from_before_may_begin_with_anything() -> None:
    lease = Lease(2, 8)
    lease.reset(100, pool_changed=True, now=0.0)
    assert lease.may_hold(name("root")), "not attached: nothing is known"
    call = attach_call(lease)
    assert lease.attached_anew(PoolAttached(0.0, call.call, 98, cached=2))
    assert lease.may_hold(name("root"))


def test_a_kvstore_with_tiers_may_find_anything() -> None:
    """Contents that another pipeline left behind: an empty pool says nothing of them."""
    lease = Lease(2, 8)
    lease.reset(100, pool_changed=True, now=0.0)
    assert lease.attached_anew(PoolAttached(0.0, attach_call(lease).call, 100, 0, tiers=True))
    assert lease.may_hold(name("root"))
    lease.reset(100, pool_changed=False, now=1.0)
    assert lease.attached_anew(PoolAttached(1.0, attach_call(lease, 1.0).call, 100, 0))
    assert not lease.may_hold(name("root")), "another kvstore, without them"


def test_beginnings_outlive_a_failure_but_not_the_pool() -> None:
    lease = stocked(1, 2)
    lease.take(1)
    lease.commit(BlockId(1), name("root"), NO_PARENT, 0.0)
    lease.release(blocks(1), 0.0)
    call = exchange_call(lease, 1.0)
    lease.exchanged(BlocksExchanged(1.0, call.call, (), 0, 0, failed=True))
    attach = attach_call(lease, 1.0)
    lease.attached_anew(PoolAttached(1.0, attach.call, 98, cached=1))
    assert lease.may_hold(name("root")) and not lease.may_hold(name("other"))
    lease.reset(100, pool_changed=True, now=2.0)
    attach = attach_call(lease, 2.0)
    lease.attached_anew(PoolAttached(2.0, attach.call, 100, cached=0))
    assert not lease.may_hold(name("root"))


def test_remembered_beginnings_are_bounded_by_the_pool() -> None:
    lease = attached(num_blocks=2, low=0, high=1)
    call = lease.calls(0.0)
    assert call == []
    for index in range(3):
        lease.begin(0)
        lease.lack(1)
        exchange = exchange_call(lease, float(index))
        (block,) = blocks(0)
        lease.exchanged(BlocksExchanged(float(index), exchange.call, (block,), 1, 0))
        assert lease.take(1) == [block]
        lease.commit(block, name(f"root {index}"), NO_PARENT, float(index))
        lease.release((block,), float(index))
        sent = exchange_call(lease, index + 0.5)
        lease.exchanged(BlocksExchanged(index + 0.5, sent.call, (), 2, 0))
    assert [lease.may_hold(name(f"root {index}")) for index in range(3)] == [False, True, True]


def test_what_is_distrusted_is_told_and_claimed_no_more() -> None:
    lease = stocked(*range(8))
    table = lease.take(3)
    for block, parent in zip(table, (NO_PARENT, name("0"), name("1")), strict=True):
        lease.commit(block, name(str(block)), parent, 1.0)
    first = exchange_call(lease, 2.0)
    lease.distrust(table[:2], 2.0)
    lease.release(table, 2.0)
    assert lease.unsettled and lease.calls(2.0) == []  # one at a time
    assert lease.exchanged(BlocksExchanged(2.0, first.call, (), 92, 0))
    call = exchange_call(lease, 2.0)
    assert (call.bad, call.releases) == (blocks(0, 1), blocks(0, 1, 2))
    lease.check([])
    assert lease.exchanged(BlocksExchanged(2.0, call.call, (), 94, 1))
    assert not lease.unsettled


def test_a_commit_of_what_is_distrusted_is_not_sent() -> None:
    lease = stocked(*range(8))
    table = lease.take(2)
    lease.commit(table[0], name("a"), NO_PARENT, 1.0)
    lease.commit(table[1], name("b"), name("a"), 1.0)
    lease.distrust(table[:1], 1.0)
    call = exchange_call(lease, 1.0)
    assert [commit[0] for commit in call.commits] == [table[1]] and call.bad == (table[0],)
    lease.check([table])


def test_an_attach_claims_nothing_of_what_is_distrusted() -> None:
    """Others hold it on, and let go of it as of any other."""
    lease = stocked(*range(8))
    match = lease.match(R, [(name("x"),)])
    lease.matched(BlocksMatched(1.0, match.call, (blocks(50),)))
    match = lease.match(R, [(name("x"),)])
    lease.matched(BlocksMatched(1.0, match.call, (blocks(50),)))
    lease.distrust(blocks(50), 1.0)
    lease.release(blocks(50), 1.0)
    lease.close()
    lease.reset(100, False, 2.0)
    call = attach_call(lease, 2.0)
    assert call.committed == () and call.held.count(BlockId(50)) == 2
    assert lease.attached_anew(PoolAttached(2.0, call.call, 90, 0))
    first = exchange_call(lease, 2.0)
    assert first.releases == blocks(50)
    assert lease.exchanged(BlocksExchanged(2.0, first.call, (), 90, 0))
    lease.release(blocks(50), 3.0)
    assert exchange_call(lease, 4.0).releases == blocks(50)
    lease.check([])
