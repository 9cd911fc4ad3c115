"""Pure. What a batcher tells scrapers: its own counts, named when they are asked for.

Counters of tokens and requests move as receipts are stored, so that they agree with the sums of those. The
three that the Gateway API's inference extension asks of a model server are `shoal_requests_waiting`,
`shoal_requests_running` and `shoal_kv_cache_usage_ratio`.
"""

from collections.abc import Iterator, Mapping

from batcher.core import Core
from batcher.scheduler import Scheduler
from batcher.statistics import Statistics
from chassis.ids import BootId
from chassis.messages.statistics import ModelStatistics
from chassis.metrics import BATCH_SIZES, Family, Histogram, counter, gauge, histogram


def families(
    core: Core, statistics: Statistics, boot: BootId, model: str, counts: Mapping[str, int], now: float
) -> Iterator[Family]:
    told = statistics.tell(boot, model, core.scheduler.balance.use)
    yield from _of_requests(statistics, told)
    yield from _of_queue(core, model, now)
    yield from _of_steps(core.scheduler, told)
    yield from _of_stages(told)
    yield counter("shoal_batcher_events_total", "What is rare, by kind").each(counts, "event")


def _of_requests(statistics: Statistics, told: ModelStatistics) -> Iterator[Family]:
    model = told.model
    yield counter("shoal_requests_total", "Requests that ended, by reason").each(
        told.ends, "reason", gen_ai_request_model=model
    )
    tokens = {
        "input": told.input_tokens,
        "cached": told.cached_tokens,
        "output": told.output_tokens,
        "recomputed": statistics.recomputed_tokens,
    }
    yield counter("shoal_tokens_total", "Tokens of requests that ended; cached are of the input").each(
        tokens, "gen_ai_token_type", gen_ai_request_model=model
    )
    for name, help_, of in (
        ("shoal_request_queue_seconds", "From the broker until it has its place", statistics.queue_s),
        ("shoal_request_seconds", "From the broker until it ended", statistics.total_s),
        ("shoal_request_first_token_seconds", "From the broker to the first token", statistics.first_token_s),
        ("shoal_token_gap_seconds", "Between two tokens of a request, as steps came", statistics.token_gap_s),
    ):
        yield histogram(name, help_).add(of, gen_ai_request_model=model)


def _of_queue(core: Core, model: str, now: float) -> Iterator[Family]:
    scheduler = core.scheduler
    model_of = {"gen_ai_request_model": model}
    yield gauge("shoal_requests_waiting", "In the waiting room").add(core.num_waiting, **model_of)
    yield gauge("shoal_requests_running", "With a place in steps").add(scheduler.num_running, **model_of)
    yield gauge("shoal_requests_held", "All that are kept from redelivery").add(len(core.ownership))
    oldest = gauge("shoal_requests_oldest_wait_seconds", "Since the broker stored it; 0: nobody waits")
    yield oldest.add(max(0.0, now - core.ownership.oldest_waiting_at(now)), **model_of)
    used, num_blocks = scheduler.usage
    share = used / num_blocks if num_blocks else 0.0
    yield gauge("shoal_kv_cache_usage_ratio", "Blocks in use of all").add(share, **model_of)
    yield gauge("shoal_kv_blocks", "Of the pool").add(num_blocks)
    yield gauge("shoal_kv_block_size_tokens", "Tokens of a block").add(scheduler.block_size_tokens)
    yield gauge("shoal_pipeline_standing", "Steps can run").add(core.standing)
    yield gauge("shoal_pipeline_epoch", "Of the newest formation").add(core.formation.epoch)


def _of_steps(scheduler: Scheduler, told: ModelStatistics) -> Iterator[Family]:
    stats = scheduler.stats
    yield counter("shoal_steps_total", "Steps that came back with rows").add(told.execution_count)
    yield counter("shoal_step_rows_total", "Rows of those").add(told.inference_count)
    yield counter("shoal_step_tokens_total", "Tokens in steps").add(stats.tokens)
    yield counter("shoal_step_ghost_rows_total", "Rows computed for nobody").add(stats.ghost_rows)
    yield counter("shoal_steps_voided_total", "Lost with their epoch").add(stats.voided)
    yield counter("shoal_step_seconds_total", "What steps added, one after another").add(stats.service_s)
    yield gauge("shoal_steps_in_flight", "Sent and not back").add(scheduler.num_in_flight)
    sizes = Histogram(BATCH_SIZES)
    for size, computed in told.batch_stats.items():
        sizes.observe(size, computed.compute_infer.count)
    yield histogram("shoal_step_size_rows", "Sequences in a step").add(sizes)


def _of_stages(told: ModelStatistics) -> Iterator[Family]:
    yield counter("shoal_pipeline_active_seconds_total", "Steps were in flight").add(told.active_ns / 1e9)
    busy = counter("shoal_stage_busy_seconds_total", "Computing")
    queued = counter("shoal_stage_queued_seconds_total", "Steps lay there while it computed others")
    idle = counter("shoal_stage_idle_seconds_total", "No step was there, though more were to come")
    bubbles = gauge("shoal_stage_bubble_ratio", "Of the active time: what it did not compute")
    for index, (stage, share) in enumerate(zip(told.stages, told.bubble_shares, strict=True)):
        busy.add(stage.busy_ns / 1e9, stage=str(index))
        queued.add(stage.queued_ns / 1e9, stage=str(index))
        idle.add(stage.idle_ns / 1e9, stage=str(index))
        bubbles.add(share, stage=str(index))
    yield from (busy, queued, idle, bubbles)
