"""One sequence: its clock, its chain, its way back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.block_hash import Extras, chain, namespace
from batcher.sequence import Clock, Phase
from chassis.ids import BlockId
from tests.batcher.toy_pipeline import make_sequence


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    st.floats(0, 1e5),
    st.floats(0, 100),
    st.lists(st.tuples(st.sampled_from(list(Phase)), st.floats(0, 10)), max_size=20),
)
def test_the_rows_of_the_ledger_sum_exactly(
    start: float, queued_s: float, changes: list[tuple[Phase, float]]
) -> None:
    clock = Clock(start, queued_s, Phase.WAITING)
    now = start
    for phase, seconds in changes:
        now += seconds
        clock.enter(phase, now)
    timings = clock.timings(now, 0, 0)
    rows = (timings.waiting_us, timings.prefill_us, timings.decode_us, timings.interrupted_us)
    assert sum(rows) == round(now * 1e6) - round(start * 1e6)
    assert timings.queued_us == round(queued_s * 1e6)
    assert min(rows) >= 0


def test_time_is_counted_for_the_phase_it_was_spent_in() -> None:
    clock = Clock(1.0, 0.5, Phase.WAITING, interrupted_s=0.125)
    clock.enter(Phase.PREFILL, 2.0)
    clock.enter(Phase.DECODE, 4.0)
    timings = clock.timings(8.0, 3, 17)
    assert (timings.waiting_us, timings.prefill_us, timings.decode_us) == (1_000_000, 2_000_000, 4_000_000)
    assert (timings.queued_us, timings.interrupted_us) == (500_000, 125_000)
    assert (timings.preemptions, timings.recomputed_tokens) == (3, 17)


def test_a_clock_that_steps_back_takes_no_time() -> None:
    clock = Clock(5.0, 0.0, Phase.WAITING)
    clock.enter(Phase.PREFILL, 4.0)
    assert clock.timings(5.0, 0, 0).waiting_us == 0


def test_a_cached_prefix_never_covers_the_last_token() -> None:
    assert make_sequence("r", prompt_len=8, block_size_tokens=4).num_match_blocks == 1
    assert make_sequence("r", prompt_len=9, block_size_tokens=4).num_match_blocks == 2
    assert make_sequence("r", prompt_len=1, block_size_tokens=4).num_match_blocks == 0


def test_the_chain_covers_output_too() -> None:
    sequence = make_sequence("r", prompt_len=6, block_size_tokens=4)
    sequence.chain(1)
    sequence.ids += [50, 51]
    sequence.watch.length += 2
    expected = chain(namespace("toy", "float32", "plain"), sequence.ids, 4, Extras(salt=b"t"))
    assert tuple(sequence.chain(2)) == expected
    sequence.check()


def test_falling_back_makes_rows_in_flight_ghosts() -> None:
    sequence = make_sequence("r", prompt_len=10, block_size_tokens=4)
    sequence.blocks = [BlockId(0), BlockId(1), BlockId(2)]
    sequence.num_proven, sequence.num_computed, sequence.num_committed = 6, 10, 1
    before = sequence.incarnation
    sequence.fall_back(4)
    assert (sequence.num_computed, sequence.num_proven, sequence.fresh) == (4, 4, True)
    assert sequence.incarnation != before
    with pytest.raises(AssertionError):
        sequence.fall_back(5)
