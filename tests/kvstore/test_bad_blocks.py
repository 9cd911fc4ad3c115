"""What workers found not to hold what it was said to is forgotten, whoever uses it, and then free."""

import pytest

from chassis.errors import RpcRejected
from chassis.messages.kvstore import NO_PARENT, Commit, Exchange, Exchanged
from kvstore.ledger import Ledger
from tests.kvstore.test_ledger import REF, attach, chain, ids

CHAIN = chain("a", "b", "c")


def filled() -> Ledger:
    """Blocks 0, 1, 2 hold the chain, leased once."""
    ledger = Ledger()
    attach(ledger)
    assert ledger.exchange(Exchange(REF, lease_count=4)).leased == ids(0, 1, 2, 3)
    parents = (NO_PARENT, *CHAIN)
    commits = tuple(map(Commit, ids(0, 1, 2), CHAIN, parents))
    ledger.exchange(Exchange(REF, commits))
    return ledger


def test_it_is_not_found_again_and_free_when_the_last_lets_go() -> None:
    ledger = filled()
    assert ledger.match(REF, [CHAIN]) == (ids(0, 1, 2),)
    done = ledger.exchange(Exchange(REF, releases=ids(0, 1, 2), bad=ids(1)))
    assert done == Exchanged((), free=4, cached=0)
    ledger.check()
    assert ledger.match(REF, [CHAIN]) == (ids(0),), "the tail is found again once the gap is filled"
    done = ledger.exchange(Exchange(REF, releases=ids(0, 0, 1, 2)))
    assert done == Exchanged((), free=5, cached=2)
    assert ledger.stats().bad_blocks == 1
    ledger.check()


def test_a_gap_is_filled_by_who_computes_it_again() -> None:
    ledger = filled()
    ledger.exchange(Exchange(REF, releases=ids(1), bad=ids(1)))
    ledger.exchange(Exchange(REF, (Commit(ids(3)[0], CHAIN[1], CHAIN[0]),)))
    assert ledger.match(REF, [CHAIN]) == (ids(0, 3, 2),)
    ledger.check()


@pytest.mark.parametrize("bad, found", [(0, 1), (1, 0)])
def test_of_twins_the_other_stays(bad: int, found: int) -> None:
    ledger = Ledger()
    attach(ledger)
    ledger.exchange(Exchange(REF, lease_count=2))
    ledger.exchange(Exchange(REF, tuple(Commit(block, CHAIN[0], NO_PARENT) for block in ids(0, 1))))
    ledger.exchange(Exchange(REF, bad=ids(bad)))
    ledger.check()
    assert ledger.match(REF, [CHAIN[:1]]) == (ids(found),)
    done = ledger.exchange(Exchange(REF, releases=ids(bad, found, found)))
    assert (done.free, done.cached) == (7, 1)
    ledger.check()


def test_what_is_not_leased_is_none_of_the_callers_business() -> None:
    ledger = filled()
    for block in (5, 99):
        with pytest.raises(RpcRejected, match="bad_blocks"):
            ledger.exchange(Exchange(REF, releases=ids(0), bad=ids(0, block)))
    assert ledger.match(REF, [CHAIN]) == (ids(0, 1, 2),), "a refused call changes nothing"
