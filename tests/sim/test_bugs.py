"""The test of the tests: each deliberate bug is found by one of the seeds that were chosen for it.

What a seed does changes with every change of what it runs, hence several of them. When all have gone stale,
`python -m tests.sim --bug NAME --seeds 300 --keep-going` finds new ones.
"""

import pytest

from tests.sim.bugs import BUGS, injected
from tests.sim.run import run_seed

FOUND_BY = {
    "ack_before_the_terminal_record": (2, 3, 4, 7),
    "receipt_after_the_acknowledgement": (4, 40, 43, 792),
    "receipts_of_what_it_knows_itself": (0, 3, 2, 5, 6),
    "records_written_without_reading": (4, 12, 48, 50, 51),
    "minimum_not_raised": (3, 4, 0, 9, 13),
    "fenced_batcher_goes_on": (93, 33, 136, 143),
    "gaps_are_taken_for_the_next_part": (11, 10, 24, 38, 53),
    "finish_before_the_record": (7, 10, 11, 14),
    "block_committed_before_its_step_returned": (3, 4, 0),
    "prompts_pass_over_their_budget": (22, 73, 108, 206),
    "tokens_of_ghosts_are_told": (3, 14, 8),
    "steps_ahead_take_what_another_slot_sampled": (11, 41, 10, 18, 42),
    "cached_prefixes_hide_what_is_asked_of_prompts": (65, 2, 4, 5, 18),
    "what_is_told_of_prompts_is_dropped": (10, 24, 42),
    "prefixes_kept_over_a_generation": (376, 400, 412),
    "blocks_released_twice": (2, 4, 9, 15, 24),
    "count_of_a_gateway_never_stops": (98, 117, 220),
    "releases_forgotten": (0, 1, 2),
    "blocks_are_not_proven": (11, 18, 34, 84),
    "memory_is_not_compared": (189, 209, 234, 288, 341),
    "restored_before_it_is_there": (116, 39, 242, 282),
    "copies_are_forgotten": (24, 130, 39, 41, 116),
    "grammars_begin_anew_with_every_fresh_row": (480, 230),
    "what_waits_for_its_grammar_is_told": (5, 50, 65, 90, 95),
    "job_acknowledged_before_its_answer": (3, 9, 19),
    "jobs_end_with_their_gateway": (81, 190, 278, 446, 585),
    "steps_do_not_know_their_requests": (0, 1, 2),
    "spans_without_their_root": (0, 1, 2),
    "pools_lie_at_the_last_to_write": (3, 14, 21, 23),
    "pools_stay_where_they_are": (28, 36, 37),
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
