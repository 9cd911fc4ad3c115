"""Workers as a pipeline: a plain batcher forms them and drives steps, over memory and over sockets."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import pytest

from chassis import subjects
from chassis.errors import LinkClosed
from chassis.ids import BootId, Epoch
from chassis.memory_broker import MemoryBroker
from chassis.memory_bus import MemoryBus
from chassis.memory_rpc import MemoryRpc, MemoryRpcNetwork
from chassis.messages import forming
from chassis.messages import pipeline as p
from chassis.messages import step_result as r
from chassis.messages.addresses import advertised, names_no_host
from chassis.messages.card import card_digest
from chassis.messages.registry import WorkerEntry, parse_model, parse_worker
from chassis.messages.request import Sampling
from chassis.ports import Ports
from chassis.trace import SpanRing, step_context, step_key
from chassis.transport.interface import Link, LinkOptions, Transport
from chassis.transport.memory import MemoryNetwork
from chassis.transport.tcp import SocketTransport
from shard_worker import fake_model as fm
from shard_worker.compute import Compute, ComputeThread, InlineCompute
from shard_worker.config import Config
from shard_worker.service import ShardWorker
from tests.sim.loop import run as run_virtual

LAYERS = 4
BLOCK = 4
FAKE = fm.FakeConfig(num_layers=LAYERS, num_blocks=64, poison_id=500)
OPTIONS = LinkOptions(slots=8, slot_bytes=1 << 16)
CONFIG = Config(executor="fake", listen="mem://w:0", free_after_ms=200, drain_wait_ms=3000)
DELAY_S = 0.001


@dataclass
class World:
    """A bus, networks and the tasks of workers."""

    group: asyncio.TaskGroup
    sockets: bool = False
    compute_delay_s: float = 0.0
    workers: dict[str, ShardWorker] = field(default_factory=dict)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    tracers: dict[str, SpanRing] = field(default_factory=dict)
    closing: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    next_id: int = 0

    def __post_init__(self) -> None:
        self.broker = MemoryBroker()
        self.links = MemoryNetwork(delay_s=lambda source, target: DELAY_S)
        self.calls = MemoryRpcNetwork()

    def new_id(self) -> str:
        self.next_id += 1
        return f"id{self.next_id}"

    def ports(self, node: str) -> Ports:
        transport: Transport = SocketTransport() if self.sockets else self.links.transport(node)
        bus = MemoryBus(self.broker, node)
        rpc = MemoryRpc(self.calls, node)
        self.closing += [transport.close, rpc.close, bus.close]
        self.tracers[node] = SpanRing(first_span_id=1)
        return Ports(bus, rpc, transport, self.tracers[node], self.new_id, lambda: 7, lambda: 1_000)

    def start(self, name: str, config: Config = CONFIG) -> ShardWorker:
        compute: Compute = InlineCompute(lambda: self.compute_delay_s)
        if self.sockets:
            config = replace(config, listen="tcp://127.0.0.1:0")
            compute = ComputeThread()
        worker = ShardWorker(config, self.ports(name), fm.FakeExecutor(FAKE), compute)
        self.workers[name] = worker
        self.tasks[name] = self.group.create_task(worker.run())
        return worker

    async def entry(self, worker: ShardWorker) -> WorkerEntry | None:
        bus = MemoryBus(self.broker, "reader")
        entry = await bus.entry(subjects.worker_key(worker.boot))
        await bus.close()
        return parse_worker(entry.value) if entry is not None and entry.value is not None else None

    async def registered(self, worker: ShardWorker, free: bool = True) -> WorkerEntry:
        async with asyncio.timeout(5):
            while (entry := await self.entry(worker)) is None or entry.free != free:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        return entry

    async def close(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        for close in self.closing:
            await close()


class Batcher:
    """Forms a pipeline in layer order and keeps one sequence per slot going."""

    def __init__(self, world: World, boot: str = "b", node: str = "batcher") -> None:
        self.world = world
        self.boot = BootId(boot)
        self.ports = world.ports(node)
        self.controls: list[Link] = []
        self.results: asyncio.Queue[Link] = asyncio.Queue()
        self.replies: list[forming.Formed] = []
        self.epoch = 0
        self.number = 0
        self.address = ""

    async def form(self, epoch: int, workers: list[WorkerEntry]) -> "Batcher":
        if not self.address:
            address = "tcp://127.0.0.1:0" if self.world.sockets else "mem://batcher:0"
            self.address = await self.ports.transport.listen(address, self.results.put_nowait, OPTIONS)
        self.epoch, self.number = epoch, 0
        self.close()
        self.replies = [await self.form_one(i, workers) for i in range(len(workers))]
        return self

    async def form_one(self, i: int, workers: list[WorkerEntry], **changed: object) -> forming.Formed:
        hello = p.Hello(Epoch(self.epoch), p.BATCHER_STAGE, self.boot, p.LinkKind.CONTROL)
        link = await self.ports.transport.dial(workers[i].transport_address, p.build_hello(hello), OPTIONS)
        self.controls.append(link)
        n = len(workers)
        addresses = [*(w.transport_address for w in workers[1:]), self.address]
        form = forming.Form(
            Epoch(self.epoch), self.boot, workers[i].model_digest, i, n,
            LAYERS * i // n, LAYERS * (i + 1) // n, addresses[i], BLOCK, 8, 64,
        )  # fmt: skip
        form = replace(form, **changed)  # type: ignore[arg-type]
        reply = await self.ports.rpc.call(workers[i].rpc_address, forming.FORM, forming.build_form(form), 5.0)
        return forming.parse_formed(reply)

    async def stand(self) -> None:
        assert [r.refusal for r in self.replies] == [None] * len(self.replies), self.replies
        async with asyncio.timeout(5):
            self.result = await self.results.get()

    async def send(self, **columns: object) -> None:
        self.number += 1
        context = step_context(self.boot, self.epoch, self.number).encode()
        header = p.build_step(self.epoch, self.number, trace_parent=context, **columns)  # type: ignore[arg-type]
        await self.controls[0].send(header)

    async def receive(self) -> r.StepResult:
        async with asyncio.timeout(5):
            frame = await self.result.receive()
        frame.release()
        return r.parse_result(frame.header)

    async def generate(
        self, prompts: list[list[int]], n: int, seed: int, temperature: float
    ) -> list[list[int]]:
        """One slot per prompt: half of it in a step of its own, the rest together, then token by token."""
        outputs: list[list[int]] = [[] for _ in prompts]
        slots = list(range(len(prompts)))
        start = p.SlotStart(Sampling(temperature, 0, 1.0), seed)
        tables = [[16 * i + j for j in range(16)] for i in slots]
        cuts = [len(ids) // 2 for ids in prompts]
        for i in slots:
            if cuts[i]:
                await self.send(
                    slots=[i], num_tokens=[cuts[i]], starts=[0], flags=[2], output_index=[0],
                    token_ids=prompts[i][: cuts[i]], table_lens=[16], table=tables[i], fresh=[start],
                )  # fmt: skip
        for i in slots:
            if cuts[i]:
                assert len((await self.receive()).token_ids) == 0
        for index in range(n):
            if index:
                rows = [(ids + out)[-1:] for ids, out in zip(prompts, outputs, strict=True)]
            else:
                rows = [ids[cut:] for ids, cut in zip(prompts, cuts, strict=True)]
            ends = [len(ids) + index for ids in prompts]
            fresh = [index == 0 and cuts[i] == 0 for i in slots]
            await self.send(
                slots=slots,
                num_tokens=[len(r) for r in rows],
                starts=[end - len(r) for end, r in zip(ends, rows, strict=True)],
                flags=[3 if f else 1 for f in fresh],
                output_index=[index] * len(slots),
                token_ids=[t for r in rows for t in r],
                table_lens=[16 if f else 0 for f in fresh],
                table=[b for i in slots if fresh[i] for b in tables[i]],
                fresh=[start for f in fresh if f],
            )
            result = await self.receive()
            assert (result.epoch, result.number) == (self.epoch, self.number)
            for out, token in zip(outputs, result.token_ids, strict=True):
                out.append(token)
        return outputs

    def close(self) -> None:
        for link in self.controls:
            link.close()
        self.controls.clear()
        while not self.results.empty():
            self.results.get_nowait().close()


def run(body: Callable[[World], Awaitable[None]], sockets: bool = False, delay_s: float = 0.0) -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            world = World(group, sockets, delay_s)
            try:
                await body(world)
            finally:
                await world.close()

    (asyncio.run if sockets else run_virtual)(main())


async def gone(link: Link) -> None:
    async with asyncio.timeout(5):
        with pytest.raises(LinkClosed):
            while True:
                (await link.receive()).release()


PROMPTS = [[1, 2, 3, 4, 5], [9], [7] * 13, [50, 60]]


@pytest.mark.parametrize("sockets", [False, True])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_are_the_oracles(sockets: bool, num_stages: int, temperature: float) -> None:
    async def body(world: World) -> None:
        workers = [world.start(f"w{i}") for i in range(num_stages)]
        entries = [await world.registered(w) for w in workers]
        batcher = await Batcher(world).form(5, entries)
        await batcher.stand()
        outputs = await batcher.generate(PROMPTS, 6, 77, temperature)
        assert outputs == [fm.oracle(ids, 77, temperature, 6, LAYERS) for ids in PROMPTS]

    run(body, sockets)


def test_empty_steps_pass_round() -> None:
    async def body(world: World) -> None:
        entries = [await world.registered(world.start(f"w{i}")) for i in range(2)]
        batcher = await Batcher(world).form(1, entries)
        await batcher.stand()
        for number in (1, 2):
            await batcher.send()
            result = await batcher.receive()
            assert result.number == number and len(result.token_ids) == 0

    run(body)


def test_timings_and_spans_of_every_stage() -> None:
    async def body(world: World) -> None:
        entries = [await world.registered(world.start(f"w{i}")) for i in range(2)]
        batcher = await Batcher(world).form(4, entries)
        await batcher.stand()
        await batcher.send()
        result = await batcher.receive()
        assert [t.stage for t in result.timings] == [0, 1]
        assert all(t.compute_ns // 1000 == 10_000 and t.received_ns == 1_000 for t in result.timings)
        root = step_context("b", 4, 1)
        for i in range(2):
            tracer = world.tracers[f"w{i}"]
            tracer.keep([step_key(4, 1)])
            spans, _ = tracer.take()
            (span,) = spans
            assert span.name == "shard_worker.step" and span.parent == root.span_id
            assert span.context.trace_id == root.trace_id
            assert span.attributes["shoal.stage"] == i and span.attributes["shoal.rows"] == 0
            assert span.end_ns - span.start_ns >= 10_000_000

    run(body, delay_s=0.01)


def test_a_stage_computes_while_it_sends() -> None:
    """Ten steps through two stages of 10 ms over a slow link take eleven turns, not twenty."""

    async def body(world: World) -> None:
        world.links.delay_s = lambda source, target: 0.008
        entries = [await world.registered(world.start(f"w{i}")) for i in range(2)]
        batcher = await Batcher(world).form(4, entries)
        await batcher.stand()
        loop = asyncio.get_running_loop()
        begun_at = loop.time()
        sending = world.group.create_task(_send_many(batcher, 10))
        for _ in range(10):
            await batcher.receive()
        await sending
        assert loop.time() - begun_at < 0.010 * 11 + 0.008 * 3 + 0.02

    run(body, delay_s=0.01)


async def _send_many(batcher: Batcher, count: int) -> None:
    for _ in range(count):
        await batcher.send()


def test_the_registry_knows_card_model_and_state() -> None:
    async def body(world: World) -> None:
        worker = world.start("w0", replace(CONFIG, preferred_stage=1))
        entry = await world.registered(worker)
        assert entry.boot == worker.boot and entry.preferred_stage == 1 and entry.num_layers == LAYERS
        bus = MemoryBus(world.broker, "reader")
        model = await bus.entry(subjects.model_key("fake"))
        assert model is not None and model.value is not None
        card = await bus.object(subjects.card_object(parse_model(model.value).card_digest))
        assert card is not None and card_digest(card) == parse_model(model.value).card_digest
        await bus.close()
        batcher = await Batcher(world).form(9, [entry])
        taken = await world.registered(worker, free=False)
        assert taken.last_epoch == 9
        loop = asyncio.get_running_loop()
        begun_at = loop.time()
        batcher.close()
        again = await world.registered(worker, free=True)
        assert 0.19 < loop.time() - begun_at < 0.3
        assert again.loaded == range(0, LAYERS) and again.last_epoch == 9

    run(body)


def test_the_entry_outlives_its_time_to_live() -> None:
    async def body(world: World) -> None:
        worker = world.start("w0")
        await world.registered(worker)
        await asyncio.sleep(3 * subjects.REGISTRY_TTL_S)
        assert await world.entry(worker) is not None

    run(body)


def test_a_new_epoch_keeps_the_memory() -> None:
    async def body(world: World) -> None:
        entries = [await world.registered(world.start(f"w{i}")) for i in range(2)]
        batcher = await Batcher(world).form(4, entries)
        await batcher.stand()
        stamps = [r.kv_stamp for r in batcher.replies]
        assert stamps == [f"{e.boot}.1" for e in entries]
        assert await batcher.generate([[1, 2, 3]], 2, 0, 0.0) == [fm.oracle([1, 2, 3], 0, 0.0, 2, LAYERS)]
        await batcher.form(6, entries)  # at once: the workers may not have heard of the closed links
        await batcher.stand()
        assert [r.kv_stamp for r in batcher.replies] == stamps
        # the prefix is still in the blocks
        greedy = p.SlotStart(Sampling(0.0, 0, 1.0), 0)
        await batcher.send(
            slots=[3], num_tokens=[1], starts=[3], flags=[3], output_index=[1],
            token_ids=[fm.oracle([1, 2, 3], 0, 0.0, 1, LAYERS)[0]], table_lens=[1], table=[0], fresh=[greedy],
        )  # fmt: skip
        result = await batcher.receive()
        assert list(result.token_ids) == fm.oracle([1, 2, 3], 0, 0.0, 2, LAYERS)[1:]
        await batcher.form(7, entries[:1])
        assert batcher.replies[0].kv_stamp == f"{entries[0].boot}.2"

    run(body)


@pytest.mark.parametrize("killed", [0, 1, 2])
def test_a_dead_worker_ends_the_epoch_everywhere(killed: int) -> None:
    async def body(world: World) -> None:
        workers = [world.start(f"w{i}") for i in range(3)]
        entries = [await world.registered(w) for w in workers]
        batcher = await Batcher(world).form(4, entries)
        await batcher.stand()
        world.tasks[f"w{killed}"].cancel()
        for link in (*batcher.controls, batcher.result):
            await gone(link)
        for i in {0, 1, 2} - {killed}:
            await world.registered(workers[i], free=True)

    run(body)


BAD_STEPS: dict[str, dict[str, object]] = {
    "unknown slot": {
        "slots": [0], "num_tokens": [1], "starts": [0], "flags": [1],
        "output_index": [0], "token_ids": [1], "table_lens": [0],
    },
    "columns": {"slots": [1], "num_tokens": [1], "starts": [0]},
    "poison": {
        "slots": [0], "num_tokens": [1], "starts": [0], "flags": [3], "output_index": [0],
        "token_ids": [500], "table_lens": [1], "table": [0],
        "fresh": [p.SlotStart(Sampling(0.0, 0, 1.0), 0)],
    },
}  # fmt: skip


@pytest.mark.parametrize("bad", [*BAD_STEPS, "gap", "garbage"])
@pytest.mark.parametrize("sockets", [False, True])
def test_what_cannot_run_ends_the_epoch_and_not_the_worker(bad: str, sockets: bool) -> None:
    async def body(world: World) -> None:
        workers = [world.start(f"w{i}") for i in range(2)]
        entries = [await world.registered(w) for w in workers]
        batcher = await Batcher(world).form(4, entries)
        await batcher.stand()
        match bad:
            case "gap":
                batcher.number = 1
                await batcher.send()
            case "garbage":
                await batcher.controls[0].send(b"\xff" * 40)
            case _:
                await batcher.send(**BAD_STEPS[bad])
        for link in (*batcher.controls, batcher.result):
            await gone(link)
        await batcher.form(5, entries)
        await batcher.stand()
        assert await batcher.generate([[1, 2]], 3, 5, 0.9) == [fm.oracle([1, 2], 5, 0.9, 3, LAYERS)]

    run(body, sockets)


def test_repeats_are_dropped_and_counted() -> None:
    async def body(world: World) -> None:
        worker = world.start("w0")
        batcher = await Batcher(world).form(4, [await world.registered(worker)])
        await batcher.stand()
        await batcher.send()
        batcher.number = 0
        await batcher.send()
        await batcher.send()
        assert [(await batcher.receive()).number for _ in range(2)] == [1, 2]
        assert worker.counts == {"repeated_step": 1}

    run(body)


def test_two_batchers_do_not_share_a_worker() -> None:
    async def body(world: World) -> None:
        entries = [await world.registered(world.start("w0"))]
        first = await Batcher(world).form(4, entries)
        await first.stand()
        second = await Batcher(world, "c", "other").form(5, entries)
        assert second.replies[0].refusal is forming.FormRefusal.IN_USE
        assert await first.generate([[3]], 2, 0, 0.0) == [fm.oracle([3], 0, 0.0, 2, LAYERS)]
        first.close()
        await asyncio.sleep(0.25)
        await second.form(6, entries)
        await second.stand()

    run(body)


def test_nobody_at_the_next_address() -> None:
    async def body(world: World) -> None:
        entries = [await world.registered(world.start("w0"))]
        batcher = Batcher(world)
        batcher.epoch = 3
        reply = await batcher.form_one(0, entries, next_address="mem://nobody")
        assert reply.refusal is forming.FormRefusal.NEXT_AWAY and "mem://nobody" in reply.error
        await gone(batcher.controls[0])

    run(body)


def test_layers_that_do_not_exist() -> None:
    async def body(world: World) -> None:
        entries = [await world.registered(world.start("w0"))]
        batcher = Batcher(world)
        batcher.epoch = 3
        reply = await batcher.form_one(0, entries, end_layer=LAYERS + 1, next_address="mem://b")
        assert reply.refusal is forming.FormRefusal.FAILED and str(LAYERS) in reply.error

    run(body)


def test_a_device_that_hangs_is_refused_and_does_not_hold_the_formation() -> None:
    """Whoever forms again takes a spare instead of waiting for it."""

    async def body(world: World) -> None:
        entries = [await world.registered(world.start("w0", replace(CONFIG, device_wait_ms=200)))]
        batcher = await Batcher(world).form(4, entries)
        await batcher.stand()
        world.compute_delay_s = 60.0
        await batcher.send(**BAD_STEPS["poison"] | {"token_ids": [1]})
        await asyncio.sleep(0.1)
        start = asyncio.get_running_loop().time()
        await batcher.form(5, entries)
        assert batcher.replies[0].refusal is forming.FormRefusal.FAILED
        assert "device does not answer" in batcher.replies[0].error
        assert asyncio.get_running_loop().time() - start < 1

    run(body)


def test_draining_a_free_worker_is_quick() -> None:
    async def body(world: World) -> None:
        worker = world.start("w0")
        await world.registered(worker)
        await worker.drain()
        async with asyncio.timeout(1):
            await world.tasks["w0"]
        assert await world.entry(worker) is None

    run(body)


def test_draining_waits_for_the_batcher() -> None:
    async def body(world: World) -> None:
        worker = world.start("w0")
        batcher = await Batcher(world).form(4, [await world.registered(worker)])
        await batcher.stand()
        draining = world.group.create_task(worker.drain())
        await asyncio.sleep(0.5)
        assert await world.entry(worker) is None
        assert await batcher.generate([[3]], 2, 0, 0.0) == [fm.oracle([3], 0, 0.0, 2, LAYERS)]
        batcher.close()
        async with asyncio.timeout(1):
            await draining
            await world.tasks["w0"]

    run(body)


def test_draining_does_not_wait_for_ever() -> None:
    async def body(world: World) -> None:
        worker = world.start("w0")
        batcher = await Batcher(world).form(4, [await world.registered(worker)])
        await batcher.stand()
        async with asyncio.timeout(4):
            await worker.drain()
            await world.tasks["w0"]
        await gone(batcher.controls[0])

    run(body)


def test_a_worker_outlives_the_bus() -> None:
    async def body(world: World) -> None:
        worker = world.start("w0")
        batcher = await Batcher(world).form(4, [await world.registered(worker)])
        await batcher.stand()
        world.broker.stop()
        await asyncio.sleep(20)
        assert await batcher.generate([[3]], 2, 0, 0.0) == [fm.oracle([3], 0, 0.0, 2, LAYERS)]
        world.broker.start()
        batcher.close()
        await world.registered(worker, free=True)

    run(body)


@pytest.mark.parametrize(
    "address, host, expected",
    [
        ("tcp://0.0.0.0:77", "h1", "tcp://h1:77"),
        ("0.0.0.0:77", "h1", "h1:77"),
        ("tcp://[::]:77", "2001:db8::7", "tcp://[2001:db8::7]:77"),
        ("[::]:77", "[2001:db8::7]", "[2001:db8::7]:77"),
        ("unix:///s", "h1", "unix:///s"),
        ("tcp://127.0.0.1:77", "", "tcp://127.0.0.1:77"),
        ("unix://@s nixl+rdma://0.0.0.0:7 tcp://0.0.0.0:7", "h1", "unix://@s nixl+rdma://h1:7 tcp://h1:7"),
    ],
)
def test_advertised_addresses(address: str, host: str, expected: str) -> None:
    assert advertised(address, host) == expected


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:77", "unix://@s tcp://[::]:77", "0.0.0.0:77", "[::]:77"])
def test_addresses_that_mean_whoever_dials_them(address: str) -> None:
    assert names_no_host(address) and not names_no_host(advertised(address, "h1"))
