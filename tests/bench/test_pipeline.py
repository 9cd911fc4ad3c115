"""What the batcher makes of several stages, on a virtual clock: every figure is the same in every run."""

import pytest

from bench import pipeline
from bench.virtual_pipeline import SPLITS, Costs, VirtualPipeline, at, steady


@pytest.mark.parametrize("sequences", pipeline.SEQUENCES)
@pytest.mark.parametrize("stages", pipeline.STAGES)
def test_steps_in_flight_as_chosen_are_as_good_as_the_best_number(stages: int, sequences: int) -> None:
    found = pipeline.throughput(stages, sequences, rounds=2)
    assert pipeline.chosen_share(found) >= 0.97, found


@pytest.mark.parametrize(
    "costs",
    [
        Costs((15, 15), hop_ms=1.5),  # a slow network
        Costs((8, 7, 8, 7), base_ms=6.0),  # a device's launches
        Costs((22, 4, 4)),  # one stage has most of the layers
        Costs((15, 15), wobble=0.3),
    ],
)
def test_other_stages_and_networks_are_learned_too(costs: Costs) -> None:
    numbers = range(1, len(costs.layers) + 2)
    fixed = [steady(costs, 48, 128, 128, 2, steps_in_flight_max=n).tokens_per_s for n in numbers]
    assert steady(costs, 48, 128, 128, 2).tokens_per_s >= 0.95 * max(fixed)


@pytest.mark.parametrize("beside", [0.25, 0.5, 0.8])
@pytest.mark.parametrize("stages", [2, 3])
def test_where_stages_slow_each_other_fewer_groups_are_tried_and_kept(stages: int, beside: float) -> None:
    """No timing of a stage tells: by the model two groups look better than one."""
    costs = Costs((30 // stages,) * stages, beside=beside)
    numbers = range(1, stages + 2)
    fixed = [steady(costs, 8, 64, 256, 2, steps_in_flight_max=n).tokens_per_s for n in numbers]
    assert steady(costs, 8, 64, 256, 2).tokens_per_s >= 0.97 * max(fixed)


def test_chunks_of_a_long_prompt_follow_each_other_through_the_stages() -> None:
    together = pipeline.long_prompt_ttft(4)
    assert pipeline.long_prompt_ttft(4, steps_in_flight_max=1) / together >= 2.5


@pytest.mark.parametrize("stages", SPLITS)
def test_a_long_prompt_makes_decodes_wait_at_most_twice_as_long(stages: int) -> None:
    assert pipeline.waiting(stages).ratio <= 2.0
    assert pipeline.waiting(stages, slowdown_max=0).ratio > 5.0  # or there was nothing to protect from


@pytest.mark.parametrize("stages", SPLITS)
def test_max_step_ms_bounds_how_long_decodes_wait(stages: int) -> None:
    waited = pipeline.waiting(stages, slowdown_max=0, max_step_ms=40.0)
    assert waited.beside_prompt_s <= 1.05 * 0.040


def test_steps_take_the_same_time_while_a_prompts_prefix_grows() -> None:
    made = VirtualPipeline(Costs(SPLITS[2]))
    for tokens in (*[300] * 6, 6000):
        made.ask(tokens, 4)
        made.run()
    made.steps.clear()
    made.ask(6000, 1)
    made.run()
    chunks, took_s = zip(*made.steps, strict=True)
    assert chunks[0].prompt_tokens > 1.5 * chunks[-2].prompt_tokens
    assert max(took_s) < 1.2 * min(took_s[:-2])  # the last share what is left


@pytest.mark.parametrize(("stages", "sequences"), [(1, 8), (1, 64), (2, 64), (3, 64), (4, 64), (4, 256)])
def test_the_busiest_stage_does_not_wait_for_the_batcher(stages: int, sequences: int) -> None:
    _, busy, idle = pipeline.idle_shares(stages, sequences)
    assert idle[busy.index(max(busy))] < 0.01


def test_decodes_are_divided_evenly() -> None:
    made = VirtualPipeline(Costs(SPLITS[4]), steps_in_flight_max=4, sequences_max=22)
    for _ in range(22):
        made.ask(16, 100)
    made.run(1.5)
    rows = [load.decodes for load, _ in made.steps[-8:]]
    assert sorted(rows) == [5] * 4 + [6] * 4


@pytest.mark.parametrize("stages", SPLITS)
def test_no_more_steps_are_in_flight_than_stages_and_one(stages: int) -> None:
    made = VirtualPipeline(Costs(SPLITS[stages]))
    for number in range(40):
        made.ask(20 + 37 * number % 400, 5 + 11 * number % 60, at_s=0.05 * number)
    made.run()
    made.scheduler.check()
    assert made.in_flight_max <= max(3, stages + 1)
    assert all(len(seen.tokens_s) > 0 for seen in made.seen.values())


def test_a_curve_is_straight_between_its_points_and_beyond() -> None:
    curve = ((1, 1.0), (3, 2.0), (5, 6.0))
    assert [at(curve, x) for x in (1, 2, 3, 4, 5, 6)] == [1.0, 1.5, 2.0, 4.0, 6.0, 8.0]


def test_the_plot_has_a_line_for_every_row_of_the_table() -> None:
    found = {1: 1.0, 2: 2.0, 3: 3.0, 4: 2.0, 5: 1.0, None: 3.0}
    drawn = pipeline.plot({(s, n): found for s in pipeline.STAGES for n in pipeline.SEQUENCES})
    assert drawn.count("<polyline") == drawn.count("<circle") == 9


@pytest.mark.parametrize("hop_ms", [1.0, 5.0, 10.0, 20.0])
@pytest.mark.parametrize("stages", [2, 4])
def test_over_slow_links_steps_as_chosen_are_as_good_as_the_best_number(stages: int, hop_ms: float) -> None:
    costs = Costs(SPLITS[stages], hop_ms=hop_ms)
    numbers = range(2, stages + 8)
    fixed = [steady(costs, 64, 64, 128, 2, steps_in_flight_max=n).tokens_per_s for n in numbers]
    assert steady(costs, 64, 64, 128, 2).tokens_per_s >= 0.95 * max(fixed)
