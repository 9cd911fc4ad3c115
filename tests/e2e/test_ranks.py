"""Stages of two ranks, each a process: they answer as one does, and a rank that dies is a stage that dies.

Whoever of them is killed, or only stands still, amid streams: all its processes go, new ones come, and each
answer is what it would have been.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chassis import subjects
from chassis.messages.registry import parse_worker
from shard_worker.torch_executor import EngineConfig, TorchExecutor
from shoal.child import Child
from shoal.client import AsyncClient
from shoal.launcher import Deployment, Plan, model_flags
from shoal.nats_server import free_port
from tests.e2e.rig import PATIENCE_S, ROOT, Answer, Running, ask, call, running, until
from tests.e2e.test_smollm2 import GREEDY, answer, compared, ids_of, prompts
from tests.e2e.test_tiers import rested, saved, tiers
from tests.shard_worker import tiny_models
from tests.shard_worker.driver import Driver, Sequence
from tests.shard_worker.test_smollm2 import transformers_model

OUTPUT_LEN = 100
RANKS = ("--rank-silence-ms", "2000")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine query heads over three KV heads, as SmolLM2 has them."""
    path = tmp_path_factory.mktemp("tiny")
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "intermediate_size": 96}
    tiny_models.make_small(path, "llama", **heads, max_position_embeddings=512)
    tiny_models.save_tokenizer(path, tiny_models.SMALL_VOCAB)
    return path


