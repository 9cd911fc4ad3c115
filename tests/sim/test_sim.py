"""Some seeds of the simulation, and its promise: a seed is a bug report."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.__main__ import main, repeat_command
from tests.sim.run import run_seed

ROOT = Path(__file__).resolve().parents[2]
LONG_SEED = 74  # a drain, several kills, clients that come back


@pytest.mark.parametrize("seed", range(36))
def test_a_seed_is_clean(seed: int) -> None:
    report = run_seed(seed)
    assert not report.failures, "\n".join([*report.failures, "repeat: " + repeat_command(seed)])


def test_contents_come_back_from_tiers() -> None:
    """What a seed does changes with every change of what it runs, hence several of them."""
    assert sum(run_seed(seed).restored for seed in (5, 22, 39, 41, 72)) > 0


def test_a_seed_does_the_same_twice() -> None:
    first, again = run_seed(LONG_SEED), run_seed(LONG_SEED)
    assert len(first.history) > 20
    assert first.history == again.history and first.outcomes == again.outcomes
    assert first.history != run_seed(LONG_SEED + 1).history


def test_a_seed_does_the_same_in_every_process() -> None:
    """The order of sets and dicts of strings must decide nothing."""

    def history(hash_seed: str) -> list[str]:
        command = [sys.executable, "-m", "tests.sim", "--seed", str(LONG_SEED)]
        env = os.environ | {"PYTHONHASHSEED": hash_seed}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()[:-1]  # the last line tells the time it took

    assert history("1") == history("2") == list(run_seed(LONG_SEED).history)


def test_a_failure_names_the_command_that_repeats_it(capsys: pytest.CaptureFixture[str]) -> None:
    bug = ["--bug", "ack_before_the_terminal_record"]
    assert main(["--first", "3", "--seeds", "1", *bug]) == 1
    said = capsys.readouterr().out
    assert "acknowledged before its end" in said
    command = next(line.split("repeat: ")[1] for line in said.splitlines() if "repeat: " in line)
    assert command == "python -m tests.sim --seed 3 --bug ack_before_the_terminal_record"
    assert main(command.split()[3:]) == 1
    assert "acknowledged before its end" in capsys.readouterr().out
