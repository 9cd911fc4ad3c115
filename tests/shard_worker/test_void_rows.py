"""Workers over links, the fake model and a real one: no answer is made of blocks that hold other content."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from chassis.messages import pipeline as p
from chassis.messages.sampling import Sampling
from chassis.messages.step_result import StepResult
from chassis.sequence_digest import carried_on
from shard_worker.compute import InlineCompute
from shard_worker.config import Config
from shard_worker.executor import Executor
from shard_worker.fake_model import oracle
from shard_worker.native.library import native
from shard_worker.native.stamps import native_stamps
from shard_worker.native.tables import native_tables
from shard_worker.service import ShardWorker
from shard_worker.torch_executor import EngineConfig, TorchExecutor
from tests.shard_worker import tiny_models
from tests.shard_worker.test_service import CONFIG, LAYERS, Batcher, World, run

PROMPT = [5, 9, 13, 2, 7, 7, 1, 30, 12]
START = p.SlotStart(Sampling(0.0), 1)


async def standing(world: World, num_stages: int) -> Batcher:
    workers = [world.start(f"w{i}") for i in range(num_stages)]
    batcher = await Batcher(world).form(5, [await world.registered(w) for w in workers])
    await batcher.stand()
    return batcher


async def ask(batcher: Batcher, slot: int, start: int, table: list[int], says: bool = True) -> StepResult:
    """The prompt in one row, from `start` on."""
    await batcher.send(
        slots=[slot], num_tokens=[len(PROMPT) - start], starts=[start], flags=[3], output_index=[0],
        token_ids=PROMPT[start:], table_lens=[len(table)], table=table, fresh=[START],
        digests=[carried_on(0, PROMPT[:start])] if says else [],
    )  # fmt: skip
    return await batcher.receive()


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_a_block_that_is_not_what_it_should_be(num_stages: int) -> None:
    (right,) = oracle(PROMPT, 1, 0.0, 1, LAYERS)

    async def body(world: World) -> None:
        batcher = await standing(world, num_stages)
        assert (await ask(batcher, 0, 0, [0, 1, 2])).token_ids == (right,)
        found = await ask(batcher, 1, 8, [0, 1, 3])
        assert (found.token_ids, found.void_rows) == ((right,), ())
        wrong = await ask(batcher, 2, 8, [0, 40, 4], says=False)
        assert wrong.token_ids != (right,) and wrong.void_rows == (), "nobody would have known"
        assert (await ask(batcher, 3, 8, [0, 40, 5])).void_rows == (0,)

    run(body)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_one_stage_finds_all_behind_know(stage: int) -> None:
    async def body(world: World) -> None:
        batcher = await standing(world, 3)
        await ask(batcher, 0, 0, [0, 1, 2])
        stamps = [world.workers[f"w{i}"]._stamps for i in range(3)]
        assert all(stamps)
        stamps[stage].blocks["end"][1] ^= 1 << 50  # type: ignore[union-attr]
        assert (await ask(batcher, 1, 8, [0, 1, 3])).void_rows == (0,)
        filled = [made.get(3).fill for made in stamps if made is not None]
        assert filled == [1] * stage + [0] * (3 - stage), "those before it have computed what is right"
        assert [world.workers[f"w{i}"]._runner.num_void_rows for i in range(3)].count(1) == 1

    run(body)


def test_who_verifies_nothing_passes_on_what_others_found() -> None:
    async def body(world: World) -> None:
        first = world.start("w0")
        second = world.start("w1", replace(CONFIG, verify_stamps=0.0))
        batcher = await Batcher(world).form(5, [await world.registered(w) for w in (first, second)])
        await batcher.stand()
        assert second._stamps is None
        assert (await ask(batcher, 0, 8, [0, 1, 3])).void_rows == (0,)

    run(body)


class RealWorld(World):
    executor: Executor

    def start(self, name: str, config: Config = CONFIG) -> ShardWorker:
        library = native()
        columns = () if library is None else (native_tables(library), native_stamps(library))
        worker = ShardWorker(config, self.ports(name), self.executor, InlineCompute(), *columns)
        self.workers[name] = worker
        self.tasks[name] = self.group.create_task(worker.run())
        return worker


def test_a_real_model(tmp_path: Path) -> None:
    """Without stamps the wrong block changes the answer; with them there is none, and what is right stays."""
    tiny_models.make(tmp_path)
    executor = TorchExecutor(EngineConfig(str(tmp_path), num_blocks=64))

    async def body(world: World) -> None:
        real = RealWorld(world.group)
        real.executor = executor
        layers = executor.facts.num_layers
        entry = await real.registered(real.start("w0"))
        batcher = await Batcher(real).form(5, [])
        batcher.replies = [await batcher.form_one(0, [entry], end_layer=layers)]
        await batcher.stand()
        try:
            whole = await ask(batcher, 0, 0, [0, 1, 2])
            cached = await ask(batcher, 1, 8, [0, 1, 3])
            assert cached.token_ids == whole.token_ids and cached.void_rows == ()
            silent = {
                (await ask(batcher, 2, 8, [0, wrong, 4], says=False)).token_ids for wrong in range(5, 9)
            }
            assert silent != {whole.token_ids}, "other content gives other answers"
            for wrong in range(5, 9):
                assert (await ask(batcher, 3, 8, [0, wrong, 4])).void_rows == (0,)
            again = await ask(batcher, 4, 8, [0, 1, 9])
            assert again.token_ids == whole.token_ids and again.void_rows == ()
        finally:
            await real.close()

    run(body)


def flip(worker: ShardWorker, block: int) -> None:
    """A bit of the block's memory, in the last layer."""
    pages = worker._executor.pages
    assert pages is not None
    page = np.empty((1, 1, pages.form.page_bytes), np.uint8)
    pages.read([block], page, pages.form.num_layers - 1)
    page[0, 0, 7] ^= 64  # of a number's exponent
    pages.write([block], page, pages.form.num_layers - 1)


