"""What anybody may have published as a request, and what the batcher makes of it."""

import asyncio
from dataclasses import replace

import pytest

from chassis import subjects
from chassis.ids import RequestId
from chassis.memory_bus import MemoryBus
from chassis.messages.request import Reason, Request, Terminal, build_request, parse_record
from chassis.messages.sampling import Sampling, Shaping
from shard_worker.fake_model import VOCAB_SIZE
from tests.batcher.test_service import deployment, request
from tests.sim.loop import run

GOOD = request("r1", (1, 2, 3))


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        (replace(GOOD, prompt_ids=(1, VOCAB_SIZE)), "vocabulary"),
        (replace(GOOD, prompt_ids=(0xFFFFFFFF,)), "vocabulary"),
        (replace(GOOD, prompt_ids=(1,) * 5000), "prompt_ids"),
        (replace(GOOD, model="another"), "model"),
        (replace(GOOD, sampling=Sampling(shaping=Shaping(bad_words=((1, VOCAB_SIZE),)))), "vocabulary"),
        (replace(GOOD, limits=replace(GOOD.limits, stop_token_ids=(VOCAB_SIZE,))), "vocabulary"),
    ],
)
def test_what_the_model_cannot_run_fails_and_the_pipeline_stands(bad: Request, word: str) -> None:
    """A worker refuses such a step by ending the epoch, and everybody else's steps with it."""

    async def main() -> None:
        async with deployment() as world:
            bus = MemoryBus(world.broker, "client")
            await asyncio.sleep(5)
            core = world.nodes["batcher"].service._core
            epoch = core.formation.epoch
            await bus.append(subjects.request("fake", 5, bad.id), build_request(bad))
            await asyncio.sleep(5)
            stored = await bus.last(subjects.RESULTS, subjects.result(bad.id))
            assert stored is not None
            record = parse_record(stored.data)
            assert isinstance(record, Terminal) and record.reason is Reason.FAILED and word in record.error
            assert not list(world.broker.streams[subjects.REQUESTS].messages())
            assert core.standing and core.formation.epoch == epoch
            bus.kill()

    run(main())


def test_a_request_under_the_subject_of_another_fails_there() -> None:
    """Its own subject, and whoever waits for its result, know nothing of it."""

    async def main() -> None:
        async with deployment() as world:
            bus = MemoryBus(world.broker, "client")
            await bus.append(subjects.request("fake", 5, RequestId("r2")), build_request(GOOD))
            await asyncio.sleep(10)
            stored = await bus.last(subjects.RESULTS, subjects.result(RequestId("r2")))
            assert stored is not None
            record = parse_record(stored.data)
            assert isinstance(record, Terminal) and record.reason is Reason.FAILED
            assert "subject" in record.error
            assert await bus.last(subjects.RESULTS, subjects.result(GOOD.id)) is None
            assert not list(world.broker.streams[subjects.REQUESTS].messages())
            bus.kill()

    run(main())


def test_garbage_never_writes_over_a_record() -> None:
    async def main() -> None:
        async with deployment() as world:
            bus = MemoryBus(world.broker, "client")
            await bus.append(subjects.request("fake", 5, GOOD.id), build_request(GOOD))
            await asyncio.sleep(10)
            ended = await bus.last(subjects.RESULTS, subjects.result(GOOD.id))
            assert ended is not None and isinstance(parse_record(ended.data), Terminal)
            await bus.append(subjects.request("fake", 5, GOOD.id), b"\xff")
            await asyncio.sleep(10)
            assert await bus.last(subjects.RESULTS, subjects.result(GOOD.id)) == ended
            assert not list(world.broker.streams[subjects.REQUESTS].messages())
            bus.kill()

    run(main())
