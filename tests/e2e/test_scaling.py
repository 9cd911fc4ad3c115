"""Every kind of process joins and leaves under load: no request fails, each answer is whole."""

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from chassis import subjects
from chassis.messages.request import Terminal, parse_record
from shoal import readiness
from shoal.client import AsyncClient
from shoal.launcher import Deployment, LaunchError, Plan, read_state
from shoal.scaling import Scaling
from tests.e2e.rig import Answer, Running, ask, call, fake_plan, running, until
from tests.sim.clients import NUM_LAYERS

CLIENTS = 8
OUTPUT_LEN = 24
SERVES_S = 3.0  # so soon after its workers are loaded a new pipeline has given a token
Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def shoal(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    flags = {"gateway": ("--drain-wait-s", "5")}
    with running(runner, fake_plan(tmp_path_factory.mktemp("scaling"), flags=flags)) as made:
        yield made


class Load:
    """Clients that ask one request after another, each at any gateway that runs, until told to stop."""

    def __init__(self, shoal: Running, seed: int) -> None:
        self._shoal = shoal
        self._rng = random.Random(seed)
        self._over = False
        self.answers: list[Answer] = []

    async def go_on(self, count: int = 2 * CLIENTS) -> None:
        """Until so many more have ended."""
        wanted = self.ended + count
        await until(lambda: self.ended >= wanted, f"{count} more answers")

    @property
    def ended(self) -> int:
        return sum(a.end is not None for a in self.answers)

    @asynccontextmanager
    async def flowing(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(self._client())
            await self.go_on(CLIENTS)
            yield
            await self.go_on()
            self._over = True
        for answer in self.answers:
            answer.check()

    async def _client(self) -> None:
        rng = self._rng
        while not self._over:
            prompt = [rng.randrange(256) for _ in range(rng.choice((3, 20, 70)))]
            asked = call(prompt, OUTPUT_LEN, seed=rng.getrandbits(63), temperature=rng.choice((0.0, 1.0)))
            addresses = self._shoal.deployment.addresses
            async with AsyncClient(rng.sample(addresses, len(addresses))) as client:
                answer = Answer(asked)
                self.answers.append(answer)
                await ask(client, answer)


def test_each_kind_joins_and_leaves(shoal: Running, record_property: Record) -> None:
    deployment = shoal.deployment
    scaling = Scaling(deployment)

    async def change(load: Load, **wanted: int) -> None:
        done = await scaling.scale(wanted)
        assert not done.killed
        assert {**done.counts, **wanted} == done.counts == read_state(deployment.run_dir)["counts"]
        await load.go_on()

    async def life() -> None:
        load = Load(shoal, 1)
        async with load.flowing():
            await change(load, gateways=2, kvstores=2)
            await change(load, spares=1)
            adding = asyncio.create_task(change(load, pipelines=2))
            await until(lambda: "batcher-1" in deployment.metrics_addresses, "another pipeline is started")
            took_s = await served_s(shoal, "batcher-1")
            record_property("scaling.served_s", took_s)
            await adding
            assert took_s <= SERVES_S
            await change(load, kvstores=3)
            await change(load, kvstores=1, gateways=1)
            await change(load, pipelines=1, spares=0)
            assert len(deployment.pids()) == 6  # one of each, and a worker a stage
            await change(load, pipelines=2)
        assert len(read_state(deployment.run_dir)["addresses"]) == 1  # type: ignore[arg-type]
        await scaling.scale({"pipelines": 1})

    shoal.run(life(), 120.0)


async def served_s(shoal: Running, batcher: str) -> float:
    """From when a pipeline's workers, and their batcher, were there to its first token: by what they and the
    broker noted, for this process is busy with the load."""
    deployment = shoal.deployment
    workers = [m.name for m in deployment.fleet.workers_of(batcher)]
    bus = await shoal.bus()
    firsts_ns: list[int] = []

    async def told() -> bool:
        boot = await readiness.label_of(deployment.metrics_addresses[batcher], "shoal_boot_info", "boot")
        async for stored in bus.scan(subjects.RESULTS, "shoal.res.*"):
            record = parse_record(stored.data)
            if isinstance(record, Terminal) and record.boot == boot and record.attempt == 1:
                firsts_ns.append(stored.stored_at_ns - 1000 * record.timings.decode_us)
        return bool(firsts_ns)

    await until(told, "it serves", 60.0)
    await bus.close()
    there_ns = max(
        said_ns(deployment, batcher, "batcher runs"), *(said_ns(deployment, w, "listening") for w in workers)
    )
    return round((min(firsts_ns) - there_ns) / 1e9, 2)


def said_ns(deployment: Deployment, name: str, event: str) -> int:
    """When its log says so first."""
    lines = map(json.loads, deployment.children[name].log_path.read_text().splitlines())
    return next(int(line["time_ns"]) for line in lines if line["event"] == event)


def test_a_worker_leaves_amid_its_steps(shoal: Running) -> None:
    """The first stage's worker drains while a spare is there: what ran goes on in another pipeline."""
    scaling = Scaling(shoal.deployment)

    async def life() -> None:
        load = Load(shoal, 2)
        async with load.flowing():
            await scaling.scale({"spares": 1})
            addresses = shoal.deployment.metrics_addresses
            workers = [name for name in addresses if name.startswith("worker")]
            in_use = [name for name in workers if await readiness.in_use(addresses[name])]
            assert not await shoal.deployment.remove(in_use[0])
            await load.go_on()
        names = await shoal.deployment.add("worker", ("--preferred-stage", "0"))
        await shoal.deployment.wait_serving(names[0])
        await scaling.scale({"spares": 0})

    shoal.run(life())


def test_words_that_change_nothing_and_words_that_are_wrong(shoal: Running) -> None:
    scaling = Scaling(shoal.deployment)

    async def life() -> None:
        counts = (await scaling.scale({})).counts
        pids = shoal.deployment.pids()
        done = await scaling.scale(counts)
        assert (done.added, done.removed, shoal.deployment.pids()) == ((), (), pids)
        for wrong, said in (({"gateways": 0}, "from 1 to 64"), ({"stages": 2}, "unknown")):
            with pytest.raises(LaunchError, match=said):
                await scaling.scale(wrong)
        with pytest.raises(LaunchError, match="no process nobody"):
            await shoal.deployment.remove("nobody")
        with pytest.raises(LaunchError, match="the only gateway"):
            await shoal.deployment.remove("gateway")
        assert shoal.deployment.pids() == pids

    shoal.run(life())


def test_what_does_not_come_to_serve_is_taken_away_again(shoal: Running) -> None:
    """A pipeline whose workers end at once; meanwhile requests go on."""
    deployment = shoal.deployment

    async def life() -> None:
        before = deployment.pids()
        names = await deployment.add("pipeline", ("--fake-layers", "0"))
        with pytest.raises(LaunchError, match=r"(?s)worker-\d ended at once:.*fake_layers"):
            await deployment.wait_serving(names[-1])
        for name in names:
            await deployment.dismiss(name, 1.0)
        assert deployment.pids() == before

    shoal.run(life())


@pytest.mark.slow
def test_layers_go_by_speed_and_memory_and_a_quicker_worker_is_taken_in(
    runner: asyncio.Runner, tmp_path: Path
) -> None:
    """Of four layers one that is four times as slow gets one; when a quicker one comes,
    the pipeline forms anew with it, amid requests."""

    def stands(shoal: Running) -> list[list[int]]:
        """Of the newest formation: how many layers each stage has."""
        said = [line for line in shoal.log("batcher").splitlines() if '"pipeline stands"' in line]
        ranges = re.findall(r":(\d+)-(\d+)", said[-1])
        return [[int(first), int(end)] for first, end in ranges]

    flags = {"shard_worker": ("--fake-layers", str(NUM_LAYERS), "--fake-layer-cost-us", "500")}
    plan = Plan(model="fake", run_dir=tmp_path, stages=2, pipelines=0, flags=flags)

    async def life(shoal: Running) -> None:
        slow = ("--fake-layer-cost-us", "2000", "--fake-layers-max", "3")
        await shoal.deployment.add("worker", ("--preferred-stage", "0", *slow))
        await shoal.deployment.add("worker", ("--preferred-stage", "1"))
        (name,) = await shoal.deployment.add("batcher")
        await shoal.deployment.wait_serving(name)
        assert stands(shoal) == [[0, 1], [1, 4]]
        load = Load(shoal, 3)
        async with shoal.client() as client:
            await until(lambda: readiness.serves(client), "the gateway serves")
        async with load.flowing():
            await shoal.deployment.add("worker")
            await until(lambda: stands(shoal) == [[0, 3], [3, 4]], "it forms anew", 40.0)

    with running(runner, plan) as shoal:
        shoal.run(life(shoal))
