"""What must hold of a run: while it goes on, once its clients have their answers, and when it is at rest."""

from chassis import subjects
from chassis.messages.request import Cancel, Claim, Reason, Terminal, parse_record
from tests.sim.clients import Outcome, expected
from tests.sim.world import World

DISRUPTIVE = ("worker", "batcher", "link", "hang", "pause", "poison", "cut", "broker")


def check_cores(world: World) -> None:
    """Invariants of every living core."""
    for node in world.nodes.values():
        service = node.service
        if service is None:
            continue
        if node.name.startswith("kvstore"):
            service.ledger.check()
        elif node.name.startswith("gateway"):
            service.check()
        elif node.name.startswith("worker"):
            service.stage.check()
        elif hasattr(service, "_core"):
            service._core.check()


def check_answer(world: World, outcome: Outcome) -> None:
    """The client's ids and text against the oracle's."""
    plan = outcome.plan
    ids, text, reason = expected(plan.call)
    name = f"{plan.name} ({outcome.request_id})"

    def demand(ok: bool, what: str) -> None:
        if not ok:
            world.fail(f"{name}: {what}")

    demand(outcome.ids == ids[: len(outcome.ids)], f"ids {outcome.ids} are no prefix of {ids}")
    match outcome.reason:
        case "STOP" | "LENGTH":
            demand(outcome.ids == ids, f"whole ids {outcome.ids}, expected {ids}")
            demand(outcome.text == text, f"text {outcome.text!r}, expected {text!r}")
            demand(outcome.reason == reason.name, f"reason {outcome.reason}, expected {reason.name}")
        case "CANCELLED":
            wished = outcome.cancelled or plan.leave_after is not None or world.gateways_died
            demand(wished, "cancelled, but nobody cancelled")
        case "DEADLINE" | "DEADLINE_EXCEEDED":
            demand(plan.call.timeout_ms > 0, "deadline, but it had none")
        case "UNAVAILABLE":
            demand(not plan.call.client_key and outcome.request_id is None, "gave up what it should not")
        case "INTERNAL" | "FAILED":
            blamed = sum(k in DISRUPTIVE for k in world.options.faults) and world.options.num_faults >= 2
            demand(plan.poison or bool(blamed), "failed without a cause")
        case _:
            demand(False, f"ended as {outcome.reason!r}")
    if plan.poison:
        demand(outcome.reason not in ("STOP", "LENGTH"), "a poisoned request has an answer")


def check_logs(world: World, outcomes: list[Outcome]) -> None:
    """One terminal record for each request that was accepted; it is the last; no claim after a cancel."""
    logs: dict[str, list[object]] = {}
    for stored in world.broker.streams[subjects.RESULTS].messages():
        logs.setdefault(stored.subject, []).append(parse_record(stored.data))
    for subject, records in logs.items():
        terminals = [r for r in records if isinstance(r, Terminal)]
        if len(terminals) > 1:
            world.fail(f"{subject}: {len(terminals)} terminal records")
        if terminals and records[-1] is not terminals[0]:
            world.fail(f"{subject}: a record after the terminal one")
        for before, after in zip(records, records[1:], strict=False):
            if isinstance(before, Cancel) and isinstance(after, Claim):
                world.fail(f"{subject}: a claim follows a cancel")
        attempts = [r.attempt for r in records if isinstance(r, Claim)]
        if attempts != sorted(set(attempts)):
            world.fail(f"{subject}: attempts {attempts}")
    for outcome in outcomes:
        if outcome.request_id is None:
            continue
        records = logs.get(subjects.result(outcome.request_id), [])
        last = records[-1] if records else None
        if not isinstance(last, Terminal):
            world.fail(f"{outcome.plan.name}: accepted, but no terminal record: {last}")
        elif outcome.finished:
            if last.reason.name != outcome.reason:
                world.fail(f"{outcome.plan.name}: told {outcome.reason}, the record says {last.reason.name}")
            if last.reason in (Reason.STOP, Reason.LENGTH) and list(last.output_ids) != outcome.ids:
                world.fail(f"{outcome.plan.name}: the record holds other ids")


def check_rest(world: World) -> None:
    """Nothing is left: no message, no held request, no running sequence, no block table."""
    left = [m.subject for m in world.broker.streams[subjects.REQUESTS].messages()]
    if left:
        world.fail(f"messages left: {left}")
    for node in world.nodes.values():
        if not node.name.startswith("batcher") or node.service is None:
            continue
        core = getattr(node.service, "_core", None)
        if core is None:
            continue
        if len(core.ownership):
            world.fail(f"{node.name} still holds {core.ownership.counts()}")
        if core.scheduler.num_running or core.scheduler.num_waiting:
            world.fail(f"{node.name} still schedules")
        if any(core.scheduler.tables()):
            world.fail(f"{node.name}: block tables are left")


def check_traces(world: World) -> None:
    """Each span of a kept request has its parent in the same trace, or a root of ours above it."""
    by_key: dict[str, list[tuple[bytes, bytes | None, str]]] = {}
    for _, span in world.tracer.spans:
        by_key.setdefault(span.key, []).append((span.context.span_id, span.parent, span.name))
    traces: dict[str, set[bytes]] = {}
    for _, span in world.tracer.spans:
        traces.setdefault(span.key, set()).add(span.context.trace_id)
    for key in world.tracer.kept:
        if len(traces.get(key, ())) > 1 and not world.gateways_died and not key.startswith("step:"):
            world.fail(f"{key}: spans in {len(traces[key])} traces")
