"""How long what was released stays: tails before heads, by use, by priority, pins last."""

import random

import pytest

from chassis.errors import RpcRejected
from chassis.ids import BlockHash, BlockId, Epoch
from chassis.messages.kvstore import (
    KEEP_DEFAULT,
    KEEP_LEAST,
    KEEP_PINNED,
    NO_PARENT,
    Attach,
    Commit,
    Exchange,
    PoolRef,
    keep_of_priority,
)
from kvstore.eviction import EvictionOrder
from kvstore.ledger import Ledger

REF = PoolRef("g", Epoch(1), 1)


def content(*labels: int) -> BlockHash:
    return BlockHash(bytes(labels).rjust(32, b"\1"))


def chain(*labels: int) -> list[BlockHash]:
    return [content(*labels[: i + 1]) for i in range(len(labels))]


def opened(num_blocks: int) -> Ledger:
    ledger = Ledger()
    ledger.attach(Attach(REF, ("w.1",), num_blocks, 16, "n"))
    return ledger


def serve(
    ledger: Ledger, labels: tuple[int, ...], keep: int | None = None, release: bool = True
) -> tuple[BlockId, ...]:
    """A prompt's life: match, lease, commit, release."""
    hashes = chain(*labels)
    (found,) = ledger.match(REF, [hashes])
    table = found + ledger.exchange(Exchange(REF, lease_count=len(hashes) - len(found))).leased
    parents = [NO_PARENT, *hashes]
    commits = tuple(Commit(table[i], hashes[i], parents[i]) for i in range(len(found), len(table)))
    ledger.exchange(Exchange(REF, commits))
    if release:
        let_go(ledger, table, keep)
    ledger.check()
    return table


def let_go(ledger: Ledger, table: tuple[BlockId, ...], keep: int | None) -> None:
    ledger.exchange(Exchange(REF, (), table, 0, () if keep is None else (keep,) * len(table)))


def order(ledger: Ledger) -> list[BlockHash]:
    """By evicting everything."""
    index = ledger.pools["g"].index
    expected = [index.content(b) for b in index.cached_blocks()]
    evicted = [index.evict()[1] for _ in range(index.cached)]
    assert evicted == expected
    return evicted


def test_without_priorities_the_least_recently_used_goes_first_and_tails_before_heads() -> None:
    ledger = opened(8)
    serve(ledger, (1, 2))
    serve(ledger, (3, 4))
    serve(ledger, (1,))
    assert order(ledger) == [content(1, 2), content(3, 4), content(3), content(1)]


def test_a_better_priority_stays_longer_but_not_for_ever() -> None:
    """Priority 4 counts as let go of a pool's blocks later: here five."""
    ledger = opened(5)
    serve(ledger, (1,), keep_of_priority(4))
    for number in range(2, 11):
        serve(ledger, (number,))
    held = {h for h, _ in ledger.pools["g"].index.hashes()}
    assert held == {content(number) for number in (1, 7, 8, 9, 10)}
    serve(ledger, (11,))
    serve(ledger, (12,))
    assert content(1) not in {h for h, _ in ledger.pools["g"].index.hashes()}


def test_batch_work_does_not_push_out_conversations() -> None:
    ledger = opened(10)
    for number in range(5):
        serve(ledger, (number,))
    for number in range(100, 140):
        serve(ledger, (number,), keep_of_priority(9))
    held = {h for h, _ in ledger.pools["g"].index.hashes()}
    assert {content(number) for number in range(5)} <= held


def test_a_pin_goes_when_nothing_else_is_left_and_can_block_nobody() -> None:
    ledger = opened(4)
    serve(ledger, (1, 2), KEEP_PINNED)
    for number in range(10, 40):
        serve(ledger, (number,), keep_of_priority(0))
    (found,) = ledger.match(REF, [chain(1, 2)])
    assert len(found) == 2
    let_go(ledger, found, None)
    assert len(ledger.exchange(Exchange(REF, lease_count=4)).leased) == 4
    assert ledger.stats("g").cached == 0


