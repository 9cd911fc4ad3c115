"""SIGKILL amid sixteen streams: each answer is whole and what it would have been; the silence has a ceiling.

The ceilings are what Shoal promises; what was measured is printed at the end of the test run.
"""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from chassis import subjects
from chassis.bus import Bus
from chassis.messages.registry import parse_batcher
from shoal.client import AsyncClient, ShoalError
from shoal.why import collect
from tests.e2e.receipts import checked_receipts
from tests.e2e.rig import (
    STREAMS,
    Answer,
    Running,
    amid,
    ask,
    draw_calls,
    fake_plan,
    newcomer,
    registered,
    resume,
    running,
    until,
)

EXPLAINED = 5  # answers, of each test
CLOCKS_US = 5000  # a busy machine may stop a process between looks at two clocks
CEILING_S = {"stage": 10.0, "batcher": 8.0, "kvstore": 3.0, "nats": 3.0}
OUTPUT_LEN = 100
Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def shoal(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Whoever dies is started again."""
    with running(runner, fake_plan(tmp_path_factory.mktemp("kills"), gateways=2)) as made:
        yield made
        made.run(receipts_told(made))


@pytest.fixture(scope="module")
def doubled(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Nobody is started again; a spare and a standby are there."""
    plan = fake_plan(tmp_path_factory.mktemp("doubled"), spares=1, batchers=2, restart=False)
    with running(runner, plan) as made:
        yield made
        made.run(receipts_told(made))


async def receipts_told(shoal: Running) -> None:
    """Whoever died meanwhile: each request that ended has one."""
    bus = await shoal.bus()
    try:
        assert len(await checked_receipts(bus)) >= STREAMS
    finally:
        await bus.close()


async def explained(shoal: Running, answers: list[Answer]) -> None:
    """What is stored of some of them is one tree each, and its ledger adds up."""
    bus = await shoal.bus()
    for answer in answers[:: len(answers) // EXPLAINED]:
        story = await collect(bus, answer.request_id)

        async def whole(answer: Answer = answer) -> bool:
            nonlocal story
            story = await collect(bus, answer.request_id)
            ends = {span.name for span in story.spans if "gen_ai.response.finish_reasons" in span.attributes}
            return ends >= {"gateway.generate", "batcher.request"} and not story.orphans()

        await until(whole, f"the story of {answer.request_id} is whole")
        book = story.ledger()
        assert book is not None
        assert abs(book.unaccounted_us) <= max(book.total_us / 100, CLOCKS_US), book
    await bus.close()


def report(answers: list[Answer], who: str, record_property: Record) -> None:
    silence_s = max(answer.longest_silence_s for answer in answers)
    record_property(f"stall.{who}_s", round(silence_s, 2))
    assert silence_s <= CEILING_S[who]


@pytest.mark.parametrize("name", ["worker-0", "worker-1"])
def test_a_stage_dies(shoal: Running, name: str, record_property: Record) -> None:
    async def life() -> list[Answer]:
        async with shoal.client() as client:
            answers = await amid(client, draw_calls(10, OUTPUT_LEN), lambda: shoal.kill(name))
        await explained(shoal, answers)
        return answers

    report(shoal.run(life()), "stage", record_property)


def test_a_stage_dies_amid_garbage_in_the_registry(shoal: Running, record_property: Record) -> None:
    """The pipeline forms anew, whatever others wrote beside its members."""
    garbage = (b"", b"\xff" * 64, b"\x0a\x02\xff\xfe", b"{}")
    keys = [subjects.epoch_key("fake"), subjects.model_key("fake")]
    prefixes = (subjects.WORKERS, subjects.KVSTORES, subjects.BATCHERS, subjects.GATEWAYS)
    keys += [f"{prefix}GARBAGE" for prefix in prefixes]

    async def life() -> list[Answer]:
        bus = await shoal.bus()

        async def spoil_and_kill() -> None:
            for data in garbage:
                for key in keys:
                    await bus.put_entry(key, data)
            await shoal.kill("worker-0")

        async with shoal.client() as client:
            answers = await amid(client, draw_calls(18, OUTPUT_LEN), spoil_and_kill)
            await shoal.deployment.wait_ready(5.0)  # it is seen too
        await bus.close()
        return answers

    report(shoal.run(life()), "stage", record_property)


def test_the_batcher_dies(shoal: Running, record_property: Record) -> None:
    async def life() -> list[Answer]:
        async with shoal.client() as client:
            answers = await amid(client, draw_calls(11, OUTPUT_LEN), lambda: shoal.kill("batcher"))
        await explained(shoal, answers)
        return answers

    report(shoal.run(life()), "batcher", record_property)


def test_kvstore_dies(shoal: Running, record_property: Record) -> None:
    async def life() -> list[Answer]:
        bus = await shoal.bus()
        before = await registered(bus, subjects.KVSTORES)
        async with shoal.client() as client:
            answers = await amid(client, draw_calls(12, OUTPUT_LEN), lambda: shoal.kill("kvstore"))
            await until(newcomer(bus, subjects.KVSTORES, before), "the new kvstore registers")
            again = await amid(client, draw_calls(12, 10), nothing, begun=0)
        await bus.close()
        await explained(shoal, answers)
        return answers + again

    report(shoal.run(life()), "kvstore", record_property)


def test_nats_dies(shoal: Running, record_property: Record) -> None:
    async def life() -> list[Answer]:
        async with shoal.client() as client:
            answers = await amid(client, draw_calls(13, OUTPUT_LEN), lambda: shoal.kill("nats"))
            await amid(client, draw_calls(14, 10), nothing, begun=0)
        await explained(shoal, answers)
        return answers

    report(shoal.run(life()), "nats", record_property)


def test_the_gateway_dies_and_another_brings_exactly_the_rest(shoal: Running) -> None:
    """With a window, and within the grace that everyone has."""
    calls = draw_calls(15, OUTPUT_LEN, 8) + draw_calls(16, OUTPUT_LEN, 8, resume_window_s=30)
    answers = [Answer(call) for call in calls]
    lost: list[Answer] = []

    async def until_lost(client: AsyncClient, answer: Answer) -> None:
        try:
            await ask(client, answer)
        except ShoalError as error:
            assert error.code == "UNAVAILABLE", error
            lost.append(answer)

    async def life() -> None:
        async with shoal.client() as client, asyncio.TaskGroup() as group:
            for answer in answers:
                group.create_task(until_lost(client, answer))
            await until(lambda: all(len(a.ids) >= 8 or a.end for a in answers), "all streams begin")
            await shoal.kill("gateway")
        assert len(lost) >= 8
        async with shoal.client(1) as other:
            await asyncio.gather(*(resume(other, answer) for answer in lost))
        for answer in answers:
            answer.check()
        await shoal.deployment.wait_ready()

    shoal.run(life())


def test_everything_dies_at_once(shoal: Running) -> None:
    """What was accepted is in the stream, and runs again with the same seeds."""
    answers = [Answer(call) for call in draw_calls(17, OUTPUT_LEN, resume_window_s=60)]

    async def until_lost(client: AsyncClient, answer: Answer) -> None:
        try:
            await ask(client, answer)
        except ShoalError as error:
            assert error.code == "UNAVAILABLE", error

    async def life() -> None:
        async with shoal.client() as client, asyncio.TaskGroup() as group:
            for answer in answers:
                group.create_task(until_lost(client, answer))
            await until(lambda: all(len(a.ids) >= 8 or a.end for a in answers), "all streams begin")
            for name in shoal.deployment.pids():
                shoal.deployment.kill(name)
        await shoal.deployment.wait_ready()
        async with shoal.client(1) as other:
            await asyncio.gather(*(resume(other, a) for a in answers if a.end is None))
        for answer in answers:
            answer.check()

    shoal.run(life())


async def nothing() -> None:
    pass


def test_a_spare_takes_the_place_of_a_dead_stage(doubled: Running, record_property: Record) -> None:
    async def life() -> list[Answer]:
        async def kill() -> None:
            doubled.deployment.kill("worker-1")

        async with doubled.client() as client:
            answers = await amid(client, draw_calls(20, OUTPUT_LEN), kill)
        assert "worker-1" not in doubled.deployment.pids()
        await doubled.deployment.relaunch("worker-1")
        return answers

    report(doubled.run(life()), "stage", record_property)


def test_a_standby_takes_the_place_of_a_dead_batcher(doubled: Running, record_property: Record) -> None:
    async def life() -> list[Answer]:
        bus = await doubled.bus()
        first = await leader(doubled, bus)

        async def kill() -> None:
            doubled.deployment.kill(first)

        async with doubled.client() as client:
            answers = await amid(client, draw_calls(21, OUTPUT_LEN), kill)
        assert first not in doubled.deployment.pids()
        await bus.close()
        await doubled.deployment.relaunch(first)
        return answers

    report(doubled.run(life()), "batcher", record_property)


async def leader(shoal: Running, bus: Bus) -> str:
    """The batcher whose pipeline stands, by its process name."""
    entries = [parse_batcher(e.value) for e in await bus.entries(subjects.BATCHERS) if e.value is not None]
    (boot,) = (entry.boot for entry in entries if entry.standing)
    names = [n for n in shoal.deployment.pids() if n.startswith("batcher") and boot in shoal.log(n)]
    assert len(names) == 1
    return names[0]
