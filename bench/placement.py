"""Conversations over two pipelines of a model: how much of their prompts caches have, and who does the work.

The real services on a virtual clock, so that a run is the same each time: a broker, a gateway, a kvstore, and
per pipeline a batcher and a worker whose steps take what a step of so many tokens and so much context takes.
Held against one pipeline with the memory of both, and against two that do not give each other requests.
"""

import asyncio
import random
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TypeVar

from batcher.config import Config as BatcherConfig
from batcher.placement import Placement
from batcher.service import Batcher
from bench.results_file import Sample, table, write
from chassis import log
from chassis.messages.gateway import Delta, Finished, GenerateCall
from chassis.messages.load import PipelineLoad
from gateway.config import Config as GatewayConfig
from gateway.service import Gateway
from kvstore.config import Config as KvConfig
from kvstore.service import KvStore
from shard_worker.compute import InlineCompute
from shard_worker.config import Config as WorkerConfig
from shard_worker.executor import StepInputs, StepOutput
from shard_worker.fake_model import FakeConfig
from shard_worker.service import ShardWorker
from tests.sim.loop import run as run_virtual
from tests.sim.machines import Exact
from tests.sim.options import draw
from tests.sim.world import World

T = TypeVar("T")

STEP_S, TOKEN_S, CONTEXT_S = 0.008, 0.0003, 4e-8  # of a step, of a token, of a token times a position
BLOCK = 16
SEEDS = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Setting:
    conversations: int = 24
    turns: int = 10
    said: int = 64  # tokens of a turn's question
    answer: int = 64
    think_s: float = 1.5  # mean, between an answer and the next question
    running_len_max: int = 16
    num_blocks: int = 4000  # of a pipeline


class Priced(Exact):
    """Remembers what its last step costs."""

    cost_s = 0.0

    def run(self, inputs: StepInputs, activations: memoryview) -> StepOutput:
        positions = float(inputs.positions.sum())
        self.cost_s = STEP_S + TOKEN_S * len(inputs.positions) + CONTEXT_S * positions
        return super().run(inputs, activations)


class PricedCompute(InlineCompute):
    def __init__(self, machine: Priced) -> None:
        super().__init__()
        self._machine = machine
        self.busy_s = 0.0

    async def call(self, work: Callable[[], T]) -> T:
        async with self._turn:
            self._machine.cost_s = 0.0
            made = work()
            self.busy_s += self._machine.cost_s
            await asyncio.sleep(self._machine.cost_s)
            return made

    def begin(self, work: Callable[[], T]) -> Awaitable[T]:
        return self.call(work)


@dataclass(slots=True)
class Seen:
    prompt_tokens: int = 0  # of the turns after the first
    cached_tokens: int = 0
    ttfts_s: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)  # by pipeline

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    @property
    def imbalance(self) -> float:
        """How much more than the mean the busiest pipeline worked."""
        return max(self.busy_s) / (sum(self.busy_s) / len(self.busy_s)) - 1


@contextmanager
def deaf() -> Iterator[None]:
    """Batchers that know of no other."""
    heard = Placement.heard

    def nothing(self: Placement, load: PipelineLoad, now: float) -> None:
        return None

    Placement.heard = nothing  # type: ignore[method-assign]
    try:
        yield
    finally:
        Placement.heard = heard  # type: ignore[method-assign]


async def talk(world: World, number: int, setting: Setting, rng: random.Random, seen: Seen) -> None:
    loop = asyncio.get_running_loop()
    history: list[int] = []
    await asyncio.sleep(rng.random() * setting.think_s * 2)
    for turn in range(setting.turns):
        history += [rng.randrange(256) for _ in range(setting.said)]
        call = GenerateCall(
            tenant="t",
            token_ids=tuple(history),
            temperature=1.0,
            seed=number * 100 + turn,
            max_tokens=setting.answer,
            ignore_eos=True,
        )
        asked_at, first = loop.time(), True
        async for event in world.nodes["gateway0"].service.generate(call):
            match event:
                case Delta(ids=ids) if ids:
                    if first:
                        seen.ttfts_s.append(loop.time() - asked_at)
                        first = False
                    history += ids
                case Finished(usage=usage) if turn:
                    seen.cached_tokens += usage.cached_tokens
                    seen.prompt_tokens += usage.prompt_tokens
        await asyncio.sleep(rng.expovariate(1 / setting.think_s))


