"""How much of the prompts a step takes."""

from dataclasses import replace

import pytest

from batcher.chunks import Budget, ChunkRules, Chunks, Scene
from batcher.stage_cost import Coefficients, Load, StageCost

STAGE = Coefficients(2e-3, 2e-4, 2e-4, 1e-7, 4e-7)
SCENE = Scene(
    decodes=Load(0, 8, 0, 8 * 500),
    groups=2,
    group=Load(0, 8, 0, 8 * 500),
    decoding=16,
    prompts=1,
    whole=Load(4000, 0, 4000 * 4001 // 2, 4000),
    begins=False,
    start=0,
    left=4000,
)
PROMPTS_ALONE = replace(SCENE, decodes=Load(), group=Load(), decoding=0)


def known(num_stages: int) -> StageCost:
    cost = StageCost()
    cost.open(num_stages)
    for rows in (1, 2, 4, 8, 16, 32, 64):
        for tokens, start in ((0, 0), (32, 0), (128, 1000), (512, 3000)):
            for context in (10, 1000):
                attended = tokens * start + tokens * (tokens + 1) // 2
                load = Load(tokens, rows, attended, rows * context + bool(tokens) * (start + tokens))
                cost.observe(load, [STAGE.seconds(load)] * num_stages)
    return cost


def chunks(num_stages: int = 2, **rules: float) -> Chunks:
    made = Chunks(ChunkRules(512, 16, **rules), known(num_stages))
    made.open(num_stages)
    return made


def taken(made: Chunks, scene: Scene) -> int:
    """Tokens of the first prompt in such a step."""
    if scene.decodes.decodes:
        made.decodes_go(scene)
    budget = made.budget(scene)
    tokens = budget.chunk(scene.start, scene.left)
    if tokens:
        budget.spend(scene.start, tokens)
    made.sent(scene, budget)
    return tokens


def step_s(scene: Scene, tokens: int, num_stages: int = 2) -> float:
    return num_stages * (STAGE.seconds(scene.decodes) + STAGE.of_chunk(tokens, scene.start))


def test_tokens_alone_count_before_anything_is_known() -> None:
    made = Chunks(ChunkRules(512, 16), StageCost())
    made.open(1)
    assert taken(made, SCENE) == 512 - 8
    assert taken(made, PROMPTS_ALONE) == 512


def test_chunks_shrink_as_their_prefix_grows_and_steps_take_the_same() -> None:
    made = chunks(num_stages=1)
    starts = (0, 500, 1000, 2000, 3000)
    scenes = [replace(PROMPTS_ALONE, start=start, left=100_000) for start in starts]
    sizes = [taken(made, scene) for scene in scenes]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 512 and sizes[-1] < 300
    took = [step_s(scene, tokens, 1) for scene, tokens in zip(scenes, sizes, strict=True)]
    assert max(took) < 1.1 * min(took)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_decodes_take_so_many_times_what_they_take_alone(num_stages: int) -> None:
    made = chunks(num_stages, slowdown_max=2.0)
    scene = replace(SCENE, groups=num_stages)
    for start in (0, 1000, 3000):
        tokens = taken(made, replace(scene, start=start))
        slowdown = step_s(replace(scene, start=start), tokens, num_stages) / step_s(scene, 0, num_stages)
        assert 1.5 < slowdown < 2.1, (start, tokens)


def test_no_step_with_decodes_takes_longer_than_it_may() -> None:
    made = chunks(slowdown_max=0, max_step_ms=30.0)
    for start in (0, 1000, 3000):
        scene = replace(SCENE, start=start)
        assert 0.020 < step_s(scene, taken(made, scene)) < 0.032


def test_a_prompt_goes_on_however_little_room_there_is() -> None:
    made = chunks(slowdown_max=0, max_step_ms=1.0)
    assert taken(made, replace(SCENE, start=3000)) == 4


def test_without_bounds_prompts_take_what_tokens_allow() -> None:
    made = chunks(num_stages=1, slowdown_max=0)
    assert taken(made, SCENE) > 400


def test_many_prompts_make_few_decodes_wait() -> None:
    made = chunks(num_stages=1)
    few, many = taken(made, SCENE), taken(made, replace(SCENE, prompts=16))
    assert many > 3 * few


def test_with_one_stage_what_was_not_taken_is_for_the_next_prompts_first_chunk() -> None:
    made = chunks(num_stages=1)
    usual = taken(made, SCENE)
    for _ in range(3):
        made.decodes_go(replace(SCENE, prompts=0))
    first = taken(made, replace(SCENE, begins=True))
    assert first > 2 * usual
    assert taken(made, SCENE) <= usual


def test_a_step_of_prompts_goes_past_decodes_only_if_it_ends_a_prompt() -> None:
    made = chunks(num_stages=1)
    past = replace(SCENE, decodes=Load(), begins=True)
    made.decodes_go(SCENE)
    made.decodes_go(SCENE)
    assert taken(made, past) == 0
    assert taken(made, replace(past, left=24)) == 24
    assert taken(made, replace(past, left=24)) == 0  # what there was is spent


def test_through_several_stages_small_chunks_follow_each_other() -> None:
    one, four = chunks(num_stages=1), chunks(num_stages=4)
    scene = replace(PROMPTS_ALONE, whole=Load(512, 0, 512 * 513 // 2, 512), left=512)
    assert taken(one, scene) == 512
    assert 32 <= taken(four, scene) <= 128


def test_what_is_left_of_a_prompt_is_divided_evenly() -> None:
    budget = Budget(Coefficients(0.0, 1e-4, 0.0, 0.0, 0.0), 512, 0.0101, 4)
    assert budget.chunk(0, 128) == 64


def test_prompts_leave_blocks_to_those_that_run() -> None:
    made = chunks(num_stages=1, slowdown_max=0)
    assert taken(made, replace(PROMPTS_ALONE, blocks_share=0.25)) == 128
    assert taken(made, replace(PROMPTS_ALONE, blocks_share=0.0)) == 16


def test_prompts_that_cost_nothing_are_not_cut() -> None:
    """As of stages whose steps take the same whatever is in them: a prompt of 101 went in chunks of 4."""
    cost = Coefficients(1e-3, 0.0, 1e-4, 0.0, 0.0)
    assert Budget(cost, 512, 0.0, 4).chunk(0, 101) == 101