@pytest.mark.parametrize("stage", [0, 1])
def test_memory_that_changed_by_itself(stage: int) -> None:
    (right,) = oracle(PROMPT, 1, 0.0, 1, LAYERS)

    async def body(world: World) -> None:
        entries = [
            await world.registered(world.start(f"w{i}", replace(CONFIG, verify_contents=1.0)))
            for i in range(2)
        ]
        batcher = await Batcher(world).form(5, entries)
        await batcher.stand()
        assert (await ask(batcher, 0, 0, [0, 1, 2])).token_ids == (right,)
        same = await ask(batcher, 1, 8, [0, 1, 3])
        assert (same.token_ids, same.void_rows) == ((right,), ())
        flip(world.workers[f"w{stage}"], 1)
        assert (await ask(batcher, 2, 8, [0, 1, 4])).void_rows == (0,)
        sums = [world.workers[f"w{i}"]._runner.sums.num_changed for i in range(2)]
        assert sums == [int(i == stage) for i in range(2)]
        again = await ask(batcher, 3, 0, [0, 1, 5])
        assert (again.token_ids, again.void_rows) == ((right,), ())
        assert (await ask(batcher, 4, 8, [0, 1, 6])).void_rows == ()

    run(body)


def test_memory_of_a_real_model(tmp_path: Path) -> None:
    """A row that takes over a changed block is void; computed anew it is right."""
    tiny_models.make(tmp_path)
    executor = TorchExecutor(EngineConfig(str(tmp_path), num_blocks=64))

    async def body(world: World) -> None:
        real = RealWorld(world.group)
        real.executor = executor
        worker = real.start("w0", replace(CONFIG, verify_contents=1.0))
        batcher = await Batcher(real).form(5, [])
        entry = await real.registered(worker)
        batcher.replies = [await batcher.form_one(0, [entry], end_layer=executor.facts.num_layers)]
        await batcher.stand()
        try:
            whole = await ask(batcher, 0, 0, [0, 1, 2])
            flip(worker, 1)
            changed = await ask(batcher, 1, 8, [0, 1, 3])
            assert changed.void_rows == (0,) and worker._runner.sums.num_changed == 1
            assert worker._runner.num_void_rows == 1
            again = await ask(batcher, 2, 0, [10, 11, 12])
            assert again.token_ids == whole.token_ids and again.void_rows == ()
        finally:
            await real.close()

    run(body)
