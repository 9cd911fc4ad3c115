"""Who is measured: a peer in a process of its own environment, or Shoal behind its own gRPC front.

Between its turns each is stopped (SIGSTOP), so that none of its threads can use the cores that another is
measured on. After it Shoal finds that time has passed: it is asked something before its turn is timed.
"""

import asyncio
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from bench.client_loop import SERVICES_ENV
from bench.load import ask
from bench.peers.conversation import (
    Ask,
    Failed,
    Load,
    Loaded,
    Ran,
    Times,
    build_question,
    parse_answer,
)
from bench.peers.environments import ENVIRONMENTS, ROOT, llama_driver, without_paths
from chassis.errors import BusError
from shoal.client import AsyncClient, ShoalError
from shoal.launcher import Deployment, LaunchError, Plan

LOAD_TIMEOUT_S = 600.0
RUN_TIMEOUT_S = 900.0
END_TIMEOUT_S = 15.0
SETTLE_ASKS_MAX = 20
SETTLED_S = 0.15
RETURN_S = 0.5  # between asks of a deployment that is not back
SETTLE_PROMPT = (1, 2, 3, 4)
_LINE_MAX = 1 << 26
_LOG_LINES = 3


class Contestant(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def root_pid(self) -> int:
        """The process whose tree does the work, its client included."""

    async def start(self) -> Loaded:
        """Raises Failed."""

    async def run(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> Ran:
        """All at once, greedy, the end token ignored. Raises Failed."""

    def pause(self) -> None: ...

    async def resume(self) -> None:
        """Returns when it answers as before. Raises Failed."""

    async def stop(self) -> None: ...


class Peer:
    def __init__(self, name: str, load: Load, waiting: str, folder: Path, env: Mapping[str, str]) -> None:
        """`waiting`: passive, or default (as the peer likes). `folder` takes its log."""
        self.name = name
        self._load = load
        self._waiting = waiting
        self._env = env
        self._log = folder / f"{name}.log"
        self._process: asyncio.subprocess.Process | None = None

    @property
    def root_pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> Loaded:
        environment = ENVIRONMENTS[self.name]
        if (failure := environment.failure) is not None:
            raise Failed(failure)
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                environment.python, "-m", environment.module,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log,
                cwd=ROOT, env=self._environment(), limit=_LINE_MAX, start_new_session=True,
            )  # fmt: skip
        answer = await self._exchange(self._load, LOAD_TIMEOUT_S)
        if not isinstance(answer, Loaded):
            raise Failed("it answered something else")
        return answer

    async def run(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> Ran:
        answer = await self._exchange(Ask(prompts, output_tokens), RUN_TIMEOUT_S)
        if not isinstance(answer, Ran):
            raise Failed("it answered something else")
        return answer

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    async def resume(self) -> None:
        self._signal(signal.SIGCONT)

    async def stop(self) -> None:
        process = self._process
        if process is None:
            return
        self._signal(signal.SIGCONT)
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            self._signal(signal.SIGKILL)
            await process.wait()

    def _environment(self) -> dict[str, str]:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(self._load.threads)}
        env |= {"SHOAL_BENCH_LLAMA_DRIVER": str(llama_driver()), "HF_HUB_OFFLINE": "1"}
        if self._waiting == "passive":
            env |= {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
        return env | dict(self._env)

    def _signal(self, number: int) -> None:
        """To it and all that it started."""
        if self._process is not None and self._process.returncode is None:
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                pass

    async def _exchange(self, question: Load | Ask, timeout_s: float) -> Loaded | Ran:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                process.stdin.write(build_question(question).encode())
                await process.stdin.drain()
                line = await process.stdout.readline()
        except TimeoutError:
            raise Failed(f"no answer in {timeout_s:g} s") from None
        except ConnectionError:
            line = b""
        if not line:
            raise Failed(await self._last_words())
        return parse_answer(line.decode())

    async def _last_words(self) -> str:
        assert self._process is not None
        async with asyncio.timeout(END_TIMEOUT_S):
            code = await self._process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return without_paths("; ".join([*lines[-_LOG_LINES:], how]))


@dataclass(frozen=True, slots=True)
class ShoalSetting:
    model: str
    stages: int = 1
    threads: int = 2  # of each worker
    sequences_max: int = 64
    cache_mb: int = 2048
    stream_interval: int = 16  # ids of a delta: a peer in its own process passes on none at all
    worker_flags: tuple[str, ...] = ()
    batcher_flags: tuple[str, ...] = ()


class Shoal:
    """Its client is this process, as a user's would be: on the same cores, and counted."""

    def __init__(self, setting: ShoalSetting, name: str = "shoal") -> None:
        self.name = name
        self._setting = setting
        self._stack = AsyncExitStack()
        self._client: AsyncClient | None = None
        self._deployment: Deployment | None = None

    @property
    def root_pid(self) -> int:
        return os.getpid()

    @property
    def pids(self) -> dict[str, int]:
        """Of its services, by name."""
        assert self._deployment is not None
        return self._deployment.pids()

    async def start(self) -> Loaded:
        begun = time.perf_counter()
        setting = self._setting
        folder = self._stack.enter_context(TemporaryDirectory())
        worker = ("--kv-memory-mb", str(setting.cache_mb), *setting.worker_flags)
        batcher = ("--running-len-max", str(setting.sequences_max), *setting.batcher_flags)
        plan = Plan(
            model=setting.model,
            stages=setting.stages,
            threads=setting.threads,
            run_dir=Path(folder),
            restart=False,
            flags={"shard_worker": worker, "batcher": batcher},
            env=SERVICES_ENV,
        )
        try:
            shoal = await self._stack.enter_async_context(Deployment(plan))
            self._deployment = shoal
            self._client = await self._stack.enter_async_context(AsyncClient(shoal.address, retry=None))
        except (LaunchError, ShoalError, BusError) as error:
            raise Failed(without_paths(str(error))) from error
        stages = f"{setting.stages} stage{'s' * (setting.stages > 1)} of {setting.threads} threads"
        return Loaded(
            "this commit",
            time.perf_counter() - begun,
            f"gRPC in deltas of {setting.stream_interval}, {stages}",
        )

    async def run(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> Ran:
        assert self._client is not None
        start = time.perf_counter()
        try:
            async with asyncio.timeout(RUN_TIMEOUT_S):
                interval = self._setting.stream_interval
                asked = (ask(self._client, p, output_tokens, start, interval=interval) for p in prompts)
                seen = await asyncio.gather(*asked)
        except (ShoalError, TimeoutError) as error:
            raise Failed(without_paths(f"{type(error).__name__}: {error}")) from error
        requests = tuple(Times(s.arrivals_s[0], s.arrivals_s[-1], len(s.ids)) for s in seen)
        return Ran(time.perf_counter() - start, requests)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    async def resume(self) -> None:
        self._signal(signal.SIGCONT)
        for _ in range(SETTLE_ASKS_MAX):
            try:
                ran = await self.run([SETTLE_PROMPT], 2)
            except Failed:  # a pause above 30 s outlives what the registry holds: its entries come back first
                await asyncio.sleep(RETURN_S)
                continue
            if ran.seconds < SETTLED_S:
                return
        raise Failed(f"after a pause it took over {SETTLED_S:g} s for a word, {SETTLE_ASKS_MAX} times")

    def _signal(self, number: int) -> None:
        """To all of its services, the broker too."""
        for pid in self.pids.values():
            os.kill(pid, number)

    async def stop(self) -> None:
        if self._deployment is not None:
            self._signal(signal.SIGCONT)
        await self._stack.aclose()
