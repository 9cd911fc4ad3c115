"""Jobs of a seed: published by whoever, also twice, under one name with two bodies, late; some with a time to
end by, some cancelled by an answer of somebody's own. Each has one answer in the end, what the oracle says.
"""

import asyncio
import hashlib
import random
from dataclasses import dataclass, replace

from chassis import subjects
from chassis.bus import Stored
from chassis.errors import BusError, SubjectTaken, WrongSequence
from chassis.job_subjects import JobName, answer, job, letter_of
from chassis.memory_bus import MemoryBus
from chassis.messages.gateway import GenerateCall
from chassis.messages.jobs import BODY_DIGEST, CANCELLED, EXPIRED, Form, cancelled
from chassis.wire import gateway_pb2, jobs_pb2
from tests.sim.answers import DEATHS
from tests.sim.clients import expected, is_poisoned
from tests.sim.world import World

PUBLISH_RETRY_S = 0.1
LOOK_S = 0.25
PROTOBUF = {"Content-Type": "application/x-protobuf"}


@dataclass(frozen=True, slots=True)
class Body:
    call: GenerateCall
    timeout_ms: int

    @property
    def data(self) -> bytes:
        c = self.call
        return gateway_pb2.GenerateRequest(
            token_ids=gateway_pb2.TokenIds(ids=c.token_ids),
            temperature=c.temperature,
            seed=c.seed,
            max_tokens=c.max_tokens,
            stop=c.stop,
            ignore_eos=c.ignore_eos,
        ).SerializeToString()

    @property
    def headers(self) -> dict[str, str]:
        return PROTOBUF | ({"Shoal-Timeout-Ms": str(self.timeout_ms)} if self.timeout_ms else {})


def draw_jobs(world: World) -> "list[JobClient]":
    """Of a seed; they join the calls that the world knows of."""
    options = world.options
    if not options.jobs:
        return []
    rng = random.Random(f"jobs {options.seed}")
    clients = [JobClient(world, rng, i) for i in range(rng.randint(1, 6))]
    world.calls += [body.call for client in clients for body in client.bodies]
    return clients


class JobClient:
    def __init__(self, world: World, rng: random.Random, number: int) -> None:
        self.name = f"j{number}"
        self._world = world
        self._rng = rng
        options = world.options
        self._job = JobName("t", "q", f"{self.name}/{rng.randrange(100)}")
        self._start_s = rng.choice((0.01, rng.uniform(0.01, options.fault_time_s)))
        self._cancels_after_s = rng.uniform(0, 2.0) if rng.random() < options.cancel / 2 else None
        call = GenerateCall(
            token_ids=tuple(rng.randrange(256) for _ in range(rng.randint(1, options.prompt_len_max))),
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.getrandbits(63),
            max_tokens=rng.randint(1, options.output_len_max),
            stop=rng.choice(((), ("e",))),
            ignore_eos=rng.random() < 0.3,
        )
        timeout_ms = rng.choice((300, 5000)) if rng.random() < options.deadline else 0
        self.bodies = [Body(call, timeout_ms)]
        if rng.random() < 0.2:
            self.bodies.append(Body(replace(call, seed=7, max_tokens=2), 0))

    async def run(self) -> None:
        await asyncio.sleep(self._start_s)
        async with asyncio.TaskGroup() as group:
            for k, body in enumerate(self.bodies):
                group.create_task(self._publish(body, k))
            if self._cancels_after_s is not None:
                group.create_task(self._cancel(self._cancels_after_s))
        await self._answered()
        self._world.note(f"{self.name} has its answer")

    async def _publish(self, body: Body, k: int) -> None:
        """As JOBS.md asks: again until it is known to be stored, or refused because it is."""
        await asyncio.sleep(self._rng.choice((0.0, 0.01, 1.0)) * k)
        bus = MemoryBus(self._world.broker, f"{self.name}.{k}")
        while True:
            try:
                await bus.append(job(self._job), body.data, headers=body.headers)
                break
            except SubjectTaken:
                break
            except BusError:
                await asyncio.sleep(PUBLISH_RETRY_S)
        self._world.note(f"{self.name} is published")

    async def _cancel(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        bus = MemoryBus(self._world.broker, f"{self.name}.cancel")
        data = cancelled("", Form.PROTOBUF, "")
        while True:
            try:
                await bus.append(answer(self._job), data, expected_seq=0)
                return
            except (SubjectTaken, WrongSequence):
                return
            except BusError:
                await asyncio.sleep(PUBLISH_RETRY_S)

    async def _answered(self) -> None:
        while not self._of(subjects.ANSWERS, answer(self._job)):  # noqa: ASYNC110 - it watches from outside
            await asyncio.sleep(LOOK_S)

    def _of(self, stream: str, subject: str) -> list[Stored]:
        return [m for m in self._world.broker.streams[stream].messages() if m.subject == subject]

    def judge(self) -> None:
        """Once the world rests."""
        stored = self._of(subjects.ANSWERS, answer(self._job))
        if len(stored) != 1:
            self._world.fail(f"{self.name}: {len(stored)} answers")
            return
        said = jobs_pb2.Answer.FromString(stored[0].data)
        wrong = self._wrong(said, stored[0].headers.get(BODY_DIGEST, ""))
        if wrong:
            self._world.fail(f"{self.name} ({said.request_id}): {wrong}: {said.status_code} {said.error}")

    def _wrong(self, said: jobs_pb2.Answer, digest: str) -> str:
        """What is, if anything."""
        if said.error_code == CANCELLED:
            return "" if self._cancels_after_s is not None else "cancelled, but nobody cancelled"
        of = [body for body in self.bodies if hashlib.sha256(body.data).hexdigest() == digest]
        if len(of) != 1:
            return "it answers no body of ours"
        (body,) = of
        if said.error_code == EXPIRED:
            return "" if body.timeout_ms else "late, but it had no deadline"
        if said.status_code == 500:
            return self._wrong_death(body)
        if said.status_code != 200:
            return "it failed"
        ids, text, reason = expected(body.call)
        deltas = [e.delta for e in said.events if e.WhichOneof("event") == "delta"]
        told = [i for d in deltas for i in d.ids], "".join(d.text for d in deltas)
        end = said.events[-1].finished.reason
        return "" if (told, end) == ((ids, text), reason.value) else f"{told} {end}, expected {ids} {text!r}"

    def _wrong_death(self, body: Body) -> str:
        """It needs a cause and has a letter."""
        if not self._of(subjects.DEAD, letter_of(job(self._job))):
            return "dead without a letter"
        calls = self._world.calls
        least = 1 if any(is_poisoned(call) for call in calls) else DEATHS
        return "" if is_poisoned(body.call) or self._world.num_deaths >= least else "dead without a cause"


def check_jobs(clients: list[JobClient]) -> None:
    for client in clients:
        client.judge()