@pytest.fixture(scope="module")
def shoal(
    runner: asyncio.Runner, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    plan = Plan(
        model=str(folder),
        run_dir=tmp_path_factory.mktemp("ranks"),
        stages=1,
        tensor_parallel=2,
        flags={"shard_worker": (*RANKS, "--num-blocks", "200", "--weights-mb", "1")},
    )
    with running(runner, plan) as made:
        yield made


@pytest.fixture(scope="module")
def sequences(folder: Path) -> list[Sequence]:
    """Greedy and drawn, with what one process says to them."""
    draw = np.random.default_rng(5)
    made = [
        Sequence(draw.integers(0, 80, n).tolist(), OUTPUT_LEN, temperature=float(i % 2), seed=i)
        for i, n in enumerate((3, 20, 11, 7))
    ]
    config = EngineConfig(str(folder), num_blocks=200, digest_cache_dir=str(folder / "digests"))
    Driver([TorchExecutor(config)], (4,), block_size=16).run(made)
    return made


def ranks_of(leader: int) -> list[int]:
    """Pids of the processes that a leader has started."""
    return list(map(int, Path(f"/proc/{leader}/task/{leader}/children").read_text().split()))


def runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


async def amid(
    client: AsyncClient, sequences: list[Sequence], act: Callable[[], Awaitable[object]]
) -> list[Answer]:
    answers = [Answer(call(s.prompt, OUTPUT_LEN, temperature=s.temperature, seed=s.seed)) for s in sequences]
    async with asyncio.TaskGroup() as group:
        for one in answers:
            group.create_task(ask(client, one))
        await until(lambda: all(len(a.ids) >= 4 or a.end for a in answers), "all streams begin")
        await act()
    for one, sequence in zip(answers, sequences, strict=True):
        assert one.ids == sequence.output
    return answers


def test_what_layers_take_is_told_of_all_ranks(shoal: Running) -> None:
    """The larger share of a layer is at least half of it."""

    async def life() -> None:
        bus = await shoal.bus()
        (entry,) = [parse_worker(e.value) for e in await bus.entries(subjects.WORKERS) if e.value is not None]
        assert entry.layer_us > 0
        half_bytes = 4 * 72 * (2 * 8 * (9 + 3) + 3 * 96) / 2
        assert 0 < entry.layers_max <= (1 << 20) / half_bytes
        assert entry.head_layers > 0

    shoal.run(life())


@pytest.mark.parametrize(
    ("who", "number"),
    [
        ("follower", signal.SIGKILL),
        ("leader", signal.SIGKILL),
        pytest.param("follower", signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_a_dead_rank_is_a_dead_stage(
    shoal: Running,
    sequences: list[Sequence],
    who: str,
    number: int,
    record_property: Callable[[str, object], None],
) -> None:
    leader = shoal.deployment.pids()["worker-0"]
    (follower,) = ranks_of(leader)

    async def gone() -> None:
        os.kill(follower if who == "follower" else leader, number)
        await until(lambda: not runs(leader) and not runs(follower), "both processes end")
        await until(
            lambda: shoal.deployment.pids().get("worker-0") not in (None, leader), "another leader starts"
        )

    async def life() -> list[Answer]:
        async with shoal.client() as client:
            return await amid(client, sequences, gone)

    answers = shoal.run(life())
    record_property(f"stall.{who}.{number}_s", round(max(a.longest_silence_s for a in answers), 2))
    fresh = shoal.deployment.pids()["worker-0"]
    assert fresh != leader and len(ranks_of(fresh)) == 1


@pytest.mark.slow
def test_ranks_that_were_started_by_hand(
    runner: asyncio.Runner, folder: Path, sequences: list[Sequence], tmp_path: Path
) -> None:
    """By a supervisor each: whoever is killed, both end, and find each other again."""
    address = f"127.0.0.1:{free_port()}"
    shared = (*RANKS, "--num-blocks", "200")
    flags = {"shard_worker": (*shared, "--ranks-listen", address)}
    plan = Plan(model=str(folder), run_dir=tmp_path, stages=1, tensor_parallel=2, flags=flags)

    async def life() -> None:
        shoal = Deployment(plan)
        await shoal.start()
        words = ("--tensor-parallel", "2", "--rank", "1", "--leader", address, "--nats-url", shoal.nats_url)
        argv = [sys.executable, "-m", "shard_worker", *model_flags(str(folder)), *shared, *words]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        follower = Child("rank-1", argv, env, tmp_path / "logs" / "rank-1.log")
        following = asyncio.create_task(follower.run())
        await shoal.wait_ready()
        async with AsyncClient(shoal.address, retry=None) as client:
            for who in ("follower", "leader"):
                both = follower.pid, shoal.pids()["worker-0"]
                assert both[0] is not None and not ranks_of(both[1])

                async def gone(both: tuple[int | None, int] = both, first: bool = who == "follower") -> None:
                    assert both[0] is not None
                    os.kill(both[0] if first else both[1], signal.SIGKILL)
                    await until(lambda: follower.pid not in (None, both[0]), "another follower starts")
                    await until(
                        lambda: shoal.pids().get("worker-0") not in (None, both[1]), "another leader starts"
                    )

                await amid(client, sequences, gone)
        assert not await shoal.stop()  # the follower ends when its leader has, and is started again
        await follower.end(5.0)
        await following

    async def within() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await life()

    runner.run(within())


@pytest.mark.slow
def test_what_was_evicted_comes_back_to_all_ranks(
    runner: asyncio.Runner, folder: Path, tmp_path: Path
) -> None:
    """From kvstore's memory, into other blocks: heads of both ranks, or the answer would be another."""
    talk = [(7 * i) % 79 for i in range(200)]  # 12 blocks and a half
    others = [[(11 * i + k) % 79 for i in range(400)] for k in range(3)]  # more than the pool has
    tiers_flags = ("--host-bytes", str(1 << 24), "--restore-min-tokens", "32", "--restore-wait-ms", "2000")
    plan = Plan(
        model=str(folder),
        run_dir=tmp_path,
        stages=1,
        tensor_parallel=2,
        flags={"shard_worker": (*RANKS, "--num-blocks", "40"), "kvstore": tiers_flags},
    )

    async def said(client: AsyncClient, prompt: list[int]) -> tuple[list[int], int]:
        one = await ask(client, Answer(call(prompt, 12)))
        assert one.end is not None
        return one.ids, one.end.cached_tokens

    async def life(shoal: Running) -> None:
        async with shoal.client() as client:
            first, cached = await said(client, talk)
            assert cached == 0
            await saved(shoal, 12)
            for prompt in others:
                await said(client, prompt)
            await rested(shoal)
            assert await said(client, talk) == (first, 12 * 16)
            counts = await tiers(shoal)
            assert counts["restored"] == 12 and not counts["refused"]

    with running(runner, plan) as shoal:
        shoal.run(life(shoal))


@pytest.mark.slow
def test_smollm2_on_two_stages_of_two_ranks(
    runner: asyncio.Runner, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Nine query heads and three KV heads: one rank has twice as many as the other."""
    plan = Plan(
        run_dir=tmp_path,
        tensor_parallel=2,
        flags={"shard_worker": RANKS, "batcher": ("--step-tokens-max", "96")},
    )
    reference: Any = transformers_model()

    async def life(shoal: Running) -> None:
        async with shoal.client() as client:
            for prompt in prompts()[::3]:
                output, _ = await answer(client, prompt, GREEDY)
                assert compared(reference, await ids_of(client, prompt), output) >= len(output) // 2

    with running(runner, plan) as shoal:
        shoal.run(life(shoal))
