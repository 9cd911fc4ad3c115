"""All links of a deployment over NIXL: the ring, results, control, kvstore's tiers; and a stage that dies.

Where stages compute in memory that links may reach, activations go from one's straight into the next one's:
what GPUDirect is on GPUs, here with the engine of GPUs on the processor.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from chassis.transport.nixl_agent import Lanes, why_not
from shoal.launcher import Plan
from shoal.nats_server import NatsServer
from tests.e2e.rig import ROOT, Answer, Running, amid, ask, call, draw_calls, running, until
from tests.e2e.test_tiers import FOUND, TALK, plan, said, talk_and_evict
from tests.shard_worker import tiny_models

WITHOUT = why_not(Lanes.TCP)
pytestmark = pytest.mark.skipif(WITHOUT is not None, reason=str(WITHOUT))


@pytest.fixture
def nats(runner: asyncio.Runner, tmp_path: Path) -> Iterator[str]:
    server = NatsServer(tmp_path / "nats")
    runner.run(server.start())
    yield server.url
    runner.run(server.stop())


@pytest.mark.parametrize("kind", ["nixl+tcp", pytest.param("nixl+shm", marks=pytest.mark.slow)])
def test_a_deployment_without_a_plain_link(runner: asyncio.Runner, tmp_path: Path, kind: str) -> None:
    async def life(shoal: Running) -> None:
        async with shoal.client() as client:
            await talk_and_evict(shoal, client)
            assert await said(client, TALK) == FOUND
            for name in ("worker-0", "worker-1", "batcher", "kvstore"):
                log = shoal.log(name)
                assert f'"kind":"{kind}"' in log and '"kind":"tcp"' not in log and '"kind":"unix"' not in log
            await amid(client, draw_calls(5, 60), lambda: shoal.kill("worker-1"))

    env = {"SHOAL_CHASSIS_LINKS": f'{{ kinds = ["{kind}"] }}'}
    with running(runner, plan(tmp_path / "run", None, stages=2, env=env)) as shoal:
        shoal.run(life(shoal))


def test_activations_go_from_stage_to_stage_without_a_copy(runner: asyncio.Runner, tmp_path: Path) -> None:
    """Prompts larger than a first slot, too; and a stage is killed amid."""
    folder, draw = tmp_path / "model", np.random.default_rng(6)
    model = tiny_models.make_small(folder, "llama", hidden_size=512, max_position_embeddings=1024)
    tiny_models.save_tokenizer(folder, tiny_models.SMALL_VOCAB)
    prompts: list[list[int]] = [draw.integers(0, 80, n).tolist() for n in (3, 20, 400, 7)]
    lens = (200, 60, 60, 60)
    wanted = [tiny_models.greedy(model, *asked) for asked in zip(prompts, lens, strict=True)]
    assert min(margin for _, margin in wanted) > tiny_models.MARGIN_MIN

    async def life(shoal: Running) -> None:
        async with shoal.client() as client:
            asked = zip(prompts, lens, strict=True)
            answers = [Answer(call(prompt, length, temperature=0.0)) for prompt, length in asked]
            async with asyncio.TaskGroup() as group:
                for answer in answers:
                    group.create_task(ask(client, answer))
                await until(lambda: len(answers[0].ids) > 5, "a few tokens")
                await shoal.kill("worker-1")
            assert [answer.ids for answer in answers] == [ids for ids, _ in wanted]
        await until(lambda: len(stands(shoal)) > 1, "it stands again")
        assert all('"gpudirect":true' in line for line in stands(shoal))

    def stands(shoal: Running) -> list[str]:
        return [line for line in shoal.log("worker-0").splitlines() if '"event":"stage stands"' in line]

    direct = Plan(
        model=str(folder),
        run_dir=tmp_path / "run",
        stages=2,
        env={"SHOAL_CHASSIS_LINKS": '{ kinds = ["nixl+tcp"] }', "SHOAL_SHARD_WORKER_ENGINE": "device"},
        flags={"shard_worker": ("--num-blocks", "200")},
    )
    with running(runner, direct) as shoal:
        shoal.run(life(shoal))


@pytest.mark.skipif(why_not(Lanes.RDMA) is None, reason="this host has RDMA")
@pytest.mark.parametrize("service", ["batcher", "kvstore", "shard_worker"])
def test_who_requires_rdma_and_has_none_does_not_start(service: str, nats: str) -> None:
    command = [sys.executable, "-m", service, "--links", '{ require = "rdma" }']
    env = {**os.environ, "SHOAL_NATS_URL": nats}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    last = json.loads(done.stderr.splitlines()[-1])
    assert done.returncode == 2 and last["event"] == "bad configuration"
    assert last["error"].startswith("[chassis.links] nixl+rdma: this host has no RDMA device")
