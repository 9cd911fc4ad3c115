"""What must hold of a run: of the cores while it goes on, of the logs and of what is left once it rests."""

from typing import Any

from chassis import subjects, usage_subjects
from chassis.ids import RequestId
from chassis.messages.request import Cancel, Claim, Record, Terminal, parse_record
from chassis.messages.usage import Receipt, parse_receipt, receipt_of
from kvstore.pool import Pool
from tests.sim.world import World


def check_cores(world: World) -> None:
    """Invariants of every living core."""
    for node in world.nodes.values():
        service = node.service
        if service is None:
            continue
        if node.name.startswith("kvstore"):
            service.ledger.check()
            service.tiers.check()
        elif node.name.startswith("gateway"):
            service.check()
            _check_minimums(world, service)
        elif node.name.startswith("worker"):
            service.stage.check()
        elif hasattr(service, "_core"):
            service._core.check()


def _check_minimums(world: World, gateway: Any) -> None:
    """A gateway that gave a stream to an owner takes nothing from an older one."""
    for request_id, stream in gateway._streams._core._table.streams.items():
        granted = world.broker.granted.get((gateway.boot, request_id), 0)
        if stream.accepted and not stream.joined:
            assert stream.min_attempt >= granted, f"{request_id}: owner {granted} was let in, then forgotten"


def read_logs(world: World) -> dict[str, list[tuple[float, Record]]]:
    """Of every request: its records, and when each was stored."""
    logs: dict[str, list[tuple[float, Record]]] = {}
    for stored in world.broker.streams[subjects.RESULTS].messages():
        at_s = (stored.stored_at_ns - world.EPOCH_NS) / 1e9
        logs.setdefault(stored.subject, []).append((at_s, parse_record(stored.data)))
    return logs


def check_logs(world: World) -> None:
    """Every stored request has one terminal record, its last; no claim after a cancel; attempts grow."""
    logs = {subject: [record for _, record in log] for subject, log in read_logs(world).items()}
    for request_id in world.broker.stored:
        log = logs.get(subjects.result(request_id), [])
        if not log or not isinstance(log[-1], Terminal):
            world.fail(f"{request_id} has no end: {log[-1:]}")
    for subject, records in logs.items():
        terminals = [r for r in records if isinstance(r, Terminal)]
        if len(terminals) > 1:
            world.fail(f"{subject}: {len(terminals)} terminal records")
        if terminals and records[-1] is not terminals[0]:
            world.fail(f"{subject}: a record after the terminal one")
        for before, after in zip(records, records[1:], strict=False):
            if isinstance(before, Cancel) and isinstance(after, Claim):
                world.fail(f"{subject}: a claim follows a cancel")
        for k, left in enumerate(records):
            if isinstance(left, Claim) and left.left and not _leaves(records[:k], left):
                world.fail(f"{subject}: {left} does not follow its claim")
        claims = [r for r in records if isinstance(r, Claim)]
        attempts = [r.attempt for r in claims if not r.left]
        if attempts != sorted(set(attempts)):
            world.fail(f"{subject}: attempts {attempts}")
        if terminals and claims and terminals[0].attempt != claims[-1].attempt:
            world.fail(f"{subject}: ended in attempt {terminals[0].attempt}, claimed were {attempts}")
        digests = {r.body_digest for r in claims} | {r.body_digest for r in terminals}
        if len(digests) > 1:
            world.fail(f"{subject}: two bodies under one id")


def check_receipts(world: World) -> None:
    """Every request that ended has one receipt, which says what its terminal record says."""
    written: dict[str, list[Receipt]] = {}
    for stored in world.broker.streams[subjects.USAGE].messages():
        receipt = parse_receipt(stored.data)
        written.setdefault(receipt.request_id, []).append(receipt)
        if stored.subject != usage_subjects.receipt(receipt.tenant, receipt.model, receipt.request_id):
            world.fail(f"{stored.subject} has the receipt of {receipt.request_id}")
    for subject, log in read_logs(world).items():
        request_id = RequestId(subject.rpartition(".")[2])
        ends = [receipt_of(request_id, record) for _, record in log if isinstance(record, Terminal)]
        if written.pop(request_id, []) != ends:
            world.fail(f"{request_id}: its receipts are not those of its end: {ends}")
        for receipt in ends:
            _check_times(world, receipt)
    for left in written:
        world.fail(f"{left} has a receipt and no record")


def _check_times(world: World, receipt: Receipt) -> None:
    t, now_ms = receipt.timings, world.wall_ns() // 1_000_000
    if not world.EPOCH_NS // 1_000_000 <= receipt.accepted_ms <= receipt.ended_ms <= now_ms:
        world.fail(f"{receipt.request_id}: from {receipt.accepted_ms} until {receipt.ended_ms}, now {now_ms}")
    for computed_us in t.stage_compute_us:
        if computed_us > t.total_us:
            world.fail(f"{receipt.request_id}: a stage computed {computed_us} us in {t.total_us}")


def _leaves(log: list[Record], left: Claim) -> bool:
    match log[-1:]:
        case [Claim(left=False) as mine]:
            return (mine.attempt, mine.boot) == (left.attempt, left.boot)
    return False


def unrest(world: World) -> list[str]:
    """What is left though every client has its answer: messages, held requests, sequences, tables, calls."""
    streams = world.broker.streams
    left = [m.subject for name in (subjects.REQUESTS, subjects.JOBS) for m in streams[name].messages()]
    for node in world.nodes.values():
        service = node.service
        if service is None:
            left += [] if node.away else [f"{node.name} is down"]
        elif node.name.startswith("batcher"):
            left += [f"{node.name}: {what}" for what in _batcher_unrest(service)]
        elif node.name.startswith("kvstore") and any(_moves(p) for p in service.ledger.pools.values()):
            left.append(f"{node.name}: contents move")
        elif node.name.startswith("gateway") and not service._streams.idle:
            left.append(f"{node.name}: streams or cancels")
        elif node.name.startswith("gateway") and service._jobs is not None and not service._jobs.idle:
            left.append(f"{node.name}: jobs")
    return left


def _moves(pool: Pool) -> bool:
    """What is in doubt stays held until the pool is attached anew, by the next call if there is one."""
    return pool.num_own > 0 and not pool.doubtful


def _batcher_unrest(service: object) -> list[str]:
    core = getattr(service, "_core", None)
    if core is None:
        return []
    left = []
    if len(core.ownership):
        left.append(f"holds {core.ownership.counts()}")
    if core.scheduler.num_running or core.scheduler.num_waiting:
        left.append("schedules")
    if any(core.scheduler.tables()):
        left.append("block tables")
    lease = core.scheduler._lease
    if core.standing and (lease.unsettled or not lease.attached):
        left.append("kvstore calls")
    return left


def check_blocks(world: World) -> None:
    """A batcher at rest leases exactly what its kvstore says it leases, unless it was lied to."""
    if world.options.lies:
        return
    for node in world.nodes.values():
        core = getattr(node.service, "_core", None)
        if not node.name.startswith("batcher") or core is None or not core.standing:
            continue
        attachment = node.service._kvstore._attachment
        held = core.scheduler._lease.refs
        for other in world.nodes.values():
            if other.name.startswith("kvstore") and other.up and other.service.boot == attachment.boot:
                pool = other.service.ledger.pools[attachment.pool.generation]
                counts = ((block, pool._leased(block)) for block in range(pool.attach.num_blocks))
                leased = {block: count for block, count in counts if count}
                if leased != held:
                    world.fail(f"{node.name} leases {held}, {other.name} says {leased}")
