"""Blocks that kvstore holds itself while contents move: no batcher can let go of them, and none is lost."""

import random

import pytest

from chassis.errors import RpcRejected
from chassis.ids import BlockHash, BlockId, Epoch
from chassis.messages.kvstore import NO_PARENT, Attach, Commit, Exchange, PoolRef
from kvstore.ledger import Ledger

REF = PoolRef("g", Epoch(1), 1)


def content(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


def ledger_of(num_blocks: int) -> Ledger:
    ledger = Ledger()
    ledger.attach(Attach(REF, ("w.1",), num_blocks, 16, "n"))
    return ledger


def commit(ledger: Ledger, *numbers: int) -> tuple[BlockId, ...]:
    """Leased, filled and let go of: cached."""
    leased = ledger.exchange(Exchange(REF, lease_count=len(numbers))).leased
    commits = tuple(Commit(b, content(n), NO_PARENT) for b, n in zip(leased, numbers, strict=True))
    ledger.exchange(Exchange(REF, commits, leased))
    return leased


def test_what_is_held_is_not_evicted_and_is_cached_again_afterwards() -> None:
    ledger = ledger_of(3)
    pool = ledger.pools["g"]
    a, b, c = commit(ledger, 1, 2, 3)
    pool.hold((a, b))
    leased = ledger.exchange(Exchange(REF, lease_count=3)).leased
    assert leased == (c,)
    pool.let_go((a, b), 5.0)
    ledger.check()
    assert pool.index.cached == 2 and pool.index.unused_since(a) == 5.0
    assert pool.index.cached_blocks() == (b, a), "the tail first"


def test_a_batcher_can_neither_release_nor_commit_what_is_only_ours() -> None:
    ledger = ledger_of(3)
    pool = ledger.pools["g"]
    (a,) = commit(ledger, 1)
    pool.hold((a,))
    (taken,) = pool.take(1)
    for call in (
        Exchange(REF, releases=(a,)),
        Exchange(REF, releases=(taken,)),
        Exchange(REF, (Commit(taken, content(9), NO_PARENT),)),
    ):
        with pytest.raises(RpcRejected, match="is not leased"):
            ledger.exchange(call)
    ((shared,),) = ledger.match(REF, ((content(1),),))
    assert shared == a
    with pytest.raises(RpcRejected, match="has 1 references, not 2"):
        ledger.exchange(Exchange(REF, releases=(a, a)))
    ledger.exchange(Exchange(REF, releases=(a,)))
    pool.let_go((a, taken), 0.0)
    ledger.check()
    assert (len(pool.table.free), pool.index.cached, pool.num_own) == (2, 1, 0)


def test_what_is_filled_is_found_and_meets_the_same_content() -> None:
    ledger = ledger_of(4)
    pool = ledger.pools["g"]
    taken = pool.take(2)
    pool.fill(taken[0], content(1), NO_PARENT)
    commit(ledger, 2)  # somebody computed it meanwhile
    pool.fill(taken[1], content(2), content(1))
    pool.let_go(taken, 0.0)
    ledger.check()
    assert (len(pool.table.free), pool.index.cached) == (2, 2)
    ((one, two),) = ledger.match(REF, ((content(1), content(2)),))
    assert one == taken[0] and two == taken[1]


def test_an_attach_ends_all_of_it() -> None:
    ledger = ledger_of(3)
    pool = ledger.pools["g"]
    (a,) = commit(ledger, 1)
    pool.hold((a,))
    pool.take(1)
    again = PoolRef("g", Epoch(1), 2)
    attached = ledger.attach(Attach(again, ("w.1",), 3, 16, "n", prior_epoch=Epoch(1), prior_attachment=1))
    assert (attached.free, attached.cached) == (2, 1)
    ledger.check()


@pytest.mark.parametrize("seed", range(200))
def test_nothing_is_lost_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    ledger = ledger_of(8)
    pool = ledger.pools["g"]
    ours: list[tuple[BlockId, ...]] = []
    theirs: list[BlockId] = []
    empty: list[BlockId] = []
    for _ in range(120):
        match rng.randrange(7):
            case 0:
                empty += ledger.exchange(Exchange(REF, lease_count=rng.randrange(4))).leased
            case 1 if empty:
                block = empty.pop(rng.randrange(len(empty)))
                ledger.exchange(Exchange(REF, (Commit(block, content(rng.randrange(1, 7)), NO_PARENT),)))
                theirs.append(block)
            case 2 if theirs:
                block = theirs.pop(rng.randrange(len(theirs)))
                ledger.exchange(Exchange(REF, releases=(block,)))
            case 3:
                chains = ((content(rng.randrange(1, 7)),),)
                theirs += ledger.match(REF, chains)[0]
            case 4:
                known = [b for _, b in pool.index.hashes()]
                some = tuple(rng.sample(known, min(len(known), rng.randrange(3))))
                pool.hold(some)
                ours.append(some)
            case 5:
                taken = pool.take(rng.randrange(3))
                for block in taken:
                    if rng.random() < 0.7:
                        pool.fill(block, content(rng.randrange(1, 7)), NO_PARENT)
                ours.append(taken)
            case 6 if ours:
                pool.let_go(ours.pop(rng.randrange(len(ours))), 0.0)
        ledger.check()
    for blocks in ours:
        pool.let_go(blocks, 0.0)
    ledger.exchange(Exchange(REF, releases=(*theirs, *empty)))
    ledger.check()
    assert pool.num_own == 0 and len(pool.table.free) + pool.index.cached == 8
