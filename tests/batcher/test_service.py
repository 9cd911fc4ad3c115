"""The batcher's shell over memory ports, with real workers of the fake model and a real kvstore."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from batcher.config import Config as BatcherConfig
from batcher.service import Batcher
from chassis import subjects
from chassis.bus import Message
from chassis.ids import GatewayId, RequestId
from chassis.memory_bus import MemoryBus
from chassis.messages.chunk import Chunk, parse_chunk
from chassis.messages.request import (
    Limits,
    Reason,
    Request,
    Sampling,
    Terminal,
    build_request,
    parse_record,
)
from kvstore.config import Config as KvConfig
from kvstore.service import KvStore
from shard_worker.config import Config as WorkerConfig
from shard_worker.fake_model import FakeConfig, FakeExecutor, oracle
from shard_worker.service import ShardWorker
from tests.sim.loop import run
from tests.sim.options import draw
from tests.sim.world import World

GATEWAY = GatewayId("gw1")


@asynccontextmanager
async def deployment(nan_id: int | None = None, **config: object) -> AsyncIterator[World]:
    world = World(draw(0))
    world.habits.calm = True
    worker = WorkerConfig(listen="mem://worker:0", rpc_listen="worker:0")
    fake = FakeConfig(num_blocks=64, nan_id=nan_id)
    for i in range(2):
        world.add(
            f"worker{i}",
            lambda ports: ShardWorker(worker, ports, FakeExecutor(fake, lambda s: None)),
        )
    world.add("kvstore", lambda ports: KvStore(KvConfig(rpc_address="kvstore:0"), ports))
    batcher = BatcherConfig(listen="mem://batcher:0", block_size_tokens=4, **config)  # type: ignore[arg-type]
    world.add("batcher", lambda ports: Batcher(batcher, ports))
    for node in world.nodes.values():
        node.start()
    try:
        yield world
    finally:
        await world.close()
    assert not world.failures, world.failures


class Gateway:
    """Hears chunks; a stand-in that keeps what it hears."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.finished = asyncio.Event()
        self._ids: dict[str, dict[int, int]] = {}  # chunks may overtake each other

    def heard(self, message: Message) -> None:
        chunk = parse_chunk(message.data)
        self.chunks.append(chunk)
        for part in chunk.parts:
            ids = self._ids.setdefault(part.request_id, {})
            ids.update(enumerate(part.ids, part.first_index))
        if chunk.finishes:
            self.finished.set()

    def ids(self, name: str) -> list[int]:
        return [token for _, token in sorted(self._ids[name].items())]


def request(name: str, prompt: tuple[int, ...], max_tokens: int = 10) -> Request:
    return Request(
        id=RequestId(name),
        tenant="t",
        gateway=GATEWAY,
        model="fake",
        prompt_ids=prompt,
        seed=7,
        sampling=Sampling(temperature=1.0),
        limits=Limits(max_tokens=max_tokens, ignore_eos=True),
    )


def test_a_request_from_the_stream_ends_in_its_record_and_its_chunks() -> None:
    async def main() -> None:
        async with deployment() as world:
            bus = MemoryBus(world.broker, "client")
            gateway = Gateway()
            await bus.subscribe(subjects.chunks(GATEWAY), gateway.heard)
            asked = request("r1", tuple(range(1, 30)))
            await bus.append(subjects.request("fake", 5, asked.id), build_request(asked))
            async with asyncio.timeout(20):
                await gateway.finished.wait()
            want = oracle(asked.prompt_ids, 7, 1.0, 10)
            await asyncio.sleep(1)
            assert gateway.ids("r1") == want
            for name in ("worker0", "worker1"):
                assert world.nodes[name].service._tiers.attachment > 0, "steps say who leases blocks"
            stored = await bus.last(subjects.RESULTS, subjects.result(asked.id))
            assert stored is not None
            record = parse_record(stored.data)
            assert isinstance(record, Terminal) and record.reason is Reason.LENGTH
            assert list(record.output_ids) == want
            t = record.timings
            total = t.queued_us + t.waiting_us + t.prefill_us + t.decode_us + t.interrupted_us
            assert total < 10_000, "a lone request waits for nothing, and nothing else takes time here"
            await asyncio.sleep(1)
            assert not list(world.broker.streams[subjects.REQUESTS].messages())
            bus.kill()

    run(main())


def test_garbage_on_a_request_subject_ends_as_a_failed_record() -> None:
    async def main() -> None:
        async with deployment() as world:
            bus = MemoryBus(world.broker, "client")
            await bus.append(subjects.request("fake", 5, RequestId("bad1")), b"\xff\xff garbage")
            await asyncio.sleep(5)
            stored = await bus.last(subjects.RESULTS, subjects.result(RequestId("bad1")))
            assert stored is not None
            record = parse_record(stored.data)
            assert isinstance(record, Terminal) and record.reason is Reason.FAILED and record.error
            bus.kill()

    run(main())
