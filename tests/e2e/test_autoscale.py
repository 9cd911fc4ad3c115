"""A deployment that grows and shrinks by itself, of real processes: up under load, down, to zero and back."""

import asyncio
from pathlib import Path

import pytest

from chassis import subjects
from chassis.ids import RequestId
from chassis.messages.request import Cancel
from shoal.autoscale.policy import Rules
from shoal.autoscale_words import autoscaling
from shoal.client import AsyncClient, ShoalError
from tests.e2e.rig import Answer, Running, ask, call, draw_calls, fake_plan, last_record, running, until

MOST = 3
STREAMS = 20
# few at a time and slow steps: these streams take one pipeline eight seconds
SLOW = ("--fake-step-cost-us", "20000")
FLAGS = {"batcher": ("--running-len-max", "2")}


def counts(shoal: Running) -> int:
    return shoal.deployment.fleet.counts()["pipelines"]


async def served(client: AsyncClient) -> bool:
    return bool(await client.models())


async def whole(client: AsyncClient, seed: int, count: int) -> None:
    """So many answers, each what it must be."""
    answers = [Answer(c) for c in draw_calls(seed, 40, count)]
    await asyncio.gather(*(ask(client, answer) for answer in answers))
    for answer in answers:
        answer.check()


@pytest.fixture
def rules() -> Rules:
    return Rules(pipelines_min=0, pipelines_max=MOST, ttft_objective_ms=500, down_after_s=1.0)


def test_up_under_load_down_after_to_zero_and_back(
    runner: asyncio.Runner, tmp_path: Path, rules: Rules
) -> None:
    said: list[str] = []

    async def play(shoal: Running) -> None:
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, counts(shoal))
                await asyncio.sleep(0.05)

        async with autoscaling(shoal.deployment, rules, said.append), shoal.client() as client:
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(watch())
                loading = group.create_task(whole(client, 1, STREAMS))
                await until(lambda: counts(shoal) > 1 or loading.done(), "it grows")
                await loading
                watching.cancel()
            assert 1 < most <= MOST, said
            await until(lambda: not counts(shoal), "nothing is left of the pipelines", 40.0)
            await until(
                lambda: not any(n.startswith(("worker", "batcher")) for n in shoal.deployment.pids()),
                "all left",
            )
            await to_zero_a_cancel_is_kept(shoal, client)
            await until(lambda: not counts(shoal), "to zero again", 40.0)
            await whole(client, 2, 3)

    with running(runner, fake_plan(tmp_path, *SLOW, stages=1, flags=FLAGS)) as shoal:
        shoal.run(play(shoal))
        assert not any("did not" in text for text in said), said


async def to_zero_a_cancel_is_kept(shoal: Running, client: AsyncClient) -> None:
    """Accepted while there is no pipeline and left at once: nobody computes it, and it has its end."""
    answer = Answer(call(range(5), 4000))
    leaving = asyncio.create_task(ask(client, answer))
    await until(lambda: bool(answer.request_id), "it is accepted")
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    bus = await shoal.bus()
    try:

        async def ended() -> bool:
            pending = await bus.read(
                subjects.REQUESTS, subjects.request_anywhere(RequestId(answer.request_id)), 1, 1
            )
            return not pending

        await until(ended, "it is acknowledged")
        record = await last_record(bus, answer.request_id)
        assert record is not None and not isinstance(record, Cancel)
    finally:
        await bus.close()


@pytest.mark.slow
def test_zero_for_longer_than_entries_live(runner: asyncio.Runner, tmp_path: Path, rules: Rules) -> None:
    """The model is served all the while, a deadline that is over is said, the first request is answered."""

    async def play(shoal: Running) -> None:
        async with autoscaling(shoal.deployment, rules, lambda _: None), shoal.client() as client:
            await until(lambda: not counts(shoal), "to zero", 30.0)
            loop = asyncio.get_running_loop()
            end = loop.time() + 2 * subjects.REGISTRY_TTL_S
            while loop.time() < end:
                assert await served(client)
                await asyncio.sleep(0.5)
            assert not counts(shoal)
            late = Answer(call(range(5), 20, timeout_ms=1))
            with pytest.raises(ShoalError, match="DEADLINE_EXCEEDED"):
                await ask(client, late)
                raise ShoalError("DEADLINE_EXCEEDED", str(late.end))
            await whole(client, 3, 2)

    with running(runner, fake_plan(tmp_path, *SLOW, stages=1, flags=FLAGS)) as shoal:
        shoal.run(play(shoal), 150.0)