async def live(setting: Setting, seed: int, pipelines: int, share: int) -> Seen:
    """`share`: of the memory, how many pipelines' worth each has."""
    log.bind(level="off")
    calm = draw(0)
    options = replace(
        calm, seed=seed, delay_s=0.0002, faults=(), num_faults=0, core_loss=0.0, settle_loss=0.0,
        answer_loss=0.0, late_write=0.0, call_loss=0.0, early_redelivery=0.0, stale_read=0.0, rpc_loss=0.0,
    )  # fmt: skip
    world = World(options)
    world.calm()
    batcher = BatcherConfig(
        num_stages=1,
        listen="mem://batcher:0",
        running_len_max=setting.running_len_max * share,
        block_size_tokens=BLOCK,
    )
    fake = FakeConfig(num_blocks=setting.num_blocks * share, num_layers=2, context_len_max=8192)
    worker = WorkerConfig(listen="mem://worker:0", rpc_listen="worker:0", slot_mb=1)
    world.add("kvstore0", lambda p: KvStore(KvConfig(rpc_address="kvstore:0"), p))
    machines = [PricedCompute(Priced(fake)) for _ in range(pipelines)]
    for i, compute in enumerate(machines):
        world.add(f"worker{i}", lambda p, c=compute: ShardWorker(worker, p, c._machine, c))  # type: ignore[misc]
        world.add(f"batcher{i}", lambda p: Batcher(batcher, p))
    world.add("gateway0", lambda p: Gateway(GatewayConfig(grpc_address="", http_address=""), p))
    for node in world.nodes.values():
        node.start()
    await asyncio.sleep(8.0)
    seen, rng = Seen(), random.Random(f"talk {seed}")
    begun = [compute.busy_s for compute in machines]
    talks = [talk(world, i, setting, random.Random(rng.random()), seen) for i in range(setting.conversations)]
    await asyncio.gather(*talks)
    seen.busy_s = [c.busy_s - before for c, before in zip(machines, begun, strict=True)]
    assert not world.failures, world.failures[0]
    await world.close()
    return seen


def run_once(setting: Setting, seed: int, pipelines: int, share: int = 1) -> Seen:
    return run_virtual(live(setting, seed, pipelines, share))


def main(setting: Setting) -> None:
    rows = [["who", "found in the cache", "busier than the mean", "first token, median"]]
    found: dict[str, list[Seen]] = {"one of twice the memory": [], "two": [], "two that give nothing": []}
    for seed in SEEDS:
        found["one of twice the memory"].append(run_once(setting, seed, 1, 2))
        found["two"].append(run_once(setting, seed, 2))
        with deaf():
            found["two that give nothing"].append(run_once(setting, seed, 2))
    one, two, deaf_two = found.values()
    ratios = tuple(b.hit_rate / a.hit_rate for a, b in zip(one, two, strict=True))
    values = {
        "placement.hit_ratio": Sample(ratios, "ratio"),
        "placement.imbalance": Sample(tuple(s.imbalance for s in two), "ratio"),
        "placement.hit_ratio_without": Sample(
            tuple(b.hit_rate / a.hit_rate for a, b in zip(one, deaf_two, strict=True)), "ratio"
        ),
    }
    for who, seens in found.items():
        hits = Sample(tuple(s.hit_rate for s in seens), "ratio")
        balance = str(Sample(tuple(s.imbalance for s in seens), "ratio")) if len(seens[0].busy_s) > 1 else ""
        ttft = Sample(tuple(1000 * median(s.ttfts_s) for s in seens), "ms")
        rows.append([who, str(hits), balance, str(ttft)])
    sys.stdout.write(table(rows) + "\n")
    for name, value in values.items():
        sys.stdout.write(f"{name}: {value}\n")
    write("placement", values, {"seeds": len(SEEDS), "conversations": setting.conversations})
