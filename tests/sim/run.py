"""One seed from beginning to end: faults while clients ask, then calm, then rest; and the checks of each."""

import asyncio
import random
import time
import traceback
from dataclasses import dataclass, replace
from functools import partial

from batcher.config import Config as BatcherConfig
from batcher.service import Batcher
from chassis import log, subjects
from chassis.ports import Ports
from gateway.config import Config as GatewayConfig
from gateway.service import Gateway
from kvstore.config import Config as KvConfig
from shard_worker.compute import InlineCompute
from shard_worker.config import Config as WorkerConfig
from shard_worker.fake_model import FakeConfig, card_of
from shard_worker.grammar import Grammars
from tests.sim import checkers
from tests.sim.answers import check_answers
from tests.sim.choices import draw_choices
from tests.sim.clients import NUM_LAYERS, POISON_ID, Outcome, SimClient, draw_plans
from tests.sim.faults import kill_who_ends, run_faults
from tests.sim.grammars import compile_later
from tests.sim.jobs import check_jobs, draw_jobs
from tests.sim.lies import DeceivedWorker, LyingKvStore, lying
from tests.sim.loop import SimLoop
from tests.sim.loop import run as run_virtual
from tests.sim.machines import Exact, Wobbly
from tests.sim.options import Options, draw
from tests.sim.pause import task_factory
from tests.sim.queue_knobs import draw_knobs
from tests.sim.scaling import add_extra, check_owners, come_back, run_scaling
from tests.sim.spans import check_traces
from tests.sim.tiers import restored, run_tier_faults, with_tiers
from tests.sim.world import World

CALM_S = 60.0  # after the last fault something is written within this time, until everything ended
CALMS_MAX = 5  # slow worlds have much to do; but not for ever
REST_S = 40.0  # and everybody lets go within this time after the last client
LATE_S = 4.5  # what was under way has arrived
WATCH_S = 0.1
REST_WATCH_S = 0.5


@dataclass(frozen=True, slots=True)
class Report:
    seed: int
    failures: tuple[str, ...]
    history: tuple[str, ...]
    outcomes: tuple[Outcome, ...]
    virtual_s: float
    real_s: float
    restored: int = 0  # blocks, from tiers


def build(world: World) -> None:
    options = world.options
    knobs = draw_knobs(options.seed, options.waiting_len_max)
    batcher = BatcherConfig(
        num_stages=options.stages,
        listen="mem://batcher:0",
        waiting_len_max=options.waiting_len_max,
        running_len_max=options.running_len_max,
        step_tokens_max=options.step_tokens_max,
        steps_in_flight=options.steps_in_flight,
        run_ahead=options.run_ahead,
        slowdown_max=options.slowdown_max,
        max_step_ms=options.max_step_ms,
        block_size_tokens=options.block_size_tokens,
        default_queue_policy=knobs.policy,
        preferred_batch_size=knobs.preferred_batch_size,
        max_queue_delay_us=knobs.max_queue_delay_us,
        max_batch_size=knobs.max_batch_size,
        preserve_ordering=knobs.preserve_ordering,
        overtakes_max=knobs.overtakes_max,
        tenant_weights={"u": 3.0},
        step_timeout_ms=2_000,
        drain_timeout_ms=1_000,
        reform_timeout_ms=6_000,
        form_timeout_ms=3_000,
    )
    fake = FakeConfig(num_blocks=options.num_blocks, num_layers=NUM_LAYERS, poison_id=POISON_ID)
    costs = random.Random(f"costs {options.seed}")

    def delay_s() -> float:
        hang_s, world.hang_s = world.hang_s, 0.0
        return hang_s + options.step_cost_s * (0.5 + costs.random())

    worker = WorkerConfig(listen="mem://worker:0", rpc_listen="worker:0", slot_mb=1, drain_wait_ms=1_000)
    worker = replace(worker, verify_contents=1.0)
    unproven = random.Random(f"proven {options.seed}").random() < 0.3
    if options.tiers is not None:
        unproven = not options.tiers.proven
    if unproven and not options.lies:  # what is wrong before workers prove it shows in the answers
        worker = replace(worker, verify_stamps=0.0)
    kv_store, shard_worker = lying(world, LyingKvStore), lying(world, DeceivedWorker)
    kvstore = KvConfig(rpc_address="kvstore:0", check_every_calls=5)

    def add_kvstore(i: int) -> None:
        config, disk = with_tiers(world, kvstore, f"kvstore{i}")
        world.add(f"kvstore{i}", lambda p: kv_store(config, p, disk))

    unlike = random.Random(f"unlike {options.seed}")
    scaling = options.scaling

    def add_worker(i: int) -> None:
        own = (unlike.choice(scaling.speeds), unlike.choice(scaling.rooms)) if scaling is not None else ()

        def machine(ports: Ports) -> Exact:
            return Wobbly(fake, ports.new_seed(), *own) if options.wobbly else Exact(fake, *own)

        world.add(
            f"worker{i}",
            lambda p: shard_worker(
                worker,
                p,
                machine(p),
                InlineCompute(delay_s),
                grammars=Grammars(card_of(fake), compile_later(options.seed)),
            ),
        )

    second = replace(batcher, num_stages=options.second_stages)

    def add_batcher(i: int) -> None:
        world.add(f"batcher{i}", partial(Batcher, second if i == 1 else batcher))

    jobs_at_once = 4 if options.jobs else 0
    gateway = GatewayConfig(grpc_address="", http_address="", drain_wait_s=1.0, grammar_timeout_s=0.0)
    gateway = replace(gateway, jobs_at_once_max=jobs_at_once)

    def add_gateway(i: int) -> None:
        world.add(f"gateway{i}", lambda p: Gateway(gateway, p))

    both = options.both and options.batchers > 1
    add = {"kvstore": add_kvstore, "worker": add_worker, "batcher": add_batcher, "gateway": add_gateway}
    counts = {
        "kvstore": options.kvstores,
        "worker": options.stages + options.spares + both * options.second_stages,
        "batcher": options.batchers,
        "gateway": options.gateways,
    }
    for kind, count in counts.items():
        for i in range(count):
            add[kind](i)
    add_extra(world, add, counts)


