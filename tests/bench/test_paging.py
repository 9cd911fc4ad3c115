"""What paging is measured by: the cores run full, waste is counted, and the lengths are those stated."""

import random
from statistics import mean, median

from bench.paging import Lengths, Pipeline, Setting, contiguous_stored, draw_chat, run

SMALL = Setting(context_len=512, contiguous=8, warm_up_steps=150, steps=150)


def test_lengths_are_those_stated() -> None:
    rng = random.Random(1)
    lengths = [draw_chat(rng) for _ in range(20_000)]
    prompts, outputs = [p for p, _, _ in lengths], [o for _, o, _ in lengths]
    assert abs(median(prompts) - 128) < 6 and abs(mean(prompts) - 250) < 20
    assert abs(median(outputs) - 192) < 8 and abs(mean(outputs) - 280) < 20
    assert max(p + o for p, o, _ in lengths) <= 4096 and min(min(p, o) for p, o, _ in lengths) >= 1


def test_a_sequence_holds_its_prompt_and_half_its_answer_on_average() -> None:
    assert contiguous_stored([Lengths(100, 50, 60)]) == 125.0
    assert contiguous_stored([Lengths(0, 10, 10), Lengths(0, 30, 30)]) == (10 * 5 + 30 * 15) / 40


def test_the_cores_run_full_and_the_waste_is_the_ends_of_last_blocks() -> None:
    seen = run(SMALL, 1)
    assert len(seen.running) == SMALL.steps
    assert mean(seen.running) > SMALL.contiguous, "no more than contiguous memory would hold"
    size = SMALL.block_size_tokens
    for running, stored, tables, leased in zip(
        seen.running, seen.stored_tokens, seen.table_tokens, seen.leased_tokens, strict=True
    ):
        assert 0 <= tables - stored <= running * size, "a sequence has a block it does not need"
        assert tables <= leased <= SMALL.num_blocks * size
    assert 0 < seen.wasted < 0.1


def test_who_ends_gives_its_memory_back() -> None:
    pipeline = Pipeline(SMALL, 2)
    for _ in range(100):
        pipeline.step()
    asked = list(pipeline.scheduler.request_ids())
    for request_id in asked:
        pipeline.scheduler.stop(request_id, pipeline.now)
    pipeline.now += 1.0
    pipeline.scheduler.tick(pipeline.now)  # what is given back waits for company, but not for long
    pipeline._settle()
    stats = pipeline.ledger.stats("g")
    assert stats.leased == pipeline.scheduler._lease.num_idle and stats.total == SMALL.num_blocks
