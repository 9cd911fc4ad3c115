"""Pure. What the autoscaler tells scrapers, of one model."""

from collections.abc import Iterator

from chassis.metrics import Family, gauge
from shoal.autoscale.policy import Decision, Signals

PIPELINES_WANTED = "shoal_autoscale_pipelines_wanted"
GATEWAYS_WANTED = "shoal_autoscale_gateways_wanted"


def families(model: str, signals: Signals, decision: Decision, capacity: float) -> Iterator[Family]:
    """Nothing is told before something was decided: who scales by it keeps what there is."""
    for name, told, value in (
        (PIPELINES_WANTED, "Pipelines that there should be", decision.pipelines),
        (GATEWAYS_WANTED, "Gateways that there should be", decision.gateways),
        ("shoal_autoscale_pipelines_needed", "The same before bounds and hysteresis", decision.needed),
        ("shoal_autoscale_pipelines_ready", "Pipelines that take work", signals.ready),
        ("shoal_autoscale_demand_pipelines", "Work that comes, in full pipelines", signals.demand),
        ("shoal_autoscale_demand_now_pipelines", "The same over two seconds", signals.demand_now),
        ("shoal_autoscale_capacity_ratio", "What a full pipeline does of what its steps say", capacity),
        ("shoal_autoscale_backlog_seconds", "Work that waits, of one full pipeline", signals.backlog_s),
        ("shoal_autoscale_wait_seconds", "What a request that comes now would wait", decision.wait_s),
        ("shoal_autoscale_queue_age_seconds", "Who waits longest", signals.queue_age_s),
        ("shoal_autoscale_requests_unfinished", "Accepted and not ended", signals.unfinished),
        ("shoal_autoscale_start_seconds", "A pipeline takes to come", signals.start_s),
    ):
        yield gauge(name, told).add(value, gen_ai_request_model=model)
