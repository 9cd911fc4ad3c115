"""The bench's deployment of two pipelines: what conversations find of their prompts, on a virtual clock."""

from bench.placement import Seen, Setting, deaf, run_once

SMALL = Setting(conversations=8, turns=4, said=96, answer=8, think_s=0.5, num_blocks=1000)


def test_two_pipelines_find_nearly_what_one_finds() -> None:
    one, two = run_once(SMALL, 1, 1, share=2), run_once(SMALL, 1, 2)
    with deaf():
        apart = run_once(SMALL, 1, 2)
    assert two.hit_rate > 0.9 * one.hit_rate > 1.1 * apart.hit_rate
    assert min(two.busy_s) > 0


def test_a_run_is_the_same_each_time() -> None:
    assert run_once(SMALL, 2, 2) == run_once(SMALL, 2, 2)


def test_figures_are_of_what_was_seen() -> None:
    seen = Seen(prompt_tokens=200, cached_tokens=150, busy_s=[3.0, 1.0])
    assert (seen.hit_rate, seen.imbalance) == (0.75, 0.5)
