"""The example for Node.js is run: it asks, goes on at another gateway, cancels, and says what is refused."""

import asyncio
import shutil
import signal
from asyncio.subprocess import PIPE
from collections.abc import Iterator

import pytest

from chassis.messages.request import Reason, Terminal
from shoal.client import Params
from tests.e2e.rig import ROOT, Running, fake_plan, last_record, running, until

QUESTION = "hello there"  # of the fake model's answers one that does not end soon
EXAMPLE = ROOT / "examples" / "node-grpc"


def missing() -> str:
    if shutil.which("node") is None:
        return "node is not installed"
    installed = EXAMPLE / "node_modules" / "@grpc" / "grpc-js"
    return (
        ""
        if installed.exists()
        else "its packages are not installed: make examples/node-grpc/node_modules/.ready"
    )


pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture(scope="module")
def shoal(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(runner, fake_plan(tmp_path_factory.mktemp("node"), gateways=2)) as made:
        yield made


async def start(shoal: Running, *words: str, address: str = "") -> asyncio.subprocess.Process:
    places = [address] if address else shoal.deployment.addresses
    flags = [word for place in places for word in ("--address", place)]
    return await asyncio.create_subprocess_exec(
        "node", "chat.js", *flags, *words, cwd=EXAMPLE, stdout=PIPE, stderr=PIPE
    )


async def wanted(shoal: Running, question: str, max_tokens: int) -> str:
    async with shoal.client(1) as client:
        said = Params(temperature=0.0, max_tokens=max_tokens)
        return (await client.complete([("user", question)], said)).text


def test_it_asks_and_goes_on_when_its_gateway_dies(shoal: Running) -> None:
    async def life() -> None:
        words = ("--temperature", "0", "--max-tokens", "120")
        process = await start(shoal, *words, QUESTION)
        assert process.stdout is not None and process.stderr is not None
        said = (await process.stderr.readline()).decode()
        assert said.startswith("request ")
        first = await process.stdout.read(1)
        await shoal.kill("gateway")
        rest, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
        text = (first + rest).decode()
        assert text == await wanted(shoal, QUESTION, 120) + "\n"
        assert "lost: " in errors.decode()

    shoal.run(life())


def test_ctrl_c_cancels_the_request(shoal: Running) -> None:
    async def life() -> None:
        process = await start(shoal, QUESTION, address=shoal.deployment.addresses[1])
        assert process.stdout is not None and process.stderr is not None
        request_id = (await process.stderr.readline()).decode().split()[1].rstrip(",")
        await process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, said = await process.communicate()
        assert process.returncode == 0
        bus = await shoal.bus()

        async def ended() -> bool:
            record = await last_record(bus, request_id)
            return isinstance(record, Terminal) and record.reason is Reason.CANCELLED

        await until(ended, "the request is cancelled")
        await bus.close()
        assert said.decode().startswith("cancelled: ")

    shoal.run(life())


def test_what_is_refused_is_said_in_a_line(shoal: Running) -> None:
    async def life() -> None:
        process = await start(shoal, "--max-tokens", "0", QUESTION)
        _, said = await process.communicate()
        assert process.returncode == 1
        assert said.decode() == "INVALID_ARGUMENT: max_tokens: 0; at least 1\n"

    shoal.run(life())
