"""One seed from beginning to end: faults while clients ask, then calm, then rest; and the checks of each."""

import asyncio
import random
import time
import traceback
from dataclasses import dataclass, replace
from functools import partial

from batcher.config import Config as BatcherConfig
from batcher.service import Batcher
from chassis import log
from chassis.ports import Ports
from gateway.config import Config as GatewayConfig
from gateway.service import Gateway
from kvstore.config import Config as KvConfig
from kvstore.service import KvStore
from shard_worker.compute import InlineCompute
from shard_worker.config import Config as WorkerConfig
from shard_worker.fake_model import FakeConfig
from shard_worker.service import ShardWorker
from tests.sim import checkers
from tests.sim.answers import check_answers
from tests.sim.clients import NUM_LAYERS, POISON_ID, Outcome, SimClient, draw_plans
from tests.sim.faults import run_faults
from tests.sim.loop import SimLoop
from tests.sim.loop import run as run_virtual
from tests.sim.machines import Exact, Wobbly
from tests.sim.options import Options, draw
from tests.sim.pause import task_factory
from tests.sim.spans import check_traces
from tests.sim.world import World

CALM_S = 60.0  # everything ends within this time after the last fault
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


def build(world: World) -> None:
    options = world.options
    batcher = BatcherConfig(
        num_stages=options.stages,
        listen="mem://batcher:0",
        waiting_len_max=options.waiting_len_max,
        running_len_max=options.running_len_max,
        step_tokens_max=options.step_tokens_max,
        steps_in_flight=options.steps_in_flight,
        run_ahead=options.run_ahead,
        block_size_tokens=options.block_size_tokens,
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
    for i in range(options.kvstores):
        world.add(f"kvstore{i}", lambda p: KvStore(KvConfig(rpc_address="kvstore:0", check_every_calls=5), p))

    def machine(ports: Ports) -> Exact:
        return Wobbly(fake, ports.new_seed()) if options.wobbly else Exact(fake)

    both = options.both and options.batchers > 1
    for i in range(options.stages + options.spares + both * options.second_stages):
        world.add(f"worker{i}", lambda p: ShardWorker(worker, p, machine(p), InlineCompute(delay_s)))
    second = replace(batcher, num_stages=options.second_stages)
    for i, config in enumerate((batcher, second)[: options.batchers]):
        world.add(f"batcher{i}", partial(Batcher, config))
    gateway = GatewayConfig(grpc_address="", drain_wait_s=1.0)
    for i in range(options.gateways):
        world.add(f"gateway{i}", lambda p: Gateway(gateway, p))


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


async def live(options: Options, outcomes: list[Outcome]) -> World:
    loop = asyncio.get_running_loop()
    if "pause" in options.faults:
        loop.set_task_factory(task_factory)  # type: ignore[arg-type]
    world = World(options)
    loop.set_exception_handler(lambda _, context: world.fail(str(context), context.get("exception")))
    build(world)
    for node in world.nodes.values():
        node.start()
    clients = [SimClient(world, plan) for plan in draw_plans(world)]
    outcomes.extend(client.outcome for client in clients)
    watching = loop.create_task(watch(world))
    asking = [loop.create_task(client.run(), name=client.outcome.plan.name) for client in clients]
    try:
        await run_faults(world)
        world.calm()
        _, late = await asyncio.wait(asking, timeout=CALM_S)
        for task in late:
            world.fail(f"{task.get_name()} has no answer {CALM_S:.0f} s after the last fault")
        for task in asking:
            if task.done() and not task.cancelled() and task.exception() is not None:
                world.fail(f"{task.get_name()} crashed: {task.exception()!r}", task.exception())
        if not world.failures:
            await rest(world)
            check_answers(world, outcomes)
            checkers.check_logs(world)
            checkers.check_blocks(world)
            check_traces(world)
    finally:
        watching.cancel()
        for task in asking:
            task.cancel()
        await asyncio.wait([watching, *asking])
        await world.close()
    return world


def run_seed(seed: int, options: Options | None = None) -> Report:
    """Runs one seed; the same seed at the same commit does the same."""
    log.bind(level="off")
    start = time.perf_counter()
    outcomes: list[Outcome] = []
    times: list[float] = []

    async def main() -> World:
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
    )
