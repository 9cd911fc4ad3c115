"""All links of a deployment over NIXL: the ring, results, control, kvstore's tiers; and a stage that dies."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chassis.transport.nixl_agent import Lanes, why_not
from shoal.nats_server import NatsServer
from tests.e2e.rig import ROOT, Running, amid, draw_calls, running
from tests.e2e.test_tiers import FOUND, TALK, plan, said, talk_and_evict

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


@pytest.mark.skipif(why_not(Lanes.RDMA) is None, reason="this host has RDMA")
@pytest.mark.parametrize("service", ["batcher", "kvstore", "shard_worker"])
def test_who_requires_rdma_and_has_none_does_not_start(service: str, nats: str) -> None:
    command = [sys.executable, "-m", service, "--links", '{ require = "rdma" }']
    env = {**os.environ, "SHOAL_NATS_URL": nats}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    last = json.loads(done.stderr.splitlines()[-1])
    assert done.returncode == 2 and last["event"] == "bad configuration"
    assert last["error"].startswith("[chassis.links] nixl+rdma: this host has no RDMA device")
