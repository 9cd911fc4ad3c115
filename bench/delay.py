"""What delay between hosts costs: W3 over stages that each have a host of their own, at several delays.

Hosts are network namespaces behind a switch that holds frames back (`tests/hosts`), started as a user starts
them: `shoal up --listen` on the first, which has everything but stages, and `shoal join` on each other. All
share this machine's cores, so that SmolLM2's stages and all services stand in each other's way; the fake
model's only take time, as much as SmolLM2's do by `bench/virtual_pipeline.py`, and nothing else does. Beside
it what the delay must cost (`bench/delay_theory.py`).
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from bench.delay_client import WARM_UP
from bench.delay_plot import plot
from bench.delay_theory import StageS, bound
from bench.load import W3
from bench.results_file import FOLDER, Sample, read_all, table, write
from bench.virtual_pipeline import CHUNK_POSITION_MS, LAYERS, SAMPLES_MS, SPLITS, TOKENS_MS, at
from tests.hosts.lab import ROOT, Host, Lab, missing

DELAYS_MS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0)
STAGES = (1, 2, 3, 4)
FAKE_STEP_US, FAKE_TOKEN_US = 2500, 550  # of the whole model: as SmolLM2, by steps of 8 to 64 decodes
START_TIMEOUT_S, RUN_TIMEOUT_S, END_TIMEOUT_S = 60.0, 120.0, 30.0
SETTLE_S = 1.2  # an empty step goes round, what was sent before has arrived
KEPT_MS = 1.0  # the delay that must not cost a tenth
SHOWN = 5  # runs that a point of the plot is the median of, the last ones

Key = tuple[str, int, float]  # model, stages, milliseconds
Rates = dict[Key, list[float]]


@dataclass(frozen=True, slots=True)
class Setting:
    rounds: int = 1
    parts: Mapping[str, Sequence[int]] = field(default_factory=lambda: {"smollm2": (2,), "fake": STAGES})
    delays_ms: Sequence[float] = DELAYS_MS


def configuration(model: str, stages: int) -> str:
    worker = 'dtype = "bfloat16"'
    if model == "fake":
        step_us, token_us = FAKE_STEP_US / stages, FAKE_TOKEN_US / stages
        worker = f"fake_step_cost_us = {step_us:.1f}\nfake_token_cost_us = {token_us:.1f}"
    return f"[shard_worker]\n{worker}\n[batcher]\nrunning_len_max = {W3.concurrent}\n"


def stages_s(model: str, stages: int) -> list[StageS]:
    """What a step takes on each stage, by its tokens."""
    if model == "fake":
        return [lambda tokens: (FAKE_STEP_US + FAKE_TOKEN_US * tokens) / stages / 1e6] * stages
    layers = SPLITS[stages]
    return [partial(_smollm2_s, part, index + 1 == stages) for index, part in enumerate(layers)]


def _smollm2_s(layers: int, last: bool, tokens: int) -> float:
    """A chunk of prompts samples for few rows, a step of decodes for all."""
    rows = tokens if tokens <= W3.concurrent else 1
    attended_ms = 0.0 if rows == tokens else CHUNK_POSITION_MS * tokens * W3.prompt_tokens / 2
    took_ms = (at(TOKENS_MS, tokens) + attended_ms) * layers / LAYERS
    return (took_ms + (at(SAMPLES_MS, rows) if last else 0.0)) / 1e3


class Hosts:
    """A deployment over the hosts of a lab, and a client on the first."""

    def __init__(self, lab: Lab, model: str, folder: Path) -> None:
        self._lab = lab
        self._model = model
        self._folder = folder
        self._stack = ExitStack()
        self._client: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Hosts":
        first, *others = self._lab.hosts
        config = self._folder / "bench.toml"
        config.write_text(configuration(self._model, len(others)))
        shared = ("--model", self._model, "--config", config)
        url = f"nats://{first.address}:4222"
        try:
            up = self._start(
                first,
                "up",
                "--listen",
                first.address,
                "--workers",
                "0",
                "--stages",
                str(len(others)),
                *shared,
            )
            self._wait_for(up, "others join")
            for host in others:
                self._start(host, "join", url, "--role", "worker", *shared)
            self._wait_for(up, "serving gRPC")
            words = (sys.executable, "-m", "bench.delay_client", "127.0.0.1:50051")
            self._client = self._stack.enter_context(
                _ended(first.words(*words), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )
            self.run(WARM_UP.name, 0)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, workload: str, seed: int) -> float:
        """Output tokens a second."""
        client = self._client
        assert client is not None and client.stdin is not None and client.stdout is not None
        client.stdin.write(f"{workload} {seed}\n")
        client.stdin.flush()
        return float(json.loads(client.stdout.readline())["tokens_per_s"])

    def _start(self, host: Host, *words: str | Path) -> Path:
        """Its log."""
        log = self._folder / f"{host.number}.log"
        argv = (sys.executable, "-m", "shoal", *words, "--run-dir", self._folder / str(host.number))
        self._stack.enter_context(_ended(host.words(*argv), log=self._stack.enter_context(log.open("w"))))
        return log

    def _wait_for(self, log: Path, words: str) -> None:
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while words not in log.read_text():
            if time.monotonic() > give_up_at:
                raise TimeoutError(f"{words!r} not within {START_TIMEOUT_S:g} s:\n{log.read_text()[-2000:]}")
            time.sleep(0.05)


@contextmanager
def _ended(
    words: Sequence[str], log: IO[str] | None = None, stdin: int | None = None, stdout: int | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A process that is asked to end, or if it has input, whose input ends."""
    process = subprocess.Popen(
        words, cwd=ROOT, text=True, stdin=stdin or subprocess.DEVNULL, stdout=stdout or log, stderr=log
    )
    try:
        yield process
    finally:
        if process.stdin is not None:
            process.stdin.close()
        else:
            process.terminate()
        try:
            process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def measure(setting: Setting) -> Rates:
    """Tokens a second; the delays take turns in every round."""
    rates: Rates = {}
    for model, numbers in setting.parts.items():
        for stages in numbers:
            with (
                TemporaryDirectory() as folder,
                Lab(stages + 1) as lab,
                Hosts(lab, model, Path(folder)) as hosts,
            ):
                for number in range(setting.rounds):
                    for delay_ms in setting.delays_ms:
                        lab.delay(delay_ms / 1e3)
                        time.sleep(SETTLE_S)
                        rate = hosts.run(W3.name, time.time_ns() & 0xFFFFFF)
                        rates.setdefault((model, stages, delay_ms), []).append(rate)
                        sys.stderr.write(f"{model}, {stages} stages, {delay_ms:g} ms: {rate:.0f} tokens/s\n")
                    sys.stderr.write(f"round {number + 1} of {setting.rounds}\n")
                lab.delay(0.0)
    return rates


