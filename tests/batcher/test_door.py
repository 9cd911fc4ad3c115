"""Who is refused at once, and what he is told."""

from random import Random

from batcher.actions import OwnershipConfig
from batcher.core import Core
from batcher.door import Door
from batcher.events import AnswerOwner, PipelineChanged, TakeAsked
from batcher.formation import Formation, FormationConfig
from batcher.gathering import Gathering
from batcher.ownership import Ownership
from batcher.pace import Pace
from batcher.queueing import Queueing, QueuePolicy, TimeoutAction
from batcher.scheduler import Scheduler
from batcher.sequence import Phase
from chassis.ids import AckToken, BootId
from chassis.messages.request import Limits, Reason
from tests.batcher.toy_pipeline import STOPS, World, make_config, make_request, make_sequence
from tests.batcher.waiting_rig import Rig


def measured(tokens_per_s: float = 100.0) -> Pace:
    """A line that stood for 4 s while 10 tokens were admitted at a time."""
    pace = Pace()
    now = 0.0
    pace.planned(now, stands=True)
    for _ in range(40):
        now += 10 / tokens_per_s
        pace.admitted(10)
        pace.planned(now, stands=True)
    return pace


def test_a_full_queue_refuses_with_a_hint() -> None:
    rig = Rig(policies={5: QueuePolicy(max_queue_size=2)})
    door = Door(rig.queueing, rig.room, Pace())
    for name in ("a", "b"):
        assert door.refuses(rig.make(name), 0.0) is None
        rig.add(name)
    refused = door.refuses(rig.make("c"), 0.0)
    assert refused is not None and refused.reason is Reason.REFUSED
    assert "2 requests wait" in refused.why and refused.retry_ms > 0
    assert door.refuses(rig.make("d", priority=6), 0.0) is None


def test_a_deadline_that_cannot_be_met_is_refused_with_the_estimate() -> None:
    rig = Rig()
    door = Door(rig.queueing, rig.room, measured(100.0))
    for number in range(100):
        rig.add(f"r{number}", charge=10)  # 10 s of work
    late = rig.make("late")
    late.deadline = 5.0
    refused = door.refuses(late, 0.0)
    assert refused is not None and refused.reason is Reason.DEADLINE
    assert "in 5.0 s" in refused.why and "about 10." in refused.why and 5000 <= refused.retry_ms < 5200
    meets = rig.make("meets")
    meets.deadline = 9.0  # the estimate is not as sure as that
    assert door.refuses(meets, 0.0) is None
    urgent = rig.make("urgent", priority=0)
    urgent.deadline = 0.5
    assert door.refuses(urgent, 0.0) is None
    of_another = rig.make("another", tenant="u")
    of_another.deadline = 0.5
    assert door.refuses(of_another, 0.0) is None


def test_nobody_is_refused_while_the_pace_is_not_known() -> None:
    rig = Rig()
    for number in range(1000):
        rig.add(f"r{number}")
    late = rig.make("late")
    late.deadline = 0.001
    assert Door(rig.queueing, rig.room, Pace()).refuses(late, 0.0) is None
    off = Rig(refuse_late=False)
    off.add("a", charge=10_000)
    late.deadline = 0.001
    assert Door(off.queueing, off.room, measured()).refuses(late, 0.0) is None


def test_only_time_in_which_somebody_waited_in_vain_counts() -> None:
    pace = Pace()
    pace.planned(0.0, stands=False)
    for _ in range(100):
        pace.admitted(1000)
    pace.planned(100.0, stands=True)
    assert pace.tokens_per_s is None
    for second in range(20):
        pace.admitted(50)
        pace.planned(101.0 + second, stands=True)
    assert pace.tokens_per_s is not None and 45 < pace.tokens_per_s < 60
    pace.planned(500.0, stands=False)
    pace.check()


def test_it_learns_how_long_answers_are_and_take() -> None:
    pace = Pace()
    assert pace.work(10, 500) == 510
    for number in range(20):
        sequence = make_sequence(f"r{number}", prompt_len=4)
        sequence.cached_tokens = 0
        sequence.clock.enter(Phase.PREFILL, 0.0)
        sequence.clock.enter(Phase.DECODE, 0.4)
        sequence.ids.extend([1] * 21)
        pace.ended(sequence, 2.4)
    assert pace.work(10, 500) == 31 and pace.work(10, 5) == 15
    assert abs(pace.service_s(8, 1) - 0.4) < 1e-6
    assert abs(pace.service_s(8, 11) - 1.4) < 1e-6


