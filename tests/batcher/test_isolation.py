"""Tenants do not share: what one computed shortens nothing for another, and is never offered to it.

Not covered: the pool's room is shared, so who fills it evicts others' content, and sees its own evicted.
"""

from random import Random

import pytest

from batcher.block_hash import BlockHasher, Extras, namespace
from batcher.events import MatchBlocks
from chassis.ids import BlockHash, Epoch, RequestId
from chassis.messages.kvstore import NO_PARENT, Attach, Commit, Exchange, PoolRef
from chassis.messages.request import Limits
from chassis.sequence_digest import carried_on
from kvstore.ledger import Ledger
from tests.batcher.test_scheduler import world
from tests.batcher.toy_pipeline import World, make_request

PROMPT = list(range(22))
TEN = Limits(10, ignore_eos=True)
Seen = list[tuple[float, int, int, bool]]


def seen_by(made: World, name: str, tenant: str) -> tuple[Seen, int]:
    """All that the owner of a request can see of how it went: rows of steps, when, and its usage."""
    made.add(make_request(name, PROMPT, TEN, tenant=tenant))
    rows: Seen = []
    began = made.now
    for _ in range(1000):
        if RequestId(name) in made.ended:
            break
        while made.plan():
            rows += [
                (made.now - began, row.start, len(row.token_ids), row.samples)
                for row in made.ring[-1].rows
                if row.request_id == name
            ]
        made.turn()
    return rows, made.ended[RequestId(name)].usage.cached_tokens


@pytest.mark.parametrize("tenant, shares", [("a", True), ("b", False)])
def test_a_request_goes_as_if_nobody_else_had_asked_the_same(tenant: str, shares: bool) -> None:
    alone = seen_by(world(), "second", tenant)
    made = world()
    seen_by(made, "first", "a")
    made.finish(1000)
    after = seen_by(made, "second", tenant)
    assert alone[1] == 0
    assert (after[1] > 0) == shares
    assert (after != alone) == shares


def test_without_salt_all_share() -> None:
    made = world(salt_by_tenant=False)
    seen_by(made, "first", "a")
    made.finish(1000)
    assert seen_by(made, "second", "b")[1] == 20


@pytest.mark.parametrize("seed", range(20))
def test_nobody_is_offered_what_another_tenant_computed(seed: int) -> None:
    """Of any traffic: what is asked of kvstore for one is named by itself alone."""
    dice = Random(seed)
    made = world(num_blocks=40)
    owner: dict[BlockHash, str] = {}
    for turn in range(30):
        tenant = dice.choice("abc")
        made.add(make_request(f"{tenant}{turn}", PROMPT[: dice.randint(4, 22)], TEN, tenant=tenant))
        for block_hash in made.chain_of(PROMPT, tenant):
            assert owner.setdefault(block_hash, tenant) == tenant
        for _ in range(dice.randint(1, 15)):
            for call, _ in made.calls:
                if isinstance(call, MatchBlocks):
                    for request_id, chain in zip(call.request_ids, call.chains, strict=True):
                        assert {owner[block_hash] for block_hash in chain} <= {request_id[0]}
            if not made.plan() and (made.calls or made.ring):
                made.turn()
    made.finish(5000)
    made.check_answers()


def test_what_caches_tell_on_the_bus_names_no_content_of_another_tenant() -> None:
    """Names are salted: one who knows a prompt finds it under its own tenant's name alone."""
    space = namespace("m", "float32", "plain")
    ledger = Ledger()
    ref = PoolRef("g", Epoch(1), 1)
    ledger.changes.wanted = True
    ledger.attach(Attach(ref, ("w",), 8, 4, "n"))
    mine, theirs = (chain_of(space, tenant) for tenant in ("a", "b"))
    leased = ledger.exchange(Exchange(ref, lease_count=2)).leased
    ledger.exchange(Exchange(ref, tuple(map(Commit, leased, mine, (NO_PARENT, *mine)))))
    assert ledger.match(ref, [theirs]) == ((),) and ledger.match(ref, [mine]) == (leased,)
    held = {content for content, *_ in ledger.pools["g"].piece(0, 0.0)}
    assert held == set(mine) and held.isdisjoint(theirs)


def chain_of(space: bytes, tenant: str) -> tuple[BlockHash, ...]:
    hashes: list[BlockHash] = []
    BlockHasher(space, 4, Extras(salt=tenant.encode())).extend(hashes, PROMPT, 2)
    return tuple(hashes)


def test_workers_tell_tenants_adapters_and_media_apart_too() -> None:
    """A block of another tenant is as wrong for them as one of other ids."""
    space = namespace("m", "float32", "plain")
    kinds = (
        Extras(),
        Extras(salt=b"a"),
        Extras(salt=b"b"),
        Extras(salt=b"a", adapter=b"x"),
        Extras(salt=b"a", media=b"x"),
    )
    digests = {carried_on(BlockHasher(space, 4, extras).root, PROMPT) for extras in kinds}
    assert len(digests) == len(kinds)
