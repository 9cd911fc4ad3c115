"""What admission leaves free for the running to grow into."""

from collections.abc import Iterator

from batcher.growth import KEEP_STEPS, MARGIN_MAX, MARGIN_MIN, GrowthReserve
from batcher.sequence import Sequence
from chassis.ids import BlockId
from chassis.messages.request import Limits
from tests.batcher.toy_pipeline import make_sequence

SIZE = 4


def sequence(name: str, num_blocks: int, left: int, sure: bool = True) -> Sequence:
    """Its blocks are full, and it may write `left` tokens more; `sure`: it will."""
    made = make_sequence(name, SIZE * num_blocks - 1, limits=Limits(left, ignore_eos=sure))
    made.blocks.extend(map(BlockId, range(num_blocks)))
    made.num_computed = SIZE * num_blocks - 1
    return made


def reserve() -> GrowthReserve:
    made = GrowthReserve(SIZE)
    made.open(1000)
    return made


def test_one_that_ends_at_its_limit_needs_just_that() -> None:
    assert reserve().blocks([], sequence("a", 2, 40)) == 10
    assert reserve().blocks([sequence("b", 2, 40)], sequence("a", 2, 40)) == 20


def test_who_ends_first_leaves_its_blocks_to_the_others() -> None:
    """The short one ends, and gives back 30 and what it wrote, before the long one needs them."""
    assert reserve().blocks([sequence("long", 2, 100)], sequence("short", 30, 8)) <= 5


def test_who_may_end_early_counts_for_less_and_for_more_while_nothing_is_known() -> None:
    many = [sequence(f"r{i}", 2, 2000, sure=False) for i in range(20)]
    head = sequence("head", 2, 2000, sure=False)
    made = reserve()
    unknown = made.blocks(many, head)
    assert unknown < 21 * 500
    for i in range(200):
        other = sequence(f"o{i}", 2, 2000, sure=False)
        for token in range(30):
            other.ids.append(token)
            other.watch.push(token)
        made.left(other)
    made.preempted(0)  # looks anew
    assert made.blocks(many, head) < unknown / 5


def test_whoever_joined_counts_at_once() -> None:
    made = reserve()
    head = sequence("a", 2, 40)
    assert made.blocks([], head) == 10
    made.joined(head)
    assert made.blocks([], sequence("b", 2, 40)) == 20, "the running are looked at once a step"


def test_who_left_is_missed_at_the_next_step_and_nobody_is_looked_at_before() -> None:
    made, head = reserve(), sequence("a", 2, 40)
    running = [sequence("b", 2, 40), sequence("c", 2, 40)]
    asked = 0

    def all_running() -> Iterator[Sequence]:
        nonlocal asked
        asked += 1
        yield from running

    for _ in range(1 + KEEP_STEPS):
        assert made.blocks(all_running(), head) == 30
        made.step()
    assert asked == 1
    assert made.blocks(all_running(), head) == 30 and asked == 2
    made.step()
    made.left(running.pop())
    assert made.blocks(all_running(), head) == 20 and asked == 3


def test_the_margin_grows_with_what_is_lost_and_fades() -> None:
    made = reserve()
    before = made.margin
    made.preempted(0)
    assert made.margin == before
    made.preempted(200)
    assert made.margin > before + 0.5
    for _ in range(50):
        made.preempted(500)
        made.check()
    assert made.margin == MARGIN_MAX
    for _ in range(10_000):
        made.step()
    made.check()
    assert made.margin < MARGIN_MIN + 0.01
