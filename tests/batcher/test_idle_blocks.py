"""Leased blocks in stock: given to the next table at once, to kvstore when nothing in flight writes them."""

from random import Random

from batcher.idle_blocks import IdleBlocks
from chassis.ids import BlockId
from chassis.messages.request import Limits
from tests.batcher.toy_pipeline import World, make_config, make_request


def stock(*blocks: int) -> IdleBlocks:
    made = IdleBlocks()
    made.put_leased(map(BlockId, blocks))
    return made


def test_the_longest_idle_goes_first() -> None:
    idle = stock(4, 2)
    idle.put(BlockId(9))
    assert len(idle) == 3 and list(idle) == [4, 2, 9]
    assert idle.take(2) == [4, 2]
    assert idle.take(5) == [9]


def test_a_block_goes_back_after_the_steps_that_were_in_flight_when_it_came() -> None:
    idle = stock(1)
    idle.sent(1)
    idle.sent(2)
    idle.put(BlockId(7))
    idle.sent(3)
    assert idle.give_back(5) == [1]
    idle.returned(1)
    assert idle.give_back(5) == []
    idle.returned(2)
    assert idle.give_back(5) == [7], "step 3 was sent later, with another table"


def test_a_table_takes_what_a_step_in_flight_may_write() -> None:
    idle = stock()
    idle.sent(1)
    idle.put(BlockId(7))
    assert idle.take(1) == [7]


def test_nothing_of_an_epoch_writes_in_the_next() -> None:
    idle = stock()
    idle.sent(1)
    idle.put(BlockId(7))
    idle.new_epoch()
    idle.sent(1)
    idle.check()
    assert idle.give_back(1) == [7]


def test_blocks_of_a_cancelled_prompt_are_anybodys_at_once_and_kvstores_a_step_later() -> None:
    """Its chunks are on their way to three stages as it is cancelled."""
    config = make_config(step_tokens_max=32, lease_low_blocks=0, lease_high_blocks=1, steps_in_flight_max=3)
    world = World(Random(1), config, num_blocks=64, num_stages=3)
    world.form(pool_changed=True)
    while world.calls:
        world.answer()
    world.plan()
    world.execute()
    request = make_request("a", [1] * 120, Limits(4))
    world.add(request)
    for _ in range(12):
        world.plan()
        while world.calls:
            world.answer()
    assert len(world.ring) == 3
    world.stop(request.id)
    lease = world.scheduler._lease
    assert lease.available == world.num_blocks, "anybody may have them"
    for _ in range(3):
        held = len(world.kvstore.refs)
        assert held >= 24, "the steps on their way write them"
        world.execute()
        world.now += 1.0
        world.plan()
        while world.calls:
            world.answer()  # asserts that no step on its way writes what kvstore got
    assert len(world.kvstore.refs) <= 4
