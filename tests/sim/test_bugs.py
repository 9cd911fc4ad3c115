"""The test of the tests: each deliberate bug is found by one of the seeds that were chosen for it.

What a seed does changes with every change of what it runs, hence several of them. When all have gone stale,
`python -m tests.sim --bug NAME --seeds 300 --keep-going` finds new ones.
"""

import pytest

from tests.sim.bugs import BUGS, injected
from tests.sim.run import run_seed

FOUND_BY = {
    "ack_before_the_terminal_record": (0, 1, 2),
    "records_written_without_reading": (4, 12, 15, 43, 46),
    "minimum_not_raised": (3, 4, 0, 9, 13),
    "fenced_batcher_goes_on": (33, 46, 93, 136, 143),
    "gaps_are_taken_for_the_next_part": (11, 10, 24, 38, 53),
    "finish_before_the_record": (0, 1, 2),
    "block_committed_before_its_step_returned": (3, 4, 0),
    "tokens_of_ghosts_are_told": (0, 3, 14, 8, 9),
    "steps_ahead_take_what_another_slot_sampled": (9, 11, 31, 41, 88),
    "cached_prefixes_hide_what_is_asked_of_prompts": (14, 31, 55, 65, 85),
    "what_is_told_of_prompts_is_dropped": (9, 10, 19, 24, 42),
    "prefixes_kept_over_a_generation": (114, 115, 147),
    "blocks_released_twice": (24, 9, 15, 31, 34),
    "count_of_a_gateway_never_stops": (0, 98),
    "releases_forgotten": (0, 1, 2),
    "steps_do_not_know_their_requests": (0, 1, 2),
    "spans_without_their_root": (0, 1, 2),
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_bug_is_found(bug: str) -> None:
    for seed in FOUND_BY[bug]:
        with injected(bug):
            found = run_seed(seed).failures
        if found:
            assert not run_seed(seed).failures, f"seed {seed} fails without the bug too"
            return
    raise AssertionError(f"none of seeds {FOUND_BY[bug]} finds it any more")
