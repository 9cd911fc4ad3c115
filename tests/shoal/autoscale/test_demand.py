"""What is made of batchers' accounts and the stream's lag."""

from dataclasses import replace

from chassis.ids import BootId
from chassis.messages.load import PipelineLoad
from shoal.autoscale.demand import HEARD_TTL_S, Demand, Queued
from shoal.autoscale.starts import Starts

A, B = BootId("a"), BootId("b")
IDLE = PipelineLoad(A, "g", True, 0.0, 8, 0.1, 0.001, 0.01)


def signals(demand: Demand, now: float, **queued: float):  # type: ignore[no-untyped-def]
    return demand.signals(now, Queued(**queued), None, 5.0)  # type: ignore[arg-type]


def tell(demand: Demand, boot: BootId, rate: float, since: int, until: int, **more: float) -> None:
    """A pipeline that does `rate` seconds of work a second."""
    for t in range(since, until):
        load = replace(IDLE, boot=boot, work_s=rate * t, work_tokens=int(1000 * rate * t), **more)  # type: ignore[arg-type]
        demand.heard(load, float(t))
        signals(demand, float(t))


def test_work_of_several_adds_up() -> None:
    demand = Demand()
    for t in range(60):
        for boot, rate in ((A, 0.5), (B, 0.25)):
            demand.heard(replace(IDLE, boot=boot, work_s=rate * t, work_tokens=100 * t), float(t))
        s = signals(demand, float(t), unfinished=3)
    assert abs(s.demand - 0.75) < 0.05 and abs(s.demand_now - 0.75) < 0.01
    assert s.ready == 2 and s.unfinished == 3


def test_a_backlog_that_grows_is_what_came() -> None:
    """Full, and as much again waits each second: twice as much comes as it can do."""
    demand = Demand()
    for t in range(30):
        load = replace(IDLE, work_s=1.0 * t, work_tokens=1000 * t, waiting=10 * t, pending_tokens=1000 * t)
        demand.heard(load, float(t))
        s = signals(demand, float(t))
    assert abs(s.demand_now - 2.0) < 0.1
    assert abs(s.backlog_s - 29.0) < 0.1


def test_what_a_full_pipeline_does_is_learned_while_requests_wait() -> None:
    demand = Demand()
    tell(demand, A, 0.2, 0, 40, waiting=5, pending_tokens=500)
    assert abs(demand.capacity - 0.2) < 0.02
    assert abs(signals(demand, 40.0).demand_now - 1.0) < 0.1
    demand.check()


def test_a_pipeline_that_is_not_full_says_nothing_of_that() -> None:
    """Nor one in which somebody waits whenever it tells: that may be whoever has just come."""
    demand = Demand()
    tell(demand, A, 0.2, 0, 40)
    tell(demand, A, 0.2, 40, 80, waiting=1, pending_tokens=100)
    assert demand.capacity == 1.0


def test_one_that_does_more_than_was_thought_is_believed() -> None:
    demand = Demand()
    tell(demand, A, 0.2, 0, 40, waiting=5, pending_tokens=500)
    before = demand.capacity
    for t in range(40, 60):
        demand.heard(replace(IDLE, work_s=8.0 + 0.6 * (t - 40), work_tokens=100 * t), float(t))
    assert before < 0.3 and demand.capacity >= 0.6


def test_who_is_silent_or_does_not_take_work_does_not_count() -> None:
    demand = Demand()
    tell(demand, A, 0.5, 0, 10)
    assert signals(demand, 9.0 + HEARD_TTL_S).ready == 1
    assert signals(demand, 9.1 + HEARD_TTL_S).ready == 0
    demand.heard(replace(IDLE, boot=B), 20.0)
    assert signals(demand, 20.0).ready == 1
    demand.heard(replace(IDLE, boot=B, accepting=False), 20.5)
    assert signals(demand, 20.5).ready == 0


def test_without_pipelines_the_stream_says_who_waits_and_how_long() -> None:
    demand = Demand()
    tell(demand, A, 0.5, 0, 10, waiting=2, pending_tokens=200)
    s = signals(demand, 30.0, waiting=1, unfinished=7, oldest_s=4.0)
    assert s.ready == 0 and s.queue_age_s == 4.0
    assert abs(s.backlog_s - 7 * 100 * 0.001) < 0.5  # as many tokens as those that waited had, at their price
    assert signals(Demand(), 0.0, unfinished=9, oldest_s=1.0).backlog_s == 0.0  # nothing is known of them


def test_silence_ends_what_comes_now() -> None:
    demand = Demand()
    tell(demand, A, 0.5, 0, 20)
    for t in range(20, 30):
        demand.heard(replace(IDLE, work_s=9.5, work_tokens=9500), float(t))
        s = signals(demand, float(t))
    assert s.demand_now == 0.0


def test_a_batcher_that_began_anew_or_lies_takes_nothing_away() -> None:
    demand = Demand()
    tell(demand, A, 0.5, 0, 20)
    demand.heard(replace(IDLE, work_s=0.0, work_tokens=0), 20.0)
    assert signals(demand, 20.0).demand_now >= 0.0
    demand.heard(replace(IDLE, work_s=1e12, work_tokens=1), 21.0)
    demand.check()


def test_one_that_comes_as_another_leaves_has_come() -> None:
    """So many take work as before; a start would be waited for until it is given up, and nothing may fall."""
    demand, starts = Demand(), Starts()
    demand.heard(replace(IDLE, boot=A), 0.0)
    starts.saw(0.0, demand.arrived)
    starts.asked(1.0)
    demand.heard(replace(IDLE, boot=B), 2.0)
    assert signals(demand, 0.1 + HEARD_TTL_S).ready == 1  # A is gone
    starts.saw(0.1 + HEARD_TTL_S, demand.arrived)
    assert not starts.coming and starts.measured == 1
