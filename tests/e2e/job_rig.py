"""Jobs against real processes: many tiny ones, whoever serves them killed, each answer held to the oracle."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from chassis import subjects
from chassis.bus import Bus, Stored
from chassis.errors import BusError, SubjectTaken
from chassis.job_subjects import JobName, answer, answers, job
from chassis.messages.gateway import GenerateCall
from chassis.wire import gateway_pb2, jobs_pb2
from tests.e2e.rig import Running, call, until
from tests.sim.clients import expected

PROTOBUF = {"Content-Type": "application/x-protobuf"}
PUBLISHING = 64  # at once
POLL_S = 0.1
RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class Tiny:
    name: JobName
    call: GenerateCall

    @property
    def body(self) -> bytes:
        c = self.call
        return gateway_pb2.GenerateRequest(
            token_ids=gateway_pb2.TokenIds(ids=c.token_ids),
            temperature=c.temperature,
            seed=c.seed,
            max_tokens=c.max_tokens,
            ignore_eos=c.ignore_eos,
        ).SerializeToString()

    def check(self, stored: Stored) -> None:
        """It is what the model says."""
        said = jobs_pb2.Answer.FromString(stored.data)
        assert said.status_code == 200, f"{self.name.key}: {said.status_code} {said.error}"
        ids, text, reason = expected(self.call)
        deltas = [e.delta for e in said.events if e.WhichOneof("event") == "delta"]
        assert [i for d in deltas for i in d.ids] == ids, self.name.key
        assert "".join(d.text for d in deltas) == text
        assert said.events[-1].finished.reason == reason.value


def draw_jobs(seed: int, count: int, queue: str = "q") -> list[Tiny]:
    rng = random.Random(seed)
    return [
        Tiny(
            JobName("", queue, f"job {i}"),
            call(
                [rng.randrange(256) for _ in range(rng.randint(1, 6))],
                rng.randint(1, 4),
                temperature=float(i % 2),
                seed=rng.getrandbits(63),
            ),
        )
        for i in range(count)
    ]


async def publish(bus: Bus, wanted: Sequence[Tiny]) -> None:
    """As a client should: again after a publish of unknown fate; refused as taken is a yes."""
    turns = asyncio.Semaphore(PUBLISHING)

    async def one(tiny: Tiny) -> None:
        async with turns:
            while True:
                try:
                    await bus.append(job(tiny.name), tiny.body, headers=PROTOBUF)
                    return
                except SubjectTaken:
                    return
                except BusError:
                    await asyncio.sleep(RETRY_S)

    async with asyncio.TaskGroup() as group:
        for tiny in wanted:
            group.create_task(one(tiny))


async def patiently(ask: Callable[[], Awaitable[object]]) -> object:
    """While the broker comes and goes."""
    while True:
        try:
            return await ask()
        except BusError:
            await asyncio.sleep(RETRY_S)


async def read_answers(bus: Bus, queue: str, start_seq: int = 1) -> list[Stored]:
    found = await patiently(lambda: bus.read(subjects.ANSWERS, answers("", queue), start_seq, 100_000))
    assert isinstance(found, list)
    return found


async def all_answered(bus: Bus, wanted: Sequence[Tiny]) -> dict[str, Stored]:
    """By subject; one each, no more, and no other."""
    queue = wanted[0].name.queue
    subjects_of = {answer(tiny.name) for tiny in wanted}
    found: dict[str, Stored] = {}
    seq = 0
    while len(found) < len(wanted):
        for stored in await read_answers(bus, queue, seq + 1):
            assert stored.subject in subjects_of and stored.subject not in found, stored.subject
            found[stored.subject], seq = stored, stored.seq
        await asyncio.sleep(POLL_S)
    return found


async def settled(bus: Bus) -> None:
    """Nothing waits, and nothing more was answered."""

    async def is_empty(stream: str, subject: str) -> bool:
        return not await patiently(lambda: bus.read(stream, subject, 1, 1))

    await until(lambda: is_empty(subjects.JOBS, "shoal.job.>"), "jobs are acknowledged", 60.0)
    await until(lambda: is_empty(subjects.REQUESTS, "shoal.req.>"), "requests are acknowledged", 60.0)


async def storm(
    shoal: Running, waves: Sequence[Sequence[Tiny]], kill: Callable[[int], Awaitable[object]]
) -> dict[str, Stored]:
    """Publishes a wave, kills somebody, and so on. Each job's one answer, by its subject."""
    bus, wanted = await shoal.bus(), [tiny for wave in waves for tiny in wave]
    async with asyncio.TaskGroup() as group:
        for number, wave in enumerate(waves):
            publishing = group.create_task(publish(bus, wave))
            await kill(number)
            await publishing
    found = await all_answered(bus, wanted)
    await settled(bus)
    assert len(await read_answers(bus, wanted[0].name.queue)) == len(wanted)
    await bus.close()
    return found