def test_policies_say_how_long_one_may_wait() -> None:
    policy = QueuePolicy(default_timeout_us=2_000_000)
    assert policy.timeout_s(500_000) == 2.0
    override = QueuePolicy(default_timeout_us=2_000_000, allow_timeout_override=True)
    assert (override.timeout_s(500_000), override.timeout_s(0), override.timeout_s(9_000_000)) == (
        0.5,
        2.0,
        2.0,
    )
    assert QueuePolicy().timeout_s(500_000) is None
    rig = Rig(policies={6: QueuePolicy(timeout_action=TimeoutAction.DELAY)})
    door = Door(rig.queueing, rig.room, Pace())
    refused = door.timed_out(rig.make("a"))
    assert refused is not None and refused.reason is Reason.REFUSED
    assert door.timed_out(rig.make("b", priority=6)) is None


def test_a_priority_that_is_no_level_is_the_default_one() -> None:
    queueing = Queueing(priority_levels=3, default_priority=1)
    assert [queueing.level(priority) for priority in (0, 2, 3, 9)] == [0, 2, 1, 1]
    assert not queueing.is_batch(9) and Queueing().is_batch(9)


def keeps(gathering: Gathering, rig: Rig, now: float, running: int) -> bool:
    head, oldest = rig.room.head, rig.room.oldest
    assert head is not None and oldest is not None
    return gathering.keeps(head, now, running, len(rig.room), oldest.place.since)


def test_the_fresh_wait_until_a_preferred_size_comes_together() -> None:
    rig = Rig(preferred_batch_size=(4, 8), max_queue_delay_us=2_000_000)
    gathering = Gathering(rig.queueing, sequences_max=16)
    for name in "abc":
        rig.add(name)  # since 1.0, 2.0, 3.0
    assert keeps(gathering, rig, 2.0, running=0)
    assert gathering.wake_at(1.0) == 3.0
    assert not keeps(gathering, rig, 2.0, running=1)  # four together
    rig.add("d")
    running = 0
    while not keeps(gathering, rig, 2.5, running) and len(rig.room):
        rig.take()
        running += 1
        if not len(rig.room):
            break
    assert running == 4


def test_after_the_delay_all_that_came_until_then_join() -> None:
    rig = Rig(preferred_batch_size=(8,), max_queue_delay_us=2_000_000)
    gathering = Gathering(rig.queueing, sequences_max=16)
    for name in "abc":
        rig.add(name)
    assert keeps(gathering, rig, 2.9, running=0)
    assert not keeps(gathering, rig, 3.0, running=0)
    rig.take()
    assert not keeps(gathering, rig, 3.0, running=1)
    rig.take()
    rig.add("d")  # since 4.0
    rig.take()
    assert keeps(gathering, rig, 4.0, running=3)


def test_without_a_delay_nobody_waits() -> None:
    rig = Rig(preferred_batch_size=(8,))
    gathering = Gathering(rig.queueing, sequences_max=16)
    rig.add("a")
    assert not keeps(gathering, rig, 1.0, running=0)
    assert gathering.wake_at(1.0) is None


def test_a_pipeline_that_is_lost_does_not_slow_the_pace() -> None:
    pace = measured(100.0)
    pace.halted()
    pace.planned(600.0, stands=True)
    assert 9.0 < (pace.wait_s(1000) or 0.0) < 11.0


def test_a_scheduler_whose_pipeline_was_lost_refuses_nobody_for_it() -> None:
    made = World(Random(1), make_config(), 64)
    made.form(pool_changed=True)
    pace = made.scheduler._admission.pace
    pace.planned(0.0, stands=True)
    made.lose()
    made.now = 600.0
    made.form(pool_changed=False)
    made.plan()
    made.now = 601.0
    made.plan()
    assert pace._waited_s == 0.0


def test_what_is_given_is_not_taken_where_no_more_may_wait() -> None:
    queueing = Queueing(policies={5: QueuePolicy(max_queue_size=1)})
    scheduler = Scheduler(make_config(queueing=queueing), STOPS)
    formation = Formation(BootId("b"), FormationConfig(num_stages=1))
    core = Core(Ownership(BootId("b"), OwnershipConfig()), scheduler, formation, 1.0)
    core.handle(PipelineChanged(0.0, alive=True))

    def take(name: str, reply: int, priority: int = 5) -> bool:
        asked = make_request(name, [1, 2, 3], Limits(4), priority)
        effects = core.handle(TakeAsked(0.0, asked, AckToken("t"), 0.0, reply))
        core.check()
        return AnswerOwner(reply, True) in effects

    assert take("a", 1)
    assert not take("b", 2), "it would be refused there"
    assert take("a", 3), "it is held"
    assert take("c", 4, priority=6)
