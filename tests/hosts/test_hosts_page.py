"""deploy/HOSTS.md, command by command, on three hosts."""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.hosts.lab import ROOT, Host, Lab
from tests.hosts.rig import Started

PAGE = ROOT / "deploy" / "HOSTS.md"
BLOCK = re.compile(r"^```sh\n# on ([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LOADING_S = 120.0


def blocks() -> list[tuple[list[str], bool, list[str]]]:
    """Addresses, whether it runs until Ctrl-C, lines."""
    found = []
    for where, text in BLOCK.findall(PAGE.read_text()):
        found.append((re.findall(r"[\d.]{7,}", where), "Ctrl-C" in where, text.splitlines()))
    return found


class Machines:
    """Each host has a folder of its own, where its commands run."""

    def __init__(self, lab: Lab, folder: Path, model: str) -> None:
        self._hosts = {host.address: host for host in lab.hosts}
        self._folder = folder
        self._model = model
        self._stack = ExitStack()
        for host in lab.hosts:
            self.home(host).mkdir()

    def home(self, host: Host) -> Path:
        return self._folder / host.address

    def close(self) -> None:
        self._stack.close()

    def stay(self, address: str, line: str) -> Started:
        host = self._hosts[address]
        words = self._words(line)
        started = Started(host, [*words, "--model", self._model], self.home(host) / "said", self.home(host))
        self._stack.callback(started.end)
        return started

    def run(self, address: str, line: str) -> str:
        host, home = self._hosts[address], self.home(self._hosts[address])
        copied = re.fullmatch(r"scp (\S+) ([\d.]+):", line)
        if copied:
            shutil.copy(home / copied[1], self.home(self._hosts[copied[2]]))
            return ""
        line = line.replace(".venv/bin/shoal", f"{shlex.quote(sys.executable)} -m shoal")
        done = host.run("sh", "-c", line, timeout_s=LOADING_S, cwd=home, env=self._env(), check=False)
        assert done.returncode == 0, f"{line}: {done.stderr}"
        return done.stdout

    def _words(self, line: str) -> list[str]:
        words = shlex.split(line)
        assert words[0] == ".venv/bin/shoal"
        return [sys.executable, "-m", "shoal", *words[1:]]

    def _env(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture(params=["fake", pytest.param("smollm2", marks=pytest.mark.slow)])
def machines(request: pytest.FixtureRequest, three: Lab, tmp_path: Path) -> Iterator[Machines]:
    made = Machines(three, tmp_path, request.param)
    try:
        yield made
    finally:
        made.close()


def test_its_commands_make_one_deployment_of_three_hosts(machines: Machines) -> None:
    staying: list[Started] = []
    answers: list[str] = []
    for addresses, stays, lines in blocks():
        for address in addresses:
            for line in lines:
                if not stays:
                    answers.append(machines.run(address, line))
                    continue
                staying.append(machines.stay(address, line))
                staying[-1].wait_for("others join" if " up " in line else "has joined", LOADING_S)
        if len(staying) == 3:
            staying[0].wait_for("serving gRPC on 192.0.2.1:50051", LOADING_S)
    assert len(staying) == 3
    assert answers[-1].strip(), "the question is answered"
    assert [started.end() for started in staying] == [0, 0, 0]


@pytest.mark.slow
def test_without_a_key_nobody_is_let_in(machines: Machines) -> None:
    """The bus asks for users, the gateway for keys."""
    for addresses, stays, lines in blocks():
        for address in addresses if not stays else addresses[:1]:
            for line in lines:
                if " up " in line:
                    machines.stay(address, line).wait_for("others join", LOADING_S)
                    stranger = machines.stay(
                        "192.0.2.2",
                        ".venv/bin/shoal join nats://192.0.2.1:4222 --role worker --run-dir strange",
                    )
                    assert stranger.wait() == 1
                    assert "no NATS at nats://192.0.2.1:4222" in stranger.said
                    return
                machines.run(address, line)


def test_every_block_says_where_it_runs() -> None:
    assert PAGE.read_text().count("```sh\n") == len(blocks())
    assert {address for addresses, _, _ in blocks() for address in addresses} == {
        "192.0.2.1", "192.0.2.2", "192.0.2.3",
    }  # fmt: skip