def test_shared_content_stays_as_long_as_the_best_of_its_users_wants() -> None:
    ledger = opened(20)
    first = serve(ledger, (1, 2), release=False)
    serve(ledger, (1, 3), keep_of_priority(9))
    let_go(ledger, first, keep_of_priority(0))
    serve(ledger, (1,), keep_of_priority(9))
    assert order(ledger) == [content(1, 3), content(1, 2), content(1)]


def test_new_content_of_a_block_owes_nothing_to_the_old() -> None:
    ledger = opened(1)
    serve(ledger, (1,), KEEP_PINNED)
    (block,) = serve(ledger, (2,), KEEP_LEAST)
    assert ledger.pools["g"].index.keep_of(block) == KEEP_LEAST


def test_twins_keep_what_the_better_wanted() -> None:
    """The holder leaves with a pin, its twin later with the least: one content, one wish."""
    ledger = opened(4)
    tables = [ledger.exchange(Exchange(REF, (), (), 1)).leased for _ in range(2)]
    for table in tables:
        ledger.exchange(Exchange(REF, (Commit(table[0], content(1), NO_PARENT),)))
    let_go(ledger, tables[0], KEEP_PINNED)
    let_go(ledger, tables[1], KEEP_LEAST)
    ledger.check()
    assert ledger.pools["g"].index.keep_of(tables[1][0]) == KEEP_PINNED


def test_wishes_and_order_survive_an_attach() -> None:
    ledger = opened(20)
    serve(ledger, (1,), keep_of_priority(1))
    serve(ledger, (2,), keep_of_priority(8))
    serve(ledger, (3,))
    dead = serve(ledger, (4,), release=False)
    before = [content(2), content(3), content(1)]
    ledger.attach(Attach(PoolRef("g", Epoch(2), 1), ("w.1",), 20, 16, "n", (), (), Epoch(1), 1))
    ledger.check()
    index = ledger.pools["g"].index
    assert index.keep_of(dead[0]) == KEEP_DEFAULT
    assert [h for h in order(ledger) if h != content(4)] == before


@pytest.mark.parametrize(("keeps", "words"), [((1, 1), "2 for 1"), ((KEEP_LEAST + 1,), "above 10")])
def test_bad_wishes_are_refused_whole(keeps: tuple[int, ...], words: str) -> None:
    ledger = opened(4)
    (block,) = ledger.exchange(Exchange(REF, lease_count=1)).leased
    with pytest.raises(RpcRejected, match=f"INVALID_ARGUMENT: release_keeps: {words}"):
        ledger.exchange(Exchange(REF, (Commit(block, content(1), NO_PARENT),), (block,), 0, keeps))
    assert ledger.pools["g"].index.content(block) is None
    assert ledger.pools["g"].table.references[block] == 1


@pytest.mark.parametrize("seed", range(20))
def test_no_head_goes_before_its_tail_whatever_was_wished(seed: int) -> None:
    """What lies behind a gap is kept in vain: chains that share beginnings, several running at once."""
    chance = random.Random(seed)
    ledger = opened(24)
    running: list[tuple[BlockId, ...]] = []
    evicted = 0
    for _ in range(400):
        if len(running) > 4 or (running and chance.random() < 0.4):
            let_go(ledger, running.pop(chance.randrange(len(running))), chance.randrange(KEEP_LEAST + 1))
        else:
            labels = tuple(chance.randrange(1, 4) for _ in range(chance.randint(1, 4)))
            running.append(serve(ledger, labels, release=False))
        index = ledger.pools["g"].index
        known = {h for h, _ in index.hashes()}
        assert all(index.parent(h) in (NO_PARENT, *known) for h in known)
        evicted = ledger.stats().evictions
    assert evicted


def test_the_order_costs_no_walk() -> None:
    """Adding, removing and evicting touch the ends of a few queues, however much is cached."""
    lines = EvictionOrder(50_000)
    for block in range(50_000):
        lines.want(BlockId(block), 1 + block % 10)
        lines.add(BlockId(block), 0.0)
    lines.remove(BlockId(25_000))
    assert BlockId(25_000) not in lines and len(lines) == 49_999
    popped = [lines.pop() for _ in range(100)]
    assert all(lines.keep_of(block) == KEEP_LEAST for block in popped), "the least wanted first"
