"""Real processes for tests: deployments on one loop, clients that note what they saw and when, the oracle.

All tests share one event loop, which runs only while a test does. A client holds every delta against the
ids it has, so that a token missing or given twice fails where it happens.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from chassis import nats_bus, subjects
from chassis.bus import Bus
from chassis.ids import RequestId
from chassis.messages.gateway import GenerateCall
from chassis.messages.request import Record, parse_record
from shard_worker.fake_model import TOKEN_BYTES, logprobs_of, prompt_oracle
from shoal.client import Accepted, AsyncClient, Delta, Event, Finished, Params, PromptLogprobs
from shoal.launcher import Deployment, Plan
from tests.sim.clients import NUM_LAYERS, expected

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
STREAMS = 16
PATIENCE_S = 90.0  # for a whole test: beyond it something hangs
STEP_COST_US = 4_000


def fake_plan(folder: Path, *worker: str, **changes: Any) -> Plan:
    """Two stages of the fake model, slow enough that streams last for a second or two."""
    flags = {
        "shard_worker": ("--fake-layers", str(NUM_LAYERS), "--fake-step-cost-us", str(STEP_COST_US), *worker),
        **changes.pop("flags", {}),
    }
    return Plan(model="fake", run_dir=folder, flags=flags, **changes)


class Running:
    """A deployment on the shared loop."""

    def __init__(self, runner: asyncio.Runner, plan: Plan) -> None:
        self._runner = runner
        self.deployment = Deployment(plan)
        self.run(self.deployment.__aenter__())

    def run(self, work: Coroutine[Any, Any, T], limit_s: float = PATIENCE_S) -> T:
        return self._runner.run(_within(limit_s, work))

    def stop(self) -> list[str]:
        """The names of those that had to be killed."""
        return self.run(self.deployment.stop())

    def client(self, index: int = 0) -> AsyncClient:
        return AsyncClient(self.deployment.addresses[index], retry=None)

    async def bus(self) -> Bus:
        return await nats_bus.connect(self.deployment.nats_url, name="test")

    async def kill(self, name: str) -> None:
        """SIGKILL; returns when another process has its name."""
        pid = self.deployment.kill(name)
        await until(lambda: self.deployment.pids().get(name) not in (None, pid), f"{name} starts again")

    def log(self, name: str) -> str:
        return self.deployment.children[name].log_tail(2000)


async def _within(limit_s: float, work: Coroutine[Any, Any, T]) -> T:
    async with asyncio.timeout(limit_s):
        return await work


@contextmanager
def running(runner: asyncio.Runner, plan: Plan) -> Iterator[Running]:
    """Stands until the end of the block; all its processes must then end by themselves."""
    shoal = Running(runner, plan)
    try:
        yield shoal
    finally:
        killed = shoal.stop()
    assert not killed, f"did not drain: {killed}"


async def until(holds: Callable[[], bool | Awaitable[bool]], what: str, timeout_s: float = 20.0) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                held = holds()
                if held if isinstance(held, bool) else await held:
                    return
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"not within {timeout_s:g} s: {what}") from None


# ---- clients ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Answer:
    """What a client was told of one request, and when."""

    call: GenerateCall
    request_id: str = ""
    ids: list[int] = field(default_factory=list)
    text: str = ""
    end: Finished | None = None
    prompt_told: bool = False
    heard_s: list[float] = field(default_factory=list)

    def take(self, event: Event) -> None:
        self.heard_s.append(time.monotonic())
        match event:
            case Accepted(request_id):
                assert self.request_id in ("", request_id)
                self.request_id = request_id
            case PromptLogprobs():
                self._check_prompt(event)
            case Delta(text, ids, first_index):
                assert self.end is None
                self._check_logprobs(event)
                assert not ids or first_index == len(self.ids), f"{first_index} after {len(self.ids)} ids"
                self.ids.extend(ids)
                self.text += text
            case Finished():
                self.end = event

    def _check_prompt(self, told: PromptLogprobs) -> None:
        """In one piece, so short as these are, before any output."""
        call = self.call
        assert call.token_ids is not None and call.prompt_logprobs is not None and not self.ids
        assert (told.ids, told.first_index) == (call.token_ids[1:], 1)
        wanted = prompt_oracle(call.token_ids, call.prompt_logprobs, NUM_LAYERS)
        for found, want in zip(told.logprobs, wanted, strict=True):
            assert (found.logprob, found.rank) == (want.logprob, want.rank)
            assert tuple(t.id for t in found.top) == want.top_ids
        self.prompt_told = True

    def _check_logprobs(self, delta: Delta) -> None:
        top = self.call.top_logprobs
        assert len(delta.logprobs) == (0 if top is None else len(delta.ids))
        for token_id, told in zip(delta.ids, delta.logprobs, strict=False):
            want = logprobs_of(token_id, top or 0)
            assert (told.logprob, told.rank, told.token) == (want.logprob, want.rank, TOKEN_BYTES[token_id])
            assert tuple(t.id for t in told.top) == want.top_ids

    def check(self) -> None:
        """Whole, and what the model says."""
        ids, text, reason = expected(self.call)
        assert self.end is not None, f"{self.request_id} has no end"
        assert (self.ids, self.text, self.end.reason) == (ids, text, reason.value)
        assert self.end.output_tokens == len(ids)
        assert self.prompt_told == (self.call.prompt_logprobs is not None)

    @property
    def longest_silence_s(self) -> float:
        times = self.heard_s
        return max(later - earlier for earlier, later in zip(times, times[1:], strict=False))


def params(call: GenerateCall) -> Params:
    return Params(
        model=call.model,
        temperature=call.temperature,
        top_k=call.top_k,
        top_p=call.top_p,
        seed=call.seed,
        max_tokens=call.max_tokens,
        min_tokens=call.min_tokens,
        stop=call.stop,
        ignore_eos=call.ignore_eos,
        priority=call.priority,
        timeout_ms=call.timeout_ms,
        resume_window_s=call.resume_window_s,
        client_key=call.client_key,
        repetition_penalty=call.repetition_penalty,
        top_logprobs=call.top_logprobs,
        prompt_logprobs=call.prompt_logprobs,
    )


async def ask(client: AsyncClient, answer: Answer) -> Answer:
    """To the end of the stream. Raises ShoalError."""
    answer.heard_s.append(time.monotonic())
    assert answer.call.token_ids is not None
    await listen(client.generate(answer.call.token_ids, params(answer.call)), answer)
    return answer


async def resume(client: AsyncClient, answer: Answer) -> Answer:
    """The rest of an answer. Raises ShoalError."""
    await listen(client.resume(answer.request_id, answer.ids), answer)
    return answer


async def listen(events: AsyncIterator[Event], answer: Answer) -> None:
    async for event in events:
        answer.take(event)


def call(prompt: Iterable[int], output_len: int, **more: Any) -> GenerateCall:
    settings = {"temperature": 0.0, "seed": 0, "ignore_eos": True, **more}
    return GenerateCall(token_ids=tuple(prompt), max_tokens=output_len, **settings)


def draw_calls(seed: int, output_len: int, count: int = STREAMS, **more: Any) -> list[GenerateCall]:
    """Prompts of mixed lengths, greedy and sampled, most of them going on to the limit. Some have penalties,
    so that what they said counts, and some want log probabilities."""
    rng = random.Random(seed)
    return [
        call(
            [rng.randrange(256) for _ in range(rng.choice((1, 7, 16, 33, 90)))],
            output_len,
            temperature=float(i % 2),
            seed=rng.getrandbits(63),
            ignore_eos=i % 8 != 7,
            repetition_penalty=1.5 if i % 3 == 2 else None,
            top_logprobs=2 if i % 4 > 1 else None,
            **more,
        )
        for i in range(count)
    ]


async def amid(
    client: AsyncClient, calls: Sequence[GenerateCall], act: Callable[[], Awaitable[object]], begun: int = 8
) -> list[Answer]:
    """Asks all at once, acts when each stream has begun, checks every answer."""
    answers = [Answer(c) for c in calls]
    async with asyncio.TaskGroup() as group:
        for answer in answers:
            group.create_task(ask(client, answer))
        await until(lambda: all(len(a.ids) >= begun or a.end for a in answers), "all streams begin")
        await act()
    for answer in answers:
        answer.check()
    return answers


# ---- what is stored --------------------------------------------------------------------------------


async def last_record(bus: Bus, request_id: str) -> Record | None:
    stored = await bus.last(subjects.RESULTS, subjects.result(RequestId(request_id)))
    return None if stored is None else parse_record(stored.data)


async def is_pending(bus: Bus, request_id: str) -> bool:
    """Whether its message is still in the stream of requests."""
    pending = await bus.read(subjects.REQUESTS, subjects.request_anywhere(RequestId(request_id)), 1, 1)
    return bool(pending)


async def settled(bus: Bus, request_id: str) -> None:
    async def gone() -> bool:
        return not await is_pending(bus, request_id)

    await until(gone, f"{request_id} is acknowledged")


async def registered(bus: Bus, prefix: str) -> set[str]:
    return {e.key for e in await bus.entries(prefix) if e.value is not None}


def newcomer(bus: Bus, prefix: str, before: set[str]) -> Callable[[], Awaitable[bool]]:
    """Whether somebody has registered who was not there before."""

    async def appeared(bus: Bus, prefix: str) -> bool:
        return bool(await registered(bus, prefix) - before)

    return partial(appeared, bus, prefix)
