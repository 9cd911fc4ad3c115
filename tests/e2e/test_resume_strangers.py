"""A request is its tenant's alone: with another's key it is not there, running or ended."""

import asyncio
import signal
import sys
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from chassis.api_keys_file import write_keys
from shoal.client import AsyncClient, Delta, NotFound, Params, ShoalError, Unauthenticated
from shoal.keys_words import new_key
from shoal.nats_server import free_port
from tests.e2e.rig import ROOT, Running, until


@asynccontextmanager
async def guarded(calm: Running, folder: Path) -> AsyncIterator[tuple[str, list[str]]]:
    """One more gateway, which asks for keys: its address, and keys of two tenants."""
    made = [new_key(tenant=tenant) for tenant in ("one", "two")]
    write_keys(folder / "keys.toml", {key_id: key for _, key_id, key in made})
    address = f"127.0.0.1:{free_port()}"
    flags = ("--nats-url", calm.deployment.nats_url, "--grpc-address", address, "--http-address", "")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", *flags, "--keys-file", str(folder / "keys.toml")),
        cwd=ROOT,
        stdin=DEVNULL,
        stdout=DEVNULL,
        stderr=DEVNULL,
    )
    try:
        yield address, [token for token, _, _ in made]
    finally:
        process.send_signal(signal.SIGTERM)
        await process.wait()


def test_a_strangers_request_is_not_there(calm: Running, tmp_path: Path) -> None:
    async def life() -> None:
        async with guarded(calm, tmp_path) as (address, (mine, theirs)):
            async with (
                AsyncClient(address, api_key=mine) as client,
                AsyncClient(address, api_key=theirs, retry=None) as stranger,
                AsyncClient(address, api_key=mine[:-3] + "abc", retry=None) as nobody,
                calm.client() as elsewhere,
            ):

                async def serves() -> bool:
                    try:
                        return await stranger.serving()
                    except ShoalError:
                        return False

                await until(serves, "the gateway serves")
                params = Params(max_tokens=200, ignore_eos=True, resume_window_s=30, seed=1)
                stream = client.generate([1, 2, 3], params)
                events = [await anext(stream) for _ in range(4)]
                request_id, held = stream.request_id, stream.output_ids()
                for ended in (False, True):
                    for other in (stranger, elsewhere):
                        with pytest.raises(NotFound):
                            await anext(other.resume(request_id, held))
                        with pytest.raises(NotFound):
                            await other.cancel(request_id)
                    with pytest.raises(Unauthenticated):
                        await anext(nobody.resume(request_id, held))
                    if not ended:
                        events += [event async for event in stream]
                whole = "".join(e.text for e in events if isinstance(e, Delta))
                rest = [e.text async for e in client.resume(request_id, held) if isinstance(e, Delta)]
                assert whole.endswith("".join(rest)) and len(stream.output_ids()) == 200

    calm.run(life())
