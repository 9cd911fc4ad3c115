"""Which contents are saved and restored, without a wire between."""

import random

import pytest

from chassis.ids import BlockHash, BlockId, Epoch
from chassis.messages.kvstore import NO_PARENT, Attach, Commit, Exchange, PoolRef
from kvstore.ledger import Ledger
from kvstore.moves import BACKLOG_MAX, CALL_BLOCKS, Move, Moves, Restore

REF = PoolRef("g", Epoch(1), 1)


def content(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


def chain(first: int, count: int) -> tuple[BlockHash, ...]:
    return tuple(content(number) for number in range(first, first + count))


class World:
    def __init__(self, num_blocks: int, least: int = 1) -> None:
        self.ledger = Ledger()
        self.ledger.attach(Attach(REF, ("w.1",), num_blocks, 16, "n"))
        self.pool = self.ledger.pools["g"]
        self.moves = Moves(self.pool, least)
        self.tiers: dict[BlockHash, None] = {}

    def whole(self, named: BlockHash) -> bool:
        return named in self.tiers

    def compute(self, contents: tuple[BlockHash, ...]) -> tuple[BlockId, ...]:
        leased = self.ledger.exchange(Exchange(REF, lease_count=len(contents))).leased
        commits = tuple(map(Commit, leased, contents, (NO_PARENT, *contents[:-1])))
        self.ledger.exchange(Exchange(REF, commits, leased))
        self.moves.learn()
        return leased

    def save(self) -> Move | None:
        move = self.moves.next_save(self.whole)
        if move is not None:
            self.tiers |= dict.fromkeys(move.contents[i] for i in self.moves.saved(move, 0.0))
        return move

    def crowd_out(self) -> None:
        leased = self.ledger.exchange(Exchange(REF, lease_count=1 << 10)).leased
        self.ledger.exchange(Exchange(REF, releases=leased))

    def restore(self, contents: tuple[BlockHash, ...]) -> Restore | None:
        return self.moves.restore(contents, self.whole)


def test_the_longest_unused_is_saved_first_once_and_the_order_of_eviction_stays() -> None:
    world = World(64)
    world.compute(chain(1, 3))
    world.compute(chain(11, CALL_BLOCKS))
    before = world.pool.index.cached_blocks()
    first = world.save()
    assert first is not None and first.contents[:4] == (content(3), content(2), content(1), content(26))
    assert first.origins[0].parent == content(2) and first.origins[2].parent == NO_PARENT
    while world.moves.backlog:
        world.save()
    assert len(world.tiers) == 3 + CALL_BLOCKS and world.pool.index.cached_blocks() == before
    world.compute(chain(1, 3))
    assert world.save() is None, "it is there already"


def test_what_is_evicted_before_its_turn_is_not_saved() -> None:
    world = World(4)
    world.compute(chain(1, 4))
    world.crowd_out()
    assert world.moves.backlog == 4 and world.save() is None and world.moves.backlog == 0


def test_what_proves_wrong_while_it_is_saved_is_not_kept() -> None:
    world = World(4)
    world.compute(chain(1, 2))
    ((one, two),) = world.ledger.match(REF, (chain(1, 2),))
    move = world.moves.next_save(world.whole)
    assert move is not None
    world.ledger.exchange(Exchange(REF, releases=(one, two), bad=(two,)))
    assert world.moves.learn() == (content(2),)
    assert [move.contents[i] for i in world.moves.saved(move, 0.0)] == [content(1)]
    world.ledger.check()


def test_the_backlog_is_bounded_and_forgets_the_oldest() -> None:
    world = World(BACKLOG_MAX + 8)
    leased = world.compute(chain(1, BACKLOG_MAX + 5))
    assert len(leased) == BACKLOG_MAX + 5
    assert (world.moves.backlog, world.moves.dropped) == (BACKLOG_MAX, 5)
    world.moves.check()


def test_a_pool_that_comes_with_content_has_it_saved() -> None:
    world = World(8)
    world.compute(chain(1, 3))
    assert Moves(world.pool, 1).backlog == 3


def test_only_what_is_long_enough_is_restored_and_room_is_left() -> None:
    world = World(16, least=3)
    world.tiers = dict.fromkeys(chain(1, 40))
    assert world.restore(chain(1, 2)) is None
    assert world.restore((*chain(1, 2), content(99), *chain(3, 9))) is None, "behind a gap"
    restore = world.restore(chain(1, 40))
    assert restore is not None and len(restore.held) == 14
    assert world.restore(chain(1, 40)) is None and world.moves.under_way(chain(1, 40)) is restore
    for move in restore.moves:
        world.moves.restored(restore, move, range(len(move.blocks)), 1.0)
    assert world.ledger.match(REF, (chain(1, 40),)) == (restore.held,)


def test_what_the_pool_holds_of_a_chain_is_not_moved_and_not_evicted_meanwhile() -> None:
    world = World(8)
    world.compute((content(1),))
    world.compute((content(3),))
    world.tiers = dict.fromkeys(chain(1, 4))
    restore = world.restore(chain(1, 4))
    assert restore is not None
    assert [m.contents for m in restore.moves] == [(content(2), content(4))]
    world.crowd_out()
    world.moves.restored(restore, restore.moves[0], (0, 1), 1.0)
    assert len(world.ledger.match(REF, (chain(1, 4),))[0]) == 4
    world.ledger.check()


@pytest.mark.parametrize("seed", range(100))
def test_whatever_happens_no_block_is_lost_and_nothing_is_found_that_is_not_there(seed: int) -> None:
    rng = random.Random(seed)
    world = World(24, least=rng.randrange(1, 4))
    memory: dict[BlockId, BlockHash] = {}
    saving: list[Move] = []
    loading: list[tuple[Restore, Move]] = []
    for _ in range(150):
        match rng.randrange(6):
            case 0:
                free = world.ledger.exchange(Exchange(REF)).free + world.pool.index.cached
                contents = chain(rng.choice((1, 11, 21)), min(free, rng.randrange(1, 8)))
                memory.update(zip(world.compute(contents), contents, strict=True))
            case 1 if (move := world.moves.next_save(world.whole)) is not None:
                assert [memory[b] for b in move.blocks] == list(move.contents)
                saving.append(move)
            case 2 if saving:
                move = saving.pop(rng.randrange(len(saving)))
                assert [memory[b] for b in move.blocks] == list(move.contents), "evicted amid a save"
                good = world.moves.saved(move, 0.0)
                world.tiers |= dict.fromkeys(move.contents[i] for i in good)
            case 3:
                restore = world.restore(chain(rng.choice((1, 11, 21)), rng.randrange(1, 8)))
                loading += [(restore, move) for move in restore.moves] if restore is not None else []
            case 4 if loading:
                restore, move = loading.pop(rng.randrange(len(loading)))
                good = tuple(i for i in range(len(move.blocks)) if rng.random() < 0.8)
                memory.update((b, c) for b, c in zip(move.blocks, move.contents, strict=True))
                world.moves.restored(restore, move, good, 0.0)
            case 5:
                wanted = chain(rng.choice((1, 11, 21)), 7)
                (found,) = world.ledger.match(REF, (wanted,))
                assert [memory[b] for b in found] == list(wanted[: len(found)]), "a lie"
                world.ledger.exchange(Exchange(REF, releases=found))
                world.moves.learn()
        world.ledger.check()
        world.moves.check()
    for move in saving:
        world.moves.saved(move, 0.0)
    for restore, move in loading:
        world.moves.restored(restore, move, (), 0.0)
    assert world.pool.num_own == 0
    world.ledger.check()
