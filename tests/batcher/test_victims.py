"""Who gives way."""

from batcher.queueing import Place
from batcher.sequence import Sequence
from batcher.victims import choose_victim
from chassis.ids import BlockId
from tests.batcher.toy_pipeline import make_sequence

SHARED = 100  # blocks from here on are held by others too


def sequence(place: int, num_blocks: int = 2, shared: int = 0, batch: bool = False) -> Sequence:
    made = make_sequence(f"r{place}", order=(0, place))
    made.blocks.extend(BlockId(SHARED + i if i < shared else i) for i in range(num_blocks))
    made.num_computed = 4 * num_blocks
    made.place = Place(batch=batch)
    return made


def num_own(table: list[BlockId]) -> int:
    return sum(block < SHARED for block in table)


def victim(running: list[Sequence], requester: Sequence, wanted: int = 4) -> Sequence | None:
    return choose_victim(running, requester, num_own, wanted)


def test_nobody_gives_way_to_one_behind_it_nor_who_has_nothing() -> None:
    first, second = sequence(1), sequence(2)
    assert victim([first, second], first) is second
    assert victim([first, second], second) is None
    assert victim([first], first) is None
    assert victim([first, sequence(2, num_blocks=0)], first) is None
    assert victim([], first) is None


def test_the_batch_class_gives_way_first() -> None:
    batch = sequence(2, num_blocks=50, batch=True)
    assert victim([sequence(1), batch, sequence(3)], sequence(0)) is batch


def test_who_frees_what_is_needed_goes_before_who_would_lose_more_or_free_less() -> None:
    large, fitting, small = sequence(1, 40), sequence(2, 8), sequence(3, 1)
    assert victim([large, fitting, small], sequence(0), wanted=8) is fitting
    assert victim([large, fitting, small], sequence(0), wanted=1) is small


def test_what_others_hold_is_neither_lost_nor_freed() -> None:
    sharing, own = sequence(1, 10, shared=6), sequence(2, 10)
    assert victim([sharing, own], sequence(0), wanted=4) is sharing
    assert victim([sharing, own], sequence(0), wanted=10) is own


def test_only_the_last_few_are_looked_at() -> None:
    running = [sequence(1, 4), *[sequence(2 + i, 40) for i in range(16)]]
    assert victim(running, sequence(0)) is not running[0]
