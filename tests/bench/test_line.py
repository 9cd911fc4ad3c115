"""The line on its virtual clock: nothing here is measured, the same in every run."""

import pytest

from batcher.queueing import Queueing
from bench import core_scale, line
from bench.virtual_line import Asked, VirtualLine
from chassis.messages.request import Reason


@pytest.fixture(autouse=True)
def _shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "LENGTH_S", 60.0)


def test_batch_work_hardly_shows_in_the_latencies_of_others() -> None:
    found = line.batch_class(1)
    assert found["ttft_with"] < 1.1 * found["ttft_without"]
    assert found["itl_with"] < 1.1 * found["itl_without"]
    assert found["tokens_with"] > 20, "and it goes on"


def test_deadlines_refused_early_would_not_have_been_met() -> None:
    found = line.deadlines(1)
    assert found["refused"] > 0.2 and found["wrongly"] < 0.02
    assert found["met"] > found["met_without"]


def test_tenants_have_their_shares_of_the_work() -> None:
    assert line.shares(1) == pytest.approx(2.0, rel=0.05)


def test_batching_carries_more_than_one_at_a_time() -> None:
    def late(max_batch_size: int) -> int:
        coming = [Asked(i / 4, 64, 64) for i in range(120)]
        served = line.serve(coming, Queueing(max_batch_size=max_batch_size), 40.0)
        return sum(s.reason is None or s.ended_at - s.asked.at > line.BOUND_S for s in served)

    assert late(0) == 0 and late(1) > 60


def test_a_passed_deadline_ends_within_the_step() -> None:
    made = VirtualLine(Queueing(refuse_late=False), sequences_max=4)
    coming = [Asked(0.0, 40, 400, timeout_s=0.5 + 0.1 * i) for i in range(12)]
    made.run(coming, 5.0)
    for served in made.served.values():
        asked = served.asked
        assert served.reason is Reason.DEADLINE and asked.timeout_s is not None
        assert asked.timeout_s <= served.ended_at < asked.timeout_s + 0.03
    assert not list(made.scheduler.tables())


def test_many_wait_and_many_run() -> None:
    made = core_scale.line(600, 64, 1)
    assert made.scheduler.num_running == 64 and made.scheduler.num_waiting > 400
    made.scheduler.check()
