"""Whoever of client and gateway dies, the client has the answer in the end, whichever gateway tells it.

Answers end at stop strings and break characters, so that text is held back where streams are lost.
"""

import asyncio
import json
import random
import signal
import sys
from asyncio.subprocess import DEVNULL
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chassis.messages.gateway import GenerateCall
from shoal.client import Accepted, AsyncClient, Client, Delta, Finished, Retry, ShoalError
from tests.e2e.rig import (
    ROOT,
    Answer,
    Running,
    ask,
    call,
    draw_calls,
    fake_plan,
    listen,
    params,
    running,
    settled,
    until,
)
from tests.sim.clients import expected

OUTPUT_LEN = 120
STOPS = ("\x07\x01\x99", "zq")  # begin often, hardly ever end


@pytest.fixture(scope="module")
def shoal(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Whoever dies is started again."""
    with running(runner, fake_plan(tmp_path_factory.mktemp("resume"), gateways=2)) as made:
        yield made


def calls(seed: int, count: int, **more: Any) -> list[GenerateCall]:
    return draw_calls(seed, OUTPUT_LEN, count, stop=STOPS, **more)


async def back(shoal: Running, index: int = 0) -> None:
    """The gateway serves again."""

    async def serves() -> bool:
        try:
            return await client.serving()
        except ShoalError:
            return False

    async with shoal.client(index) as client:
        await until(serves, "the gateway is back")


@pytest.mark.parametrize("both", [True, False], ids=["another gateway", "the same one, started again"])
def test_streams_go_on_by_themselves(shoal: Running, both: bool) -> None:
    """Half of them have no resume window: an answer outlives its gateway for a while all the same. One is
    read by a thread."""
    *answers, blocking = [Answer(c) for c in calls(30, 6) + calls(31, 6, resume_window_s=30)]
    addresses = shoal.deployment.addresses[: 2 if both else 1]

    def read() -> None:
        with Client(addresses) as client:
            assert blocking.call.token_ids is not None
            for event in client.generate(blocking.call.token_ids, params(blocking.call)):
                blocking.take(event)

    def gone_on(begun: int) -> bool:
        return all(len(a.ids) >= begun or a.end for a in (*answers, blocking))

    async def life() -> None:
        async with AsyncClient(addresses) as client, asyncio.TaskGroup() as group:
            for answer in answers:
                group.create_task(ask(client, answer))
            group.create_task(asyncio.to_thread(read))
            await until(lambda: gone_on(8), "streams begin")
            await shoal.kill("gateway")
            if both:  # the second time nobody is left who has not moved
                await until(lambda: gone_on(60), "streams go on")
                await shoal.kill("gateway")
        for answer in (*answers, blocking):
            answer.check()
        await back(shoal)

    shoal.run(life())


def test_choices_go_on_and_the_best_are_told_again(shoal: Running) -> None:
    asked = call([1, 2, 3], 60, temperature=1.0, client_key="best")
    assert asked.token_ids is not None
    told: dict[str, list[Any]] = {}

    async def listen_to(name: str, client: AsyncClient, **more: Any) -> None:
        assert asked.token_ids is not None
        said = replace(params(asked), client_key=f"{asked.client_key}.{name}", **more)
        async for event in client.generate(asked.token_ids, said):
            told.setdefault(name, []).append(event)

    async def life() -> None:
        async with AsyncClient(shoal.deployment.addresses) as client, asyncio.TaskGroup() as group:
            group.create_task(listen_to("choices", client, n=3))
            group.create_task(listen_to("best", client, n=1, best_of=3))
            await until(lambda: len(told.get("choices", ())) > 20, "choices begin")
            await shoal.kill("gateway")
        await back(shoal)

    shoal.run(life())
    answers: dict[int, Answer] = {}
    for event in told["choices"]:
        if isinstance(event, Accepted):
            answers[event.choice] = Answer(replace(asked, seed=event.seed))
        answers[event.choice].take(event)
    assert len(answers) == 3
    for answer in answers.values():
        answer.check()
    best = [e for e in told["best"] if isinstance(e, Accepted)][-1]
    answer = Answer(replace(asked, seed=best.seed))
    for event in told["best"]:
        if event is best or not isinstance(event, Accepted):
            answer.take(event)
    answer.check()


@pytest.mark.parametrize("index", [0, 1], ids=["the same gateway", "another gateway"])
@pytest.mark.parametrize("ended", [False, True], ids=["while it runs", "after its end"])
def test_a_client_that_is_killed_goes_on_from_what_it_noted(
    shoal: Running, index: int, ended: bool, tmp_path: Path
) -> None:
    """A process by itself, killed in the middle; another one takes over its notes."""
    asked = calls(33 + index, 3, resume_window_s=30)[1]
    assert asked.token_ids is not None
    said = {k: v for k, v in vars_of(params(asked)).items() if v}
    notes = tmp_path / "notes"
    notes.write_text(json.dumps({"prompt": asked.token_ids, "params": said}) + "\n")

    async def start(address: str) -> asyncio.subprocess.Process:
        words = (sys.executable, "-m", "tests.e2e.resume_later", str(notes), address)
        return await asyncio.create_subprocess_exec(*words, cwd=ROOT, stdin=DEVNULL)

    def held() -> list[dict[str, Any]]:
        return [json.loads(line) for line in notes.read_text().splitlines()[1:] if line.endswith("}")]

    async def life() -> None:
        bus = await shoal.bus()
        first = await start(shoal.deployment.addresses[0])
        await until(lambda: len(held()) > 12, "it has some")
        first.kill()
        await first.wait()
        if ended:
            await settled(bus, held()[0]["id"])
        again = await start(shoal.deployment.addresses[index])
        assert await again.wait() == 0
        await bus.close()

    shoal.run(life())
    ids: list[int] = []
    for line in (line for line in held() if "ids" in line):
        assert not line["ids"] or line["first"] == len(ids)
        ids += line["ids"]
    text = "".join(line.get("text", "") for line in held())
    wanted_ids, wanted_text, reason = expected(asked)
    assert (ids, text, held()[-1]) == (wanted_ids, wanted_text, {"end": reason.value})


def vars_of(said: object) -> dict[str, Any]:
    return {name: getattr(said, name) for name in type(said).__slots__}  # type: ignore[attr-defined]


def test_resumed_from_any_place_the_rest_is_the_rest(shoal: Running) -> None:
    """Of an answer that has ended: after each id, and with all of them, when only the end was missed."""
    asked = call([9, 9], 40, stop=STOPS)

    async def life() -> None:
        async with shoal.client() as client, shoal.client(1) as other:
            whole = await ask(client, Answer(asked))
            whole.check()
            texts: list[str] = []
            for held in range(0, len(whole.ids) + 1, 3):
                rest = Answer(asked, whole.request_id, ids=whole.ids[:held])
                await listen(other.resume(whole.request_id, whole.ids[:held]), rest)
                assert rest.ids == whole.ids and rest.end is not None
                assert whole.text.endswith(rest.text)
                texts.append(rest.text)
            assert texts[0] == whole.text and texts == sorted(texts, key=len, reverse=True)
            wrong = [*whole.ids[:5], whole.ids[5] ^ 1]
            with pytest.raises(ShoalError) as refused:
                await listen(other.resume(whole.request_id, wrong), Answer(asked, whole.request_id))
            assert refused.value.code == "ABORTED"

    shoal.run(life())


def test_cancel_of_a_stream_ends_with_what_there_is(shoal: Running) -> None:
    async def life() -> None:
        async with AsyncClient(shoal.deployment.addresses[1]) as client:
            asked = call([4, 4], 1000, resume_window_s=60)
            assert asked.token_ids is not None
            ids: list[int] = []
            cancels = 0
            async with client.generate(asked.token_ids, params(asked)) as stream:
                async for event in stream:
                    if isinstance(event, Delta):
                        ids += event.ids
                        if len(ids) >= 4 and cancels < 4:  # a late reader's deltas are joined
                            cancels += 1
                            await stream.cancel()
                assert isinstance(event, Finished) and event.reason == "cancelled"
            assert event.output_tokens == len(ids) < 1000

    shoal.run(life())


def test_gateways_restart_one_after_the_other(
    runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each drains, tells its streams to go elsewhere, and comes back: clients notice nothing."""
    flags = {"gateway": ("--drain-wait-s", "0.1")}
    plan = fake_plan(tmp_path_factory.mktemp("drains"), gateways=2, flags=flags)
    answers = [Answer(c) for c in draw_calls(40, 200, 8) + draw_calls(41, 200, 4, resume_window_s=30)]

    async def restart(shoal: Running, name: str, index: int) -> None:
        before = shoal.deployment.kill(name, signal.SIGTERM)
        await until(lambda: shoal.deployment.pids().get(name) not in (None, before), f"{name} starts again")
        await back(shoal, index)

    async def life(shoal: Running) -> None:
        async with AsyncClient(shoal.deployment.addresses) as client, asyncio.TaskGroup() as group:
            for answer in answers:
                group.create_task(ask(client, answer))
            await until(lambda: all(len(a.ids) >= 8 or a.end for a in answers), "streams begin")
            await restart(shoal, "gateway", 0)
            await restart(shoal, "gateway-1", 1)
        for answer in answers:
            answer.check()

    with running(runner, plan) as shoal:
        shoal.run(life(shoal))


@pytest.mark.slow
def test_a_gateway_that_is_frozen_is_left(shoal: Running) -> None:
    """It answers no pings: its streams go on elsewhere, and when it wakes it ends nothing of theirs."""
    answers = [Answer(c) for c in draw_calls(42, 3000, 4, resume_window_s=60)]

    async def life() -> None:
        async with AsyncClient(shoal.deployment.addresses) as client, asyncio.TaskGroup() as group:
            for answer in answers:
                group.create_task(ask(client, answer))
            await until(lambda: all(len(a.ids) >= 8 or a.end for a in answers), "streams begin")
            shoal.deployment.kill("gateway", signal.SIGSTOP)
            stopped = [len(a.ids) for a in answers]
            await until(
                lambda: all(len(a.ids) > n + 8 or a.end for a, n in zip(answers, stopped, strict=True)),
                "streams go on",
                timeout_s=40.0,
            )
            shoal.deployment.kill("gateway", signal.SIGCONT)
        for answer in answers:
            answer.check()

    shoal.run(life())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_whoever_dies_at_random_clients_have_their_answers(
    runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    """Twelve deaths, of who computes no more than a request may see: all answers are whole."""
    rng = random.Random(seed)
    answers = [
        Answer(c)
        for i in range(4)
        for c in draw_calls(100 * seed + i, 300, 6, resume_window_s=60, stop=STOPS[i % 2 :])
    ]
    names = [rng.choice(("gateway", "gateway-1")) for _ in range(7)]
    names += ["kvstore", "nats", "nats", *rng.sample(("batcher", "worker-0", "worker-1"), 2)]
    rng.shuffle(names)

    async def life(shoal: Running) -> None:
        async with AsyncClient(shoal.deployment.addresses, retry=Retry(60.0)) as client:
            async with asyncio.TaskGroup() as group:
                for answer in answers:
                    group.create_task(ask(client, answer))
                for name in names:
                    await asyncio.sleep(rng.uniform(0.2, 1.5))
                    if name in shoal.deployment.pids():
                        shoal.deployment.kill(name)
        for answer in answers:
            answer.check()

    with running(runner, fake_plan(tmp_path_factory.mktemp(f"random{seed}"), gateways=2)) as shoal:
        shoal.run(life(shoal))
