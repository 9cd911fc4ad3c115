"""The shell of jobs: fetches what there is room for, keeps the broker patient, performs what the core says.

One durable consumer over all gateways. What is held has a progress ack each second; a gateway that dies loses
its jobs to another within the consumer's ack wait.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from chassis import log, subjects
from chassis.bus import Bus, Delivery
from chassis.errors import BusError, BusTimeout, MessageTooLarge, SubjectTaken, WrongSequence
from chassis.ids import RequestId
from chassis.inbox import Inbox
from chassis.insist import insist
from chassis.job_subjects import CONSUMER, PROGRESS_INTERVAL_S, letter_of
from chassis.messages.jobs import Letter, build_letter
from chassis.ports import Ports
from gateway.access.caller import Caller
from gateway.config import Config
from gateway.front import Front
from gateway.jobs.events import (
    Ack,
    Buried,
    Bury,
    Count,
    Delivered,
    Effect,
    Ended,
    Event,
    LetGo,
    Look,
    Looked,
    Nak,
    Progress,
    Run,
    Stop,
    Tick,
    Write,
    WriteAnswer,
    Written,
)
from gateway.jobs.holding import Holding
from gateway.jobs.runner import Answerer, Runner
from gateway.jobs.verdict import Missing

FETCH_WAIT_S = 2.0
BACKOFF_S = 0.5
CALL_TIMEOUT_S = 2.0
CALLS_AT_ONCE_MAX = 64  # to the bus: looks, letters, answers
LOG_LEN_MAX = 256  # records in a letter
LETTER_BYTES_MAX = 900 * 1024  # beyond it without the log


class Intake:
    def __init__(self, config: Config, ports: Ports, runner: Runner) -> None:
        self.counts: dict[str, int] = {}
        self._bus: Bus = ports.bus
        self._wall_ns = ports.wall_ns
        self._runner = runner
        missing = Missing(config.jobs_model_wait_s)
        self._core = Holding(config.jobs_at_once_max, config.jobs_priority_best, missing)
        self._inbox: Inbox[Event] = Inbox(8 * config.jobs_at_once_max + 1024)
        self._runs: dict[int, asyncio.Task[None]] = {}
        self._calling = asyncio.Semaphore(CALLS_AT_ONCE_MAX)
        self._stopped = False
        self._turned = asyncio.Event()

    @property
    def idle(self) -> bool:
        """Nothing is held."""
        return not len(self._core)

    async def run(self) -> None:
        """Until cancelled."""
        await insist(lambda: self._bus.ensure_consumer(CONSUMER))
        async with asyncio.TaskGroup() as group:
            group.create_task(self._fetch(), name="jobs fetch")
            loop = asyncio.get_running_loop()
            tick_at = loop.time() + PROGRESS_INTERVAL_S
            while True:
                for event in await self._inbox.drain(tick_at):
                    self._perform(group, self._core.handle(event))
                if (now := loop.time()) >= tick_at:
                    self._perform(group, self._core.handle(Tick(now)))
                    tick_at = now + PROGRESS_INTERVAL_S
                self._turned.set()

    async def drain(self, wait_s: float) -> None:
        """Takes no more in, gives back what runs; answers that are being written have `wait_s`."""
        self._stopped = True
        self._put(LetGo(asyncio.get_running_loop().time()))
        try:
            async with asyncio.timeout(wait_s):
                while len(self._inbox) or len(self._core):
                    self._turned.clear()
                    await self._turned.wait()
        except TimeoutError:
            pass

    def check(self) -> None:
        """What holds between events."""
        self._core.check()

    def _put(self, event: Event) -> None:
        """Raises InboxFull, which its size rules out."""
        self._inbox.put_nowait(event)

    async def _fetch(self) -> None:
        while not self._stopped:
            room = self._core.room - len(self._inbox)
            if room <= 0:
                self._turned.clear()
                await self._turned.wait()
                continue
            try:
                found = await self._bus.fetch(CONSUMER.stream, CONSUMER.name, room, FETCH_WAIT_S)
            except BusError as error:
                log.debug("jobs not fetched", error=str(error))
                await asyncio.sleep(BACKOFF_S)
                continue
            for delivery in found:
                self._take(delivery)

    def _take(self, delivery: Delivery) -> None:
        if self._stopped:
            self._bus.nak(delivery.token)
            return
        message = delivery.message
        age_s = max(0.0, (self._wall_ns() - message.stored_at_ns) / 1e9)
        now = asyncio.get_running_loop().time()
        self._put(Delivered(now, message, delivery.token, delivery.count, age_s))

    # ---- effects -----------------------------------------------------------------------------------

    def _perform(self, group: asyncio.TaskGroup, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Ack(token):
                    self._settle(lambda t=token: self._bus.ack(t))  # type: ignore[misc]
                case Progress(token):
                    self._settle(lambda t=token: self._bus.progress(t))  # type: ignore[misc]
                case Nak(token, delay_s):
                    self._settle(lambda t=token, d=delay_s: self._bus.nak(t, d))  # type: ignore[misc]
                case Count(what):
                    self.counts[what] = self.counts.get(what, 0) + 1
                case Run(call):
                    self._runs[call] = group.create_task(self._run(effect), name="job")
                case Stop(call):
                    if (task := self._runs.get(call)) is not None:  # else its end waits to be heard
                        task.cancel()
                case _:
                    group.create_task(self._complete(effect), name=type(effect).__name__)

    def _settle(self, say: Callable[[], None]) -> None:
        try:
            say()
        except BusError as error:  # it will be delivered again, and its answer found
            log.debug("a job is not settled", error=str(error))

    async def _run(self, effect: Run) -> None:
        try:
            outcome = await self._runner.run(effect)
        finally:
            del self._runs[effect.call]
        self._put(Ended(asyncio.get_running_loop().time(), effect.call, outcome))

    async def _complete(self, effect: Look | Bury | WriteAnswer) -> None:
        async with self._calling:
            match effect:
                case Look():
                    event: Event = await self._look(effect)
                case Bury():
                    event = await self._bury(effect)
                case WriteAnswer():
                    event = await self._write(effect)
        self._put(event)

    async def _look(self, effect: Look) -> Looked:
        found = failed = False
        try:
            found = await self._bus.last(subjects.ANSWERS, effect.subject, CALL_TIMEOUT_S) is not None
        except BusError:
            failed = True
        return Looked(asyncio.get_running_loop().time(), effect.call, found, failed)

    async def _write(self, effect: WriteAnswer) -> Written:
        try:
            await self._bus.append(
                effect.subject,
                effect.data,
                expected_seq=0,
                headers=effect.headers,
                timeout_s=CALL_TIMEOUT_S,
            )
            outcome = Write.STORED
        except (WrongSequence, SubjectTaken):
            outcome = Write.TAKEN
        except MessageTooLarge:
            outcome = Write.TOO_LARGE
        except BusError as error:
            outcome = Write.UNKNOWN
            if not isinstance(error, BusTimeout):
                log.warning("an answer is not stored yet", error=str(error))
        return Written(asyncio.get_running_loop().time(), effect.call, outcome)

    async def _bury(self, effect: Bury) -> Buried:
        message, failed = effect.message, False
        try:
            log_subject = subjects.result(RequestId(effect.request_id))
            stored = await self._bus.read(subjects.RESULTS, log_subject, 1, LOG_LEN_MAX)
            records = [(s.stored_at_ns // 1_000_000, s.data) for s in stored]
            letter = Letter(
                message.subject,
                message.data,
                effect.request_id,
                effect.error,
                self._wall_ns() // 1_000_000,
                message.headers,
                tuple(records),
            )
            data = build_letter(letter)
            if len(data) > LETTER_BYTES_MAX:
                data = build_letter(replace(letter, log=()))
            await self._bus.append(letter_of(message.subject), data, expected_seq=0, timeout_s=CALL_TIMEOUT_S)
            log.error("a job is dead", subject=message.subject, request_id=effect.request_id)
        except (WrongSequence, SubjectTaken):
            pass  # before its gateway died, or another's
        except MessageTooLarge as error:
            log.error("a letter is too large", subject=message.subject, error=str(error))
        except BusError as error:
            log.warning("a letter is not stored yet", subject=message.subject, error=str(error))
            failed = True
        return Buried(asyncio.get_running_loop().time(), effect.call, failed)


def intake_of(front: Front, config: Config, ports: Ports) -> Intake | None:
    """None where this gateway takes no jobs in."""
    if not config.jobs_at_once_max:
        return None
    return Intake(config, ports, Runner(front, ports.bus, _by_openai(ports.wall_ns)))


def _by_openai(wall_ns: Callable[[], int]) -> Answerer:
    async def answer(
        front: Front, who: Caller, url: str, body: dict[str, Any], client_key: str
    ) -> tuple[int, dict[str, Any]]:
        from gateway.openai import answer as door  # the simulation has no such jobs

        return await door.answer(front, who, url, body, wall_ns() // 10**9, door.Terms(client_key=client_key))

    return answer
