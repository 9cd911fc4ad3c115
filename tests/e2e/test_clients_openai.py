"""OpenAI's API as its own package uses it, before real processes."""

import asyncio
import json
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from chassis.bus import Bus
from chassis.messages.request import Reason, Terminal
from tests.e2e.rig import ROOT, Running, is_pending, last_record, until

PYTHON = ROOT / ".clients" / "bin" / "python"
SCRIPTS = ROOT / "tests" / "clients"

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="make .clients/.ready")


async def script(name: str, *words: str, timeout_s: float = 80.0, python: Path = PYTHON) -> str:
    """What it says when all is well."""
    argv = (str(python), "-W", "error", str(SCRIPTS / name), *words)
    process = await asyncio.create_subprocess_exec(*argv, stdout=PIPE, stderr=PIPE, cwd=Path("/"))
    try:
        async with asyncio.timeout(timeout_s):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, err.decode()[-4000:]
    return out.decode()


async def ended(bus: Bus, request_id: str) -> Terminal:
    async def over() -> bool:
        return isinstance(await last_record(bus, request_id), Terminal) and not await is_pending(
            bus, request_id
        )

    await until(over, f"{request_id} is over")
    record = await last_record(bus, request_id)
    assert isinstance(record, Terminal)
    return record


def test_the_openai_package(calm: Running) -> None:
    async def life() -> None:
        base = f"http://{calm.deployment.http_addresses[0]}/v1"
        said = await script("openai_calls.py", base)
        bus = await calm.bus()
        try:
            record = await ended(bus, json.loads(said)["left"])
        finally:
            await bus.close()
        assert record.reason is Reason.CANCELLED and len(record.output_ids) < 3000

    calm.run(life())
