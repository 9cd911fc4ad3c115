"""Triton's names and meaning: inferences, executions, batches, queue and compute times."""

import asyncio

from batcher.stage_use import StageUse
from batcher.statistics import SENT_MAX, Statistics
from chassis import subjects
from chassis.ids import Attempt, BootId
from chassis.memory_bus import MemoryBus
from chassis.messages.pipeline import StageTiming
from chassis.messages.request import Reason, Terminal, Timings, Usage, build_request
from chassis.messages.statistics import (
    NUMBER_MAX,
    Duration,
    ModelStatistics,
    StageTimes,
    build_statistics,
    parse_statistics,
    total,
)
from chassis.statistics_view import StatsShown, look
from shoal import stats_words
from tests.batcher.test_service import deployment, request
from tests.sim.loop import run

MS = 1_000_000


def stages(*compute_ms: int) -> tuple[StageTiming, ...]:
    return tuple(StageTiming(i, 0, MS, ms * MS, 0) for i, ms in enumerate(compute_ms))


def terminal(reason: Reason, timings: Timings, usage: Usage | None = None) -> Terminal:
    return Terminal(Attempt(1), BootId("b"), reason, (), usage=usage or Usage(), timings=timings)


def worked() -> ModelStatistics:
    made = Statistics()
    made.sent(1, 1, 4, 0)
    made.sent(1, 2, 2, 0)
    made.sent(1, 3, 4, 0)
    made.sent(1, 4, 0, 0)  # an empty step is none
    for number, took in ((1, 10), (2, 20), (3, 12)):
        made.returned(1, number, stages(2, 3), took * MS)
    made.returned(1, 4, stages(1, 1), 99 * MS)
    made.returned(1, 3, stages(2, 3), 99 * MS)  # once
    made.ended(terminal(Reason.STOP, Timings(1000, 2000, 3000, 4000), Usage(10, 4, 7)))
    made.ended(terminal(Reason.REFUSED, Timings(1000, 500)))
    return made.tell(BootId("b1"), "m", used())


def used() -> StageUse:
    """Two stages, of which the second computed half of the time."""
    use = StageUse()
    use.open(2)
    for number in (1, 2):
        at_ns = number * 4 * MS
        first = StageTiming(0, at_ns, 0, 4 * MS, 0)
        use.returned(number, [first, StageTiming(1, at_ns + 4 * MS, 0, 2 * MS, 0)], 0.004, follows=True)
    return use


def test_inferences_are_rows_and_executions_steps() -> None:
    s = worked()
    assert (s.inference_count, s.execution_count, s.last_inference_ms) == (10, 3, 12)
    assert list(s.batch_stats) == [2, 4]
    assert s.batch_stats[4].compute_infer == Duration(2, 10 * MS)
    assert s.batch_stats[4].compute_input == Duration(2, 4 * MS)
    assert s.batch_stats[4].compute_output == Duration(2, 8 * MS)  # 22 ms round the ring in all
    assert s.computed.compute_infer == Duration(10, 50 * MS)
    assert s.success == Duration(1, 10 * MS) and s.fail == Duration(1, 1_500_000)
    assert s.queue == Duration(1, 3 * MS), "of those that were admitted"
    assert s.ends == {"refused": 1, "stop": 1}
    assert (s.input_tokens, s.cached_tokens, s.output_tokens) == (10, 4, 7)


def test_steps_that_never_come_back_are_forgotten() -> None:
    made = Statistics()
    for number in range(3 * SENT_MAX):
        made.sent(1, number, 1, 0)
    assert len(made._sent) == SENT_MAX
    made.returned(1, 0, stages(1), MS)
    assert made.tell(BootId("b"), "m", StageUse()).execution_count == 0


def test_a_message_is_what_was_told_and_several_add_up() -> None:
    s = worked()
    assert parse_statistics(build_statistics(s)) == s
    both = total([s, s, Statistics().tell(BootId("b2"), "other", StageUse())])
    assert list(both) == ["m", "other"]
    sum_ = both["m"]
    assert (sum_.inference_count, sum_.execution_count) == (20, 6)
    assert sum_.batch_stats[2].compute_infer == Duration(2, 10 * MS) and sum_.ends == {
        "refused": 2,
        "stop": 2,
    }
    text = stats_words.render(list(both.values()), StatsShown([s, s]))
    assert "inference count 20, execution count 6: 3.3 sequences a step" in text
    assert '"execution_count": 6' in stats_words.as_json([sum_])
    assert (
        sum_.stages == (StageTimes(16 * MS, 0, 0), StageTimes(8 * MS, 0, 4 * MS))
        and sum_.active_ns == 16 * MS
    )
    assert sum_.bubble_shares == [0.0, 0.5]
    assert "bubbles of the stages 0.0 %, 50.0 %; waiting for a step 0.0 %, 25.0 %" in text


def test_sums_that_outgrow_their_field_stand_still() -> None:
    years, boot = Duration(1, 1 << 70), BootId("b")
    told = ModelStatistics(boot, "m", success=years, stages=(StageTimes(1 << 70, 1, 0),), active_ns=1 << 64)
    found = parse_statistics(build_statistics(told))
    assert found.success == Duration(1, NUMBER_MAX) and found.active_ns == NUMBER_MAX
    assert found.stages == (StageTimes(NUMBER_MAX, 1, 0),)


def test_a_batcher_answers_on_the_bus() -> None:
    async def main() -> None:
        async with deployment() as world:
            bus = MemoryBus(world.broker, "client")
            asked = request("r1", tuple(range(1, 30)))
            await bus.append(subjects.request("fake", 5, asked.id), build_request(asked))
            await asyncio.sleep(10)
            shown = await look(bus, None)
            assert not shown.silent and len(shown.of_batchers) == 1
            s = total(shown.of_batchers)["fake"]
            assert s.success.count == 1 and s.output_tokens == 10 and s.ends == {"length": 1}
            assert s.inference_count >= s.execution_count >= 10
            assert (await look(bus, "another")).of_batchers == []
            bus.kill()

    run(main())
