"""Who is cancelled, after whichever of its steps: blocks come back within a step, no other text changes."""

from random import Random

import pytest

from chassis.ids import RequestId
from chassis.messages.request import Limits, Reason
from tests.batcher.toy_pipeline import EOS, World, make_config, make_request

INTERLEAVINGS = 60  # of each of 36 step indices and shapes of the pipeline: over two thousand
MANY = 600


def act(world: World) -> None:
    """Whatever may happen next."""
    dice = world.dice.random()
    world.now += world.dice.choice([0.0, 0.001, 0.02])
    if dice < 0.3:
        world.answer()
    elif dice < 0.65:
        world.plan()
    else:
        world.execute()


def shared_world(dice: Random, num_stages: int) -> tuple[World, RequestId]:
    """Some of its four requests have one prompt; the pool is large or too small for all."""
    config = make_config(step_tokens_max=dice.choice([4, 32]), lease_low_blocks=1, lease_high_blocks=4)
    careless = dice.random() < 0.5
    world = World(dice, config, dice.choice([9, 64]), num_stages, careless=careless)
    world.form(pool_changed=True)
    prompts = [[dice.randrange(EOS) for _ in range(dice.randint(1, 18))] for _ in range(2)]
    for i in range(4):
        limits = Limits(10, ignore_eos=dice.random() < 0.7)
        world.add(make_request(f"r{i}", dice.choice(prompts), limits, priority=dice.randint(4, 6)))
    return world, RequestId(f"r{dice.randrange(4)}")


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("step", range(12))
def test_a_cancel_after_any_of_its_steps(step: int, num_stages: int) -> None:
    cancel_after(step, num_stages, range(INTERLEAVINGS))


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("step", range(12))
def test_a_cancel_after_any_of_its_steps_in_many_ways(step: int, num_stages: int) -> None:
    cancel_after(step, num_stages, range(INTERLEAVINGS, MANY))


def cancel_after(step: int, num_stages: int, seeds: range) -> None:
    for seed in seeds:
        world, victim = shared_world(Random(f"{step} {num_stages} {seed}"), num_stages)
        seen = 0
        for _ in range(400):
            if seen >= step or victim in world.ended:
                break
            before = len(world.ring)
            act(world)
            sent = world.ring[-1].rows if len(world.ring) > before else ()
            seen += any(row.request_id == victim for row in sent)
        for _ in range(world.dice.randrange(3)):
            act(world)
        if victim in world.ended:
            continue
        lease = world.scheduler._lease
        sequence = world.scheduler._roster.get(victim)
        assert sequence is not None
        blocks = list(sequence.blocks)
        world.stop(victim)
        own = set(blocks) - {block for table in world.scheduler.tables() for block in table}
        free = {*lease._idle, *(block for block, _ in lease._releases)}
        copied = {block for block, *_ in lease._given_up}
        assert all(block in free | copied or block not in lease.refs for block in own), "kept"
        for _ in range(len(world.ring)):
            world.execute()
        assert not lease._given_up, "held on after its steps came back"
        world.finish(2000)  # nothing is lost, and kvstore hears of all of it
        world.check_answers()
        assert set(world.ended) == set(world.requests) - {victim}
        assert all(end.reason in (Reason.STOP, Reason.LENGTH) for end in world.ended.values())
