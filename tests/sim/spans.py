"""Traces of a run: each request's spans form one tree, and steps and requests know each other.

Only what a killed process had not yet recorded may be missing.
"""

from chassis.trace import STEP_PREFIX, Span
from tests.sim.world import World

ROOTS = ("gateway.generate", "gateway.resume")


def check_traces(world: World) -> None:
    by_key: dict[str, list[Span]] = {}
    for span in world.tracer.spans:
        by_key.setdefault(span.key, []).append(span)
    known = {span.context.span_id: span for span in world.tracer.spans}
    for key in world.tracer.kept:
        spans = by_key.get(key, [])
        if len({span.context.trace_id for span in spans}) > 1:
            world.fail(f"{key}: spans in several traces")
        for span in spans:
            if span.parent is None:
                if span.name not in (*ROOTS, "batcher.step"):
                    world.fail(f"{key}: {span.name} has no parent")
            elif span.parent not in known and not _died(world, span.parent):
                world.fail(f"{key}: {span.name} is an orphan")
        if key.startswith(STEP_PREFIX):
            _check_step(world, key, spans)
        else:
            _check_links(world, key, spans, known)


def _died(world: World, span_id: bytes) -> bool:
    """Whether the process that would have recorded this span was killed. Steps' ids belong to batchers."""
    owner = world.tracer.owners.get(span_id)
    if owner is None:
        return any(name.startswith("batcher") for name in world.killed)
    return owner in world.killed


def _check_step(world: World, key: str, spans: list[Span]) -> None:
    batched = [span for span in spans if span.name == "batcher.step"]
    if len(batched) != 1:
        world.fail(f"{key}: {len(batched)} batcher.step spans")


def _check_links(world: World, key: str, spans: list[Span], known: dict[bytes, Span]) -> None:
    """Each segment of a request names its steps, and each of those names the request."""
    for span in spans:
        for link in span.links:
            step = known.get(link.span_id)
            if step is None:
                world.fail(f"{key}: {span.name} links to a step without a span")
            elif span.parent not in [back.span_id for back in step.links]:
                world.fail(f"{key}: step {step.key} does not know it")
