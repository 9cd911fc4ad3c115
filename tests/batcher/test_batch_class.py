"""Batch work fills spare room and gives way at a step boundary."""

from random import Random

from batcher.pace import Pace
from batcher.queueing import BATCH, Queueing
from batcher.running import Running
from batcher.spare_room import ALL, SpareRoom
from chassis.ids import RequestId
from chassis.messages.request import Limits
from tests.batcher.test_scheduler import settle
from tests.batcher.toy_pipeline import World, make_config, make_request


def world(num_blocks: int = 64, **changes: object) -> World:
    made = World(Random(1), make_config(**changes), num_blocks)
    made.form(pool_changed=True)
    settle(made)
    return made


def bring(made: World, name: str, priority: int, length: int = 6, output: int = 8) -> None:
    prompt = [(ord(name[0]) + i) % 30 for i in range(length)]
    made.add(make_request(name, prompt, Limits(output, ignore_eos=True), priority))


def settle_all(made: World) -> None:
    """Whatever can be planned and answered is; steps in flight stay there."""
    while True:
        while made.calls:
            made.answer()
        if not made.plan():
            return


def running(made: World) -> list[RequestId]:
    seats: Running = made.scheduler._running
    return [sequence.request.id for sequence in seats]


def test_it_gives_its_place_to_any_other() -> None:
    made = world(sequences_max=2)
    for name in ("b1", "b2"):
        bring(made, name, BATCH)
    settle_all(made)
    made.execute()
    assert running(made) == ["b1", "b2"]
    bring(made, "i", 5)
    settle_all(made)
    assert running(made) == ["b1", "i"], "the last that came goes first"
    bring(made, "batch", BATCH)
    settle_all(made)
    assert running(made) == ["b1", "i"], "nobody gives way to batch work"
    made.finish(400)
    assert made.ended[RequestId("b2")].timings.preemptions == 1
    made.check_answers()


def test_it_gives_its_blocks_to_any_other_but_not_in_vain() -> None:
    made = world(num_blocks=16, sequences_max=8)  # of 4 tokens
    bring(made, "b", BATCH, length=40, output=8)
    settle_all(made)
    for _ in range(3):
        made.execute()
        settle_all(made)
    bring(made, "i", 5, length=30, output=4)
    settle_all(made)
    assert running(made) == ["i"]
    made.finish(400)
    made.check_answers()
    held = world(num_blocks=16, sequences_max=8)
    bring(held, "b", BATCH, length=12, output=4)
    bring(held, "i", 5, length=34, output=4)
    bring(held, "j", 5, length=40, output=4)
    settle_all(held)
    assert RequestId("b") not in running(held)  # it would have come last
    held.finish(400)
    held.check_answers()


def test_what_it_computed_is_found_again() -> None:
    made = world(num_blocks=64, sequences_max=1)
    bring(made, "b", BATCH, length=20, output=8)
    settle_all(made)
    made.execute()
    settle_all(made)
    made.execute()
    made.now += 0.05
    settle_all(made)
    bring(made, "i", 5, length=6, output=2)
    made.finish(400)
    timings = made.ended[RequestId("b")].timings
    assert timings.preemptions == 1 and timings.recomputed_tokens <= 4, "more than the end of its last block"
    made.check_answers()


def test_it_has_no_step_of_its_own_while_others_run_and_one_a_stage_else() -> None:
    made = world(sequences_max=8)
    for name in ("b1", "b2", "b3"):
        bring(made, name, BATCH, output=30)
    settle_all(made)
    assert len(made.ring) == 1
    for _ in range(4):
        made.execute()
        settle_all(made)
        assert len(made.ring) == 1 and made.ring[0].rows
    bring(made, "i", 5, output=20)
    settle_all(made)
    while RequestId("i") not in made.ended:
        for plan in made.ring:
            if plan.rows and RequestId("i") in running(made):
                names = [row.request_id for row in plan.rows]
                assert "i" in names or plan is made.ring[0]
        made.execute()
        settle_all(made)
    made.finish(400)
    made.check_answers()


def test_without_the_class_priority_nine_is_as_any_other() -> None:
    made = world(sequences_max=2, queueing=Queueing(batch_class=False))
    for name in ("b1", "b2"):
        bring(made, name, BATCH)
    settle_all(made)
    bring(made, "i", 5)
    settle_all(made)
    assert running(made) == ["b1", "b2"]
    made.finish(400)
    made.check_answers()


def seconds(num_tokens: int) -> float:
    return 0.004 + 0.0002 * num_tokens


def test_beside_others_it_has_its_share_of_the_time() -> None:
    room = SpareRoom(seconds, Pace())
    given = [room.beside(8, 8) for _ in range(1000)]
    assert max(given) <= 1 + int(0.05 * seconds(8) / 0.0002)
    assert abs(sum(given) * 0.0002 / (1000 * seconds(8)) - 0.05) < 0.002
    prompts = [room.beside(512, 3) for _ in range(100)]
    assert max(prompts) * 0.0002 <= 0.01 * seconds(512) + 0.0002
    assert sum(prompts) * 0.0002 > 0.009 * 100 * seconds(512), "but never nothing"
    room.check()
    dear = SpareRoom(seconds, Pace(), row_s=lambda: 0.001)  # what a row costs, if that is more
    assert abs(sum(dear.beside(8, 8) for _ in range(1000)) - 0.05 * 1000 * seconds(8) / 0.001) < 3
    assert SpareRoom(lambda tokens: 0.0, Pace()).beside(3, 3) == 1  # nothing is known: a little
    odd = SpareRoom(lambda _: 0.014884591802343961, Pace(), 1.0, row_s=lambda: 0.0006471561653193027)
    assert odd.beside(3, 3) == 23  # a hair more than there is, by the rounding of the division
    odd.check()


def test_a_step_of_its_own_is_short_where_others_come() -> None:
    pace = Pace()
    room = SpareRoom(seconds, pace)
    assert room.alone() == ALL
    pace.first_token_s = 0.02
    few = room.alone()
    assert 1 <= few and seconds(few) <= 1.25 * seconds(1) + 1e-9
    pace.first_token_s = 0.4
    assert seconds(room.alone()) <= 0.02 + 1e-9 < seconds(room.alone() + 2)


def test_others_have_the_same_steps_beside_it() -> None:
    """Steps until an interactive answer is there, with and without batch work."""

    def steps(batch: int) -> int:
        made = world(num_blocks=256, sequences_max=4, run_ahead=False)
        for number in range(batch):
            bring(made, f"b{number}", BATCH, output=40)
        settle_all(made)
        for _ in range(3):
            made.execute()
            settle_all(made)
        bring(made, "i", 5, output=12)
        before = made.steps
        while RequestId("i") not in made.ended:
            settle_all(made)
            made.execute()
        return made.steps - before

    assert steps(batch=6) <= steps(batch=0) + 1