async def watch(world: World) -> None:
    while True:
        await asyncio.sleep(REST_WATCH_S if world.habits.calm else WATCH_S)
        try:
            checkers.check_cores(world)
        except AssertionError as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            world.fail(
                f"invariant: {error} at {at.filename.rpartition('/')[2]}:{at.lineno}: {at.line}", error
            )
            return


async def rest(world: World) -> None:
    """Until nothing is left and nothing can come any more."""
    loop = asyncio.get_running_loop()
    give_up_at, until = loop.time() + REST_S, world.calm_at + LATE_S
    while (left := checkers.unrest(world)) or loop.time() < until:
        if left and loop.time() > give_up_at:
            world.fail(f"no rest: {left}")
            return
        await asyncio.sleep(REST_WATCH_S)


async def late(world: World, asking: list[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """Those that are not answered though nothing happens any more, or for too long."""
    left, results = set(asking), world.broker.streams[subjects.RESULTS]
    for _ in range(CALMS_MAX):
        before = len(list(results.messages()))
        _, left = await asyncio.wait(left, timeout=CALM_S)
        if not left or len(list(results.messages())) == before:
            break
    return left


async def live(options: Options, outcomes: list[Outcome]) -> World:
    loop = asyncio.get_running_loop()
    if "pause" in options.faults:
        loop.set_task_factory(task_factory)  # type: ignore[arg-type]
    world = World(options)
    loop.set_exception_handler(lambda _, context: world.fail(str(context), context.get("exception")))
    build(world)
    for name in world.first:
        world.nodes[name].start()
    clients = [SimClient(world, plan) for plan in draw_plans(world)]
    outcomes.extend(client.outcome for client in clients)
    watching = loop.create_task(watch(world))
    asking = [loop.create_task(client.run(), name=client.outcome.plan.name) for client in clients]
    asking += [loop.create_task(client.run(), name=client.name) for client in draw_choices(world)]
    jobs = draw_jobs(world)
    asking += [loop.create_task(client.run(), name=client.name) for client in jobs]
    try:
        kill_who_ends(world)
        async with asyncio.TaskGroup() as group:
            group.create_task(run_tier_faults(world))
            group.create_task(run_scaling(world))
            await run_faults(world)
        come_back(world)
        world.calm()
        for task in await late(world, asking):
            world.fail(
                f"{task.get_name()} has no answer, {loop.time() - world.calm_at:.0f} s after the last fault"
            )
        for task in asking:
            if task.done() and not task.cancelled() and task.exception() is not None:
                world.fail(f"{task.get_name()} crashed: {task.exception()!r}", task.exception())
        if not world.failures:
            await rest(world)
            check_answers(world, outcomes)
            check_jobs(jobs)
            checkers.check_logs(world)
            checkers.check_receipts(world)
            checkers.check_blocks(world)
            check_owners(world)
            check_traces(world)
    finally:
        world.num_restored = restored(world)
        watching.cancel()
        for task in asking:
            task.cancel()
        await asyncio.wait([watching, *asking])
        await world.close()
    return world


def run_seed(seed: int, options: Options | None = None) -> Report:
    """Runs one seed; the same seed at the same commit does the same."""
    start = time.perf_counter()
    outcomes: list[Outcome] = []
    times: list[float] = []

    async def main() -> World:
        log.bind(level="off")
        try:
            return await live(options or draw(seed), outcomes)
        finally:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, SimLoop)
            times.append(loop.time())

    world = run_virtual(main())
    return Report(
        seed,
        tuple(world.failures),
        tuple(world.history),
        tuple(outcomes),
        times[0],
        time.perf_counter() - start,
        world.num_restored,
    )