def name_of(key: Key) -> str:
    model, stages, delay_ms = key
    return f"delay.{model}.s{stages}.ms{delay_ms:g}"


def known() -> Rates:
    """The last runs of each point, of all that were written."""
    rates: Rates = {}
    for line in read_all():
        for name, value in line["values"].items():
            parts = name.split(".")
            if parts[0] == "delay" and len(parts) == 4 and parts[3].startswith("ms"):
                key = parts[1], int(parts[2][1:]), float(parts[3][2:])
                rates.setdefault(key, []).append(value["median"])
    return {key: found[-SHOWN:] for key, found in rates.items()}


def bounds(keys: Sequence[Key]) -> dict[Key, float]:
    return {key: bound(stages_s(key[0], key[1]), W3, key[2] / 1e3) for key in keys}


def main(setting: Setting) -> None:
    if why := missing():
        sys.stdout.write(f"nothing to report: {why}\n")
        return
    rates = measure(setting)
    values = {name_of(key): Sample(tuple(found), "tokens/s") for key, found in rates.items()}
    rows = [["model", "stages", "one way, ms", "tokens/s", "of those without", "theory"]]
    theory = bounds(list(rates))
    for (model, stages, delay_ms), found in rates.items():
        without = rates[model, stages, setting.delays_ms[0]]
        kept = Sample(tuple(a / b for a, b in zip(found, without, strict=True)), "ratio")
        allowed = theory[model, stages, delay_ms] / theory[model, stages, setting.delays_ms[0]]
        cells = (f"{Sample(tuple(found), '').median:.0f}", f"{kept.median:.3f}", f"{allowed:.3f}")
        rows.append([model, str(stages), f"{delay_ms:g}", *cells])
        if delay_ms == KEPT_MS:
            values[f"delay.kept.{model}.s{stages}"] = kept
    sys.stdout.write(table(rows) + "\n")
    write("delay", values, {"workload": W3.name, "fake_us": [FAKE_STEP_US, FAKE_TOKEN_US]})
    (FOLDER / "delay.svg").write_text(plot(known(), bounds(list(known()))))
