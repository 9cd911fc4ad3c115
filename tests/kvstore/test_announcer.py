"""What is told of a cache: enough for a listener to know it, bounded, and nothing while nobody listens."""

import random
from collections import deque

import pytest

from chassis.cache_view import CacheView
from chassis.ids import BlockHash, BlockId, BootId, Epoch
from chassis.messages import cache as messages
from chassis.messages.cache import CacheChanges, Holdings, HoldingsQuestion
from chassis.messages.kvstore import NO_PARENT, Attach, Commit, Exchange, PoolRef
from kvstore import announcer as announcing
from kvstore.announcer import CONTENTS_MAX, INTEREST_S, MESSAGES_MAX, Announcer
from kvstore.ledger import Ledger

BOOT = BootId("kv0")
REF = PoolRef("g", Epoch(1), 1)


def content(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


def attach(ledger: Ledger, num_blocks: int, ref: PoolRef = REF, **more: object) -> None:
    ledger.attach(Attach(ref, ("w.1",), num_blocks, 16, "n", **more))  # type: ignore[arg-type]


def fill(ledger: Ledger, numbers: list[int], ref: PoolRef = REF) -> tuple[BlockId, ...]:
    """A chain of these contents, leased and committed."""
    leased = ledger.exchange(Exchange(ref, lease_count=len(numbers))).leased
    parents = [NO_PARENT, *map(content, numbers)]
    commits = [Commit(b, content(n), p) for b, n, p in zip(leased, numbers, parents, strict=False)]
    ledger.exchange(Exchange(ref, tuple(commits)))
    return leased


def held(ledger: Ledger, generation: str = "g") -> set[BlockHash]:
    return {h for h, _ in ledger.pools[generation].index.hashes()}


def opened(num_blocks: int = 8) -> tuple[Ledger, Announcer]:
    ledger = Ledger()
    announcer = Announcer(BOOT, ledger)
    attach(ledger, num_blocks)
    announcer.asked(HoldingsQuestion(), 0.0)
    return ledger, announcer


def test_a_call_is_one_message_with_its_net_effect() -> None:
    ledger, announcer = opened(2)
    blocks = fill(ledger, [1, 2])
    (told,) = announcer.messages(0.0)
    assert (told.boot, told.number, told.pool, told.namespace, told.block_size_tokens) == (
        BOOT,
        2,
        REF,
        "n",
        16,
    )
    assert told.tier == "pool"
    assert told.stored == ((content(1), NO_PARENT), (content(2), content(1))) and told.evicted == ()
    assert not told.cleared and not told.gone
    ledger.exchange(Exchange(REF, (), blocks, 1))
    (told,) = announcer.messages(0.0)
    assert (told.number, told.stored, told.evicted) == (3, (), (content(2),))
    assert announcer.messages(0.0) == ()


def test_nothing_is_noted_while_nobody_listens_and_the_numbers_show_it() -> None:
    ledger, announcer = opened()
    fill(ledger, [1])
    assert len(announcer.messages(INTEREST_S)) == 1
    fill(ledger, [2])
    assert announcer.messages(INTEREST_S + 1) == ()
    fill(ledger, [3])
    assert ledger.changes.take() == ()
    before = announcer.number
    assert announcer.asked(HoldingsQuestion(), 100.0).number == before + 1
    fill(ledger, [4])
    assert [m.number for m in announcer.messages(100.0)] == [before + 2]


def test_a_burst_is_a_few_messages_and_what_is_more_leaves_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    count = CONTENTS_MAX + 10
    ledger, announcer = opened(2 * count)
    fill(ledger, list(range(1, count + 1)))
    told = announcer.messages(0.0)
    assert [len(m.stored) for m in told] == [CONTENTS_MAX, 10]
    assert all(len(messages.build_changes(m)) < 100_000 for m in told)
    monkeypatch.setattr(announcing, "CONTENTS_MAX", 4)
    fill(ledger, list(range(5000, 5000 + 4 * MESSAGES_MAX + 1)))
    last = told[-1].number
    told = announcer.messages(0.0)
    assert [m.number for m in told] == list(range(last + 1, last + 1 + MESSAGES_MAX))
    fill(ledger, [9000])
    assert announcer.messages(0.0)[0].number == last + MESSAGES_MAX + 2


def test_a_pool_that_ends_is_gone_and_one_that_begins_is_cleared() -> None:
    ledger, announcer = opened()
    fill(ledger, [1])
    announcer.messages(0.0)
    attach(ledger, 8, PoolRef("h", Epoch(2), 1), held=(BlockId(3),), committed=((BlockId(3), content(7)),))
    told = {m.pool.generation: m for m in announcer.messages(0.0)}
    assert told["g"].gone and told["h"].cleared and not told["h"].gone
    assert told["h"].stored == ((content(7), None),)


def test_an_attach_that_keeps_the_content_tells_what_is_lost_only() -> None:
    ledger, announcer = opened()
    blocks = fill(ledger, [1, 2])
    announcer.messages(0.0)
    again = PoolRef("g", Epoch(2), 1)
    held_now = (*blocks[:1], BlockId(7))
    attach(
        ledger, 8, again, held=(*held_now, blocks[1]), committed=((blocks[0], content(1)),),
        prior_epoch=Epoch(1), prior_attachment=1,
    )  # fmt: skip
    (told,) = announcer.messages(0.0)
    assert (told.cleared, told.pool) == (False, again)
    assert told.stored == ((content(1), NO_PARENT),) and told.evicted == (content(2),)


class World:
    """A kvstore, a listener, and a bus that loses messages and delivers replies late."""

    def __init__(self, seed: int, num_blocks: int = 40) -> None:
        self.chance = random.Random(seed)
        self.num_blocks = num_blocks
        self.ledger = Ledger(pools_max=2)
        self.announcer = Announcer(BOOT, self.ledger)
        self.view = CacheView()
        self.now = 0.0
        self.lossy = True
        self.epoch = 0
        self.tables: dict[str, list[tuple[BlockId, ...]]] = {}
        self.refs: dict[str, PoolRef] = {}
        self.replies: deque[bytes] = deque()

    def tell(self) -> None:
        for changes in self.announcer.messages(self.now):
            if not (self.lossy and self.chance.random() < 0.1):
                self.view.heard(messages.parse_changes(messages.build_changes(changes)))

    def ask(self) -> None:
        question = messages.decode_question(messages.encode_question(self.view.question()))
        self.replies.append(messages.encode_holdings(self.announcer.asked(question, self.now)))
        while self.replies and not (self.lossy and self.chance.random() < 0.3):
            self.view.answered(messages.decode_holdings(self.replies.popleft()))

    def act(self) -> None:
        self.now += self.chance.choice((0.01, 0.01, 0.01, 1.0, 40.0 if self.lossy else 1.0))
        generation = self.chance.choice("ab")
        if generation not in self.ledger.pools or self.chance.random() < 0.05:
            self.attach(generation)
        else:
            self.serve(generation)
        self.tell()

    def attach(self, generation: str) -> None:
        self.epoch += 1
        known = self.ledger.pools.get(generation)
        prior = (
            (known.ref.epoch, known.ref.attachment) if known and self.chance.random() < 0.7 else (Epoch(0), 0)
        )
        keeps = known is not None and self.chance.random() < 0.5
        tables = self.tables.get(generation, []) if keeps else []
        blocks = dict.fromkeys(b for t in tables for b in t)
        committed: list[tuple[BlockId, BlockHash]] = []
        if known is not None:
            contents = [(block, known.index.content(block)) for block in blocks]
            committed = [(b, what) for b, what in contents if what is not None and self.chance.random() < 0.8]
        ref = PoolRef(generation, Epoch(self.epoch), 1)
        held_now = tuple(b for t in tables for b in t)
        stamps = (f"w.{generation if self.chance.random() < 0.9 else 'a'}",)
        self.ledger.attach(
            Attach(ref, stamps, self.num_blocks, 16, "n", held_now, tuple(committed), *prior), self.now
        )
        self.tables[generation], self.refs[generation] = list(tables), ref

    def serve(self, generation: str) -> None:
        """A prompt whose beginning is often known; sometimes two at once write the same."""
        ref, tables = self.refs[generation], self.tables[generation]
        numbers = [self.chance.randrange(3) for _ in range(self.chance.randint(1, 6))]
        chain = [content(hash_of(numbers[: i + 1])) for i in range(len(numbers))]
        asked = chain if self.chance.random() < 0.8 else []
        (found,) = self.ledger.match(ref, [asked])
        leased = self.ledger.exchange(Exchange(ref, lease_count=len(chain) - len(found)), self.now).leased
        table = (*found, *leased)
        parents = [NO_PARENT, *chain]
        commits = tuple(Commit(table[i], chain[i], parents[i]) for i in range(len(found), len(table)))
        keeps: tuple[int, ...] = ()
        tables.append(table)
        releases: tuple[BlockId, ...] = ()
        if len(tables) > 3 or self.chance.random() < 0.5:
            releases = tables.pop(self.chance.randrange(len(tables)))
            keeps = (self.chance.randrange(11),) * len(releases)
        self.ledger.exchange(Exchange(ref, commits, releases, 0, keeps), self.now)
        self.ledger.check()


def hash_of(numbers: list[int]) -> int:
    value = 1
    for number in numbers:
        value = 4 * value + number + 1
    return value


@pytest.mark.parametrize("seed", range(30))
def test_a_listener_knows_what_is_held_whatever_was_lost(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.ledger.PIECE_BLOCKS", 7)
    monkeypatch.setattr(announcing, "CONTENTS_MAX", 3)
    world = World(seed)
    checked = 0
    for _ in range(300):
        world.act()
        if world.chance.random() < 0.6:
            world.ask()
        if world.view.whole and not world.lossy:
            checked += compare(world)
        world.lossy = world.chance.random() < 0.98 if world.lossy else world.chance.random() < 0.02
        if not world.lossy:
            settle(world)
    world.lossy = False
    settle(world)
    assert compare(world)
    assert world.view.losses and checked, "nothing was put to the test"


def settle(world: World) -> None:
    """The last questions of a listener that hears everything now."""
    for _ in range(60):
        world.ask()
    assert world.view.whole


def compare(world: World) -> int:
    assert world.view.pools.keys() == world.ledger.pools.keys()
    for generation, pool in world.view.pools.items():
        assert pool.held.keys() == held(world.ledger, generation)
        index = world.ledger.pools[generation].index
        assert all(parent in (None, index.parent(what)) for what, parent in pool.held.items())
    return 1


def test_a_view_follows_chains() -> None:
    view = CacheView()
    view.answered(Holdings(BOOT, 4, ()))
    assert view.whole and view.longest("g", [content(1)]) == 0
    stored = ((content(1), NO_PARENT), (content(2), content(1)))
    view.heard(CacheChanges(BOOT, 5, REF, "n", 16, stored))
    assert view.longest("g", [content(1), content(2), content(3)]) == 2
    view.heard(CacheChanges(BOOT, 7, REF, "n", 16, (), (content(2),)))
    assert not view.whole and view.losses == 1 and view.longest("g", [content(1)]) == 0
