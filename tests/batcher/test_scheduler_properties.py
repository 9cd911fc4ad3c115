"""Whatever happens, every request ends with the one right answer and no block is lost."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.queueing import Queueing
from chassis.ids import RequestId
from chassis.messages.request import Limits, Reason, Request
from tests.batcher.toy_pipeline import EOS, World, make_config, make_request, oracle

SETTINGS = settings(deadline=None, derandomize=True, max_examples=80)


def draw_request(dice: Random, index: int, room_tokens: int, stems: list[list[int]]) -> Request:
    prompt = list(dice.choice(stems)[: dice.randint(0, 24)])
    prompt += [dice.randrange(EOS) for _ in range(dice.randint(1, 12))]
    prompt = prompt[: max(1, room_tokens - 2)]
    max_tokens = dice.randint(1, 20)
    stop = dice.choice([(), (), (b"a",), (b"bb", b"cd"), (b"xyz", b"y")])
    limits = Limits(
        max_tokens,
        min_tokens=dice.randint(0, max_tokens) if dice.random() < 0.2 else 0,
        stop=stop,
        stop_token_ids=(7,) if dice.random() < 0.1 else (),
        ignore_eos=dice.random() < 0.3,
    )
    return make_request(f"r{index}", prompt, limits, dice.randint(0, 9), dice.choice(["t", "u"]))


@st.composite
def worlds(draw: st.DrawFn) -> World:
    return World(
        dice=Random(draw(st.integers(0, 2**32 - 1))),
        config=make_config(
            step_tokens_max=draw(st.sampled_from([1, 3, 8, 32])),
            sequences_max=draw(st.sampled_from([1, 2, 4, 8])),
            context_len_max=draw(st.sampled_from([24, 4096])),
            prefix_cache=draw(st.sampled_from([True, True, True, False])),
            run_ahead=draw(st.sampled_from([True, True, False])),
            steps_in_flight_max=draw(st.sampled_from([None, 1, 2, 4])),
            lease_high_blocks=draw(st.sampled_from([1, 4, 16])),
            lease_low_blocks=draw(st.sampled_from([0, 1])),
            match_wait_ms=draw(st.sampled_from([0, 250])),
        ),
        num_blocks=draw(st.sampled_from([4, 7, 16, 64])),
        num_stages=draw(st.sampled_from([1, 2, 4])),
        trouble=draw(st.sampled_from([0.0, 0.0, 0.1, 0.5])),
        careless=draw(st.booleans()),
        waits=draw(st.sampled_from([0.0, 0.0, 0.3])),
    )


def bring(world: World, request: Request) -> None:
    """Most come fresh; some come from an owner that died, with a part of their answer or all of it."""
    dice = world.dice
    if dice.random() < 0.8:
        world.add(request)
        return
    capacity = world.num_blocks * world.config.block_size_tokens
    _, answer = oracle(request, min(world.config.context_len_max, capacity))
    world.run(request, answer[: dice.randint(0, len(answer))], alone=dice.random() < 0.3)


def disturb(world: World, request_id: RequestId, stopped: set[RequestId]) -> None:
    """It is cancelled, or starts again with less of its answer, perhaps for itself."""
    output = world.outputs.get(request_id, [])
    if world.dice.random() < 0.5:
        world.stop(request_id)
        stopped.add(request_id)
    else:
        kept = tuple(output[: world.dice.randint(0, len(output))])
        world.run(world.requests[request_id], kept, alone=world.dice.random() < 0.5)


@SETTINGS
@given(worlds(), st.integers(1, 24), st.sampled_from([0.0, 0.03]), st.sampled_from([0.0, 0.05]))
def test_every_request_ends_with_its_answer(world: World, count: int, loses: float, disturbs: float) -> None:
    dice = world.dice
    stems = [[dice.randrange(EOS) for _ in range(24)] for _ in range(2)]
    room = min(world.config.context_len_max, world.num_blocks * world.config.block_size_tokens)
    stopped: set[RequestId] = set()
    coming = [draw_request(dice, index, room, stems) for index in range(count)]
    for _ in range(40 * count):
        world.now += dice.choice([0.0, 0.001, 0.02])
        held = world.scheduler.request_ids()
        act = dice.random()
        if not world.formed:
            if act < 0.3:
                world.form(pool_changed=world.epoch == 0 or dice.random() < 0.4)
            elif act < 0.5 and coming:
                bring(world, coming.pop())
            elif act < 0.6:
                world.answer()
        elif act < loses:
            world.lose()
        elif act < loses + disturbs and held:
            disturb(world, dice.choice(held), stopped)
        elif act < 0.25 and coming:
            bring(world, coming.pop())
        elif act < 0.45:
            world.answer()
        elif act < 0.75:
            world.plan()
        else:
            world.execute()
        if loses and dice.random() < 0.02:
            world.kvstore.restart()
    while coming:
        bring(world, coming.pop())
    world.finish(rounds_max=4000)
    assert sorted(world.ended) == sorted(set(world.requests) - stopped)
    for ended in world.ended.values():
        assert ended.reason in (Reason.STOP, Reason.LENGTH), ended.error
        assert list(ended.output_ids) == world.outputs[ended.request_id]
    world.check_answers()


@settings(deadline=None, derandomize=True, max_examples=30)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 2, 5]),
    st.sampled_from([1, 3]),
    st.sampled_from([12, 64]),
    st.integers(10, 40),
)
def test_nobody_passes_beyond_the_bound(
    seed: int, overtakes: int, sequences_max: int, num_blocks: int, count: int
) -> None:
    """Of one priority nobody passes another; a higher one passes the first of a lower one only so often."""
    dice = Random(seed)
    queueing = Queueing(overtakes_max=overtakes)
    config = make_config(sequences_max=sequences_max, queueing=queueing, match_wait_ms=10**6)
    world = World(dice, config, num_blocks)
    world.form(pool_changed=True)
    waiting: dict[int, list[RequestId]] = {}  # by priority, as they came
    passed = [0.0] * 10
    admitted = 0
    for _ in range(400 * count):
        if len(world.requests) == count and not world.scheduler.request_ids():
            break
        if len(world.requests) < count and dice.random() < 0.4:
            limits = Limits(dice.randint(1, 6), ignore_eos=True)
            prompt = [dice.randrange(EOS) for _ in range(dice.randint(1, 30))]
            request = make_request(f"r{len(world.requests)}", prompt, limits, priority=dice.randint(0, 9))
            waiting.setdefault(request.priority, []).append(request.id)
            world.add(request)
        world.plan()
        for name in world.admitted[admitted:]:
            priority = world.requests[name].priority
            assert waiting[priority].pop(0) == name
            passed[priority] = 0.0
            for lower in range(priority + 1, 10):
                passed[lower] = passed[lower] + 1 / (lower - priority) if waiting.get(lower) else 0.0
                assert passed[lower] <= overtakes + 10
        admitted = len(world.admitted)
        if world.calls or world.ring or world.scheduler.request_ids():
            world.turn()
    assert len(world.ended) == count
    world.check_answers()
