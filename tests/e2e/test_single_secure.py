"""One process with what `shoal init --secure` wrote: TLS and keys at both doors, as with services apart."""

import argparse
import asyncio
import json
import signal
import ssl
import urllib.error
import urllib.request
from asyncio.subprocess import Process
from pathlib import Path

from shoal import init_words
from shoal.client import AsyncClient, Params, ShoalError
from shoal.launcher import read_state
from shoal.secure_folder import tls_of
from tests.e2e.rig import PATIENCE_S
from tests.e2e.test_single import said, shoal_process

PROMPT = "tell-nobody-8c1d"


async def started(folder: Path, config: Path) -> Process:
    words = ("--model", "fake", "--port", "0", "--http-port", "0", "--run-dir", folder, "--config", config)
    process = await shoal_process("serve", "--single", *words)
    assert process.stderr is not None
    told = b""
    while line := await process.stderr.readline():
        told += line
        if b"serving gRPC" in line:
            return process
    raise AssertionError(told.decode())


def asked(address: str, folder: Path, key: str) -> tuple[int, str]:
    """Status and answer of a completion over HTTPS."""
    body = json.dumps({"model": "fake", "prompt": PROMPT, "max_tokens": 4}).encode()
    request = urllib.request.Request(f"https://{address}/v1/completions", body)
    request.add_header("Content-Type", "application/json")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    trusted = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    try:
        with urllib.request.urlopen(request, context=trusted, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def at(folder: Path, what: str) -> str:
    addresses = read_state(folder)[what]
    assert isinstance(addresses, list)
    return str(addresses[0])


def test_keys_and_tls_hold_in_one_process(runner: asyncio.Runner, tmp_path: Path) -> None:
    made, run_dir = tmp_path / "made", tmp_path / "run"
    key, _ = init_words.run(argparse.Namespace(secure=made, host=[], tenant="acme", days=30))

    async def case() -> None:
        process = await started(run_dir, made / "shoal.toml")
        try:
            address, http = at(run_dir, "addresses"), at(run_dir, "http_addresses")
            params = Params(max_tokens=4, ignore_eos=True)
            async with AsyncClient(address, api_key=key, tls=tls_of(made), retry=None) as client:
                result = await client.complete(PROMPT, params)
                assert len(result.ids) == 4
            for wrong in ("", key[:-1] + ("a" if key[-1] != "a" else "b")):
                async with AsyncClient(address, api_key=wrong, tls=tls_of(made), retry=None) as client:
                    try:
                        await client.complete(PROMPT, params)
                        raise AssertionError("it was answered")
                    except ShoalError as error:
                        assert error.code == "UNAUTHENTICATED"
            async with AsyncClient(address, api_key=key, tls=False, retry=None) as client:
                try:
                    await client.complete(PROMPT, params)
                    raise AssertionError("it was answered without TLS")
                except ShoalError as error:
                    assert error.code == "UNAVAILABLE"
            status, text = await asyncio.to_thread(asked, http, made, key)
            assert status == 200 and json.loads(text)["usage"]["completion_tokens"] == 4
            status, text = await asyncio.to_thread(asked, http, made, "")
            assert status == 401 and json.loads(text)["error"]["message"]
            code, out, err = await said("usage", "--run-dir", run_dir)
            assert code == 0 and "acme" in out, err
            code, out, err = await said("batch", "dead", "list", "--run-dir", run_dir)
            assert code == 0, err
            process.send_signal(signal.SIGTERM)
            _, told = await process.communicate()
            assert process.returncode == 0, told.decode()
            assert PROMPT.encode() not in told and key.encode() not in told
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    runner.run(asyncio.wait_for(case(), PATIENCE_S))
