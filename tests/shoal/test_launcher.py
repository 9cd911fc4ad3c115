"""What the launcher refuses and remembers; whole deployments run in tests/e2e."""

import asyncio
import json
import os
import socket
from functools import partial
from pathlib import Path

import pytest

from chassis import nats_bus
from shoal import cli, gateway_words, serve_words
from shoal.cli import main
from shoal.client import Retry
from shoal.launcher import Deployment, LaunchError, Plan, model_flags, read_state
from shoal.run_folder import STATE_FILE, RunFolder
from shoal.up_words import stay_up


def test_models_by_name_and_path(tmp_path: Path) -> None:
    assert model_flags("fake") == ("--executor", "fake")
    assert model_flags(str(tmp_path)) == ("--model", str(tmp_path.resolve()))
    with pytest.raises(LaunchError, match="no such model: nowhere"):
        model_flags("nowhere")


def test_one_deployment_a_folder(tmp_path: Path) -> None:
    async def go() -> None:
        first, second = (Deployment(Plan(run_dir=tmp_path)) for _ in range(2))
        first._folder.take()
        with pytest.raises(LaunchError, match="another deployment"):
            await second.start()
        await second.stop()
        await first.stop()
        second._folder.take()
        await second.stop()

    asyncio.run(go())


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match=r"--run-dir .*/file/run: Not a directory"):
        RunFolder(tmp_path / "file" / "run").take()


def test_nothing_is_said_to_start_before_it_can(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(LaunchError, match="--stages 0: 1 to 64"):
        asyncio.run(stay_up(Plan(model="fake", stages=0, run_dir=tmp_path), said.append))
    assert said == []
    folder = RunFolder(tmp_path)
    folder.take()  # it was left again
    folder.leave()


@pytest.mark.parametrize("flag", ["--port", "--http-port"])
@pytest.mark.parametrize("port", ["-1", "65536"])
def test_ports_that_are_none_are_named(flag: str, port: str) -> None:
    arguments = cli._parser().parse_args(["serve", "--single", flag, port])
    with pytest.raises(LaunchError, match=f"{flag} {port}: 0 to 65535"):
        serve_words.plan_of(arguments)


@pytest.mark.parametrize(("which", "flag"), [("port", "--port"), ("http_port", "--http-port")])
def test_a_port_that_somebody_has_is_not_taken_for_ours(tmp_path: Path, which: str, flag: str) -> None:
    async def go(port: int) -> None:
        deployment = Deployment(Plan(model="fake", run_dir=tmp_path, **{which: port}))  # type: ignore[arg-type]
        try:
            await deployment.start()
        finally:
            await deployment.stop()

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(LaunchError, match=f"is taken: {flag} says another"):
            asyncio.run(go(other.getsockname()[1]))


def test_the_state_names_what_runs(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="nothing runs"):
        read_state(tmp_path)
    state = {"nats_url": "nats://x:1", "addresses": ["127.0.0.1:5"], "pid": os.getpid()}
    (tmp_path / STATE_FILE).write_text(json.dumps(state))
    assert read_state(tmp_path) == state
    (tmp_path / STATE_FILE).write_text(json.dumps(state | {"pid": 2**22 + 1}))
    with pytest.raises(LaunchError, match="nothing runs"):
        read_state(tmp_path)


def test_without_nats_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_bus, "connect", partial(nats_bus.connect, timeout_s=0.3))

    async def go() -> None:
        deployment = Deployment(Plan(model="fake", run_dir=tmp_path, nats_url="nats://u:secret@127.0.0.1:1"))
        try:
            await deployment.start()
        finally:
            await deployment.stop()

    with pytest.raises(LaunchError, match=r"^no NATS server at nats://\*\*\*@127.0.0.1:1"):
        asyncio.run(go())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("[gateway", "c.toml: "),
        ("[gatewai]\n", r"unknown section \[gatewai\]; known are chassis, gateway"),
        ("port = 1\n", r"unknown section \[port\]"),
    ],
)
def test_a_configuration_that_nobody_would_read_is_refused(
    text: str | None, said: str, tmp_path: Path
) -> None:
    config = tmp_path / "c.toml"
    if text is not None:
        config.write_text(text)

    async def go() -> None:
        deployment = Deployment(Plan(model="fake", run_dir=tmp_path, config=config))
        try:
            await deployment.start()
        finally:
            await deployment.stop()

    with pytest.raises(LaunchError, match=said):
        asyncio.run(go())


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"stages": 0}, "--stages 0: 1 to 64"),
        ({"stages": 65}, "--stages 65: 1 to 64"),
        ({"threads": 0}, "--threads 0: 1 to "),
        ({"tensor_parallel": 65}, "--tensor-parallel 65: 1 to 64"),
        ({"port": 65_536}, "--port 65536: 0 to 65535"),
        ({"http_port": -1}, "--http-port -1: 0 to 65535"),
        ({"nats_port": 70_000}, "--nats-port 70000: 0 to 65535"),
        ({"first_port": 65_535}, "--first-port 65535: 0 to 64512"),
    ],
)
def test_numbers_that_cannot_be_are_refused_before_anything_starts(
    numbers: dict[str, int], said: str, tmp_path: Path
) -> None:
    deployment = Deployment(Plan(model="fake", run_dir=tmp_path, **numbers))  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match=said):
        asyncio.run(deployment.start())
    assert not list(tmp_path.iterdir())


def test_a_key_that_a_service_refuses_ends_the_start(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("[kvstore]\nnonsense = 1\n")

    async def go() -> None:
        async with Deployment(Plan(model="fake", run_dir=tmp_path, config=config)):
            pass

    with pytest.raises(LaunchError, match=r"(?s)kvstore ended at once:.*unknown key 'nonsense'"):
        asyncio.run(go())


@pytest.mark.parametrize("service", ["shard_worker", "batcher"])
def test_an_address_that_is_none_ends_the_start(service: str, tmp_path: Path) -> None:
    """As any wrong configuration: whoever starts it need not start it again."""
    flags = {service: ("--listen", "tcp://nowhere")}

    async def go() -> None:
        async with Deployment(Plan(model="fake", run_dir=tmp_path, stages=1, flags=flags)):
            pass

    with pytest.raises(LaunchError, match=rf"(?s)ended at once:.*\[{service}\] listen: .*tcp://host:port"):
        asyncio.run(go())


def test_the_command_fails_with_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_words, "Retry", partial(Retry, patience_s=0.2))
    assert main(["generate", "hi", "--run-dir", str(tmp_path)]) == 1
    assert "nothing runs" in capsys.readouterr().err
    assert main(["generate", "hi", "--address", "127.0.0.1:1"]) == 1
    said = capsys.readouterr().err
    assert "trying again for 0.2 s" in said and "UNAVAILABLE" in said
    with pytest.raises(SystemExit) as caught:
        main(["generate"])
    assert caught.value.code == 2


def test_a_server_that_cannot_be_started_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NATS_SERVER", str(tmp_path / "absent"))

    async def go() -> None:
        deployment = Deployment(Plan(model="fake", run_dir=tmp_path))
        try:
            await deployment.start()
        finally:
            await deployment.stop()

    with pytest.raises(LaunchError, match="nats can't be started: .*absent"):
        asyncio.run(go())
