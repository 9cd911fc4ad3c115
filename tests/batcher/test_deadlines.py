"""A deadline that passes ends its request at the next turn, wherever it is, and its blocks are free."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.deadlines import Deadlines
from batcher.queueing import Queueing, QueuePolicy, TimeoutAction
from batcher.sequence import Status
from chassis.ids import RequestId
from chassis.messages.request import Limits, Reason
from tests.batcher.toy_pipeline import EOS, World, make_config, make_request, make_sequence


def test_who_does_not_care_any_more_is_skipped_and_swept_out() -> None:
    deadlines = Deadlines()
    sequences = [make_sequence(f"r{i}") for i in range(200)]
    for i, sequence in enumerate(sequences):
        deadlines.add(sequence, float(i) if i % 2 else None)
    for sequence in sequences[:151]:
        sequence.status = Status.ENDED
    assert deadlines.next() == 151.0
    deadlines.sweep(10)
    deadlines.check()
    assert deadlines.pop_passed(150.0) is None and deadlines.pop_passed(151.0) is sequences[151]
    assert deadlines.pop_passed(152.0) is None


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2]), st.sampled_from([12, 64]))
def test_a_passed_deadline_ends_at_the_next_turn(seed: int, num_stages: int, num_blocks: int) -> None:
    dice = Random(seed)
    policies = {
        6: QueuePolicy(default_timeout_us=30_000, timeout_action=TimeoutAction.REJECT),
        7: QueuePolicy(default_timeout_us=30_000, timeout_action=TimeoutAction.DELAY),
    }
    config = make_config(sequences_max=3, queueing=Queueing(policies=policies))
    world = World(dice, config, num_blocks, num_stages)
    world.form(pool_changed=True)
    deadlines: dict[RequestId, float] = {}
    for _ in range(400):
        world.now += dice.choice([0.0, 0.001, 0.02])
        act = dice.random()
        if act < 0.15 and len(world.requests) < 40:
            prompt = [dice.randrange(EOS) for _ in range(dice.randint(1, 30))]
            limits = Limits(dice.randint(1, 30), ignore_eos=True)
            request = make_request(
                f"r{len(world.requests)}", prompt, limits, dice.choice([4, 5, 6, 7, 9]), dice.choice("tu")
            )
            deadline = world.now + dice.uniform(0.001, 0.5) if dice.random() < 0.6 else None
            if deadline is not None:
                deadlines[request.id] = deadline
            world.add(request, deadline)
        elif act < 0.3:
            world.answer()
        elif act < 0.7:
            world.plan()
            late = [n for n, at in deadlines.items() if at <= world.now and n not in world.ended]
            assert not late, "it should have ended in this turn"
            assert not any(sequence.status is Status.ENDED for sequence in world.scheduler._running)
        else:
            world.execute()
    world.finish(4000)
    for name, ended in world.ended.items():
        priority = world.requests[name].priority
        if ended.reason is Reason.DEADLINE:
            assert name in deadlines and (ended.error or ended.now >= deadlines[name])
        elif ended.reason is Reason.REFUSED:
            assert priority == 6 and not ended.output_ids and name not in world.admitted
            assert ended.error and ended.retry_ms
        else:
            # its last token may come behind the deadline, but not behind a turn that knew of it
            deadline = deadlines.get(name, float("inf"))
            assert not any(deadline <= at < ended.now for at in world.planned_at)
    world.check_answers()
