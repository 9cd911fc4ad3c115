"""One job through the doors: its line or call becomes a request under the job's own key, and what comes of it
an outcome. Nothing is decided here but what happened.

The JSON form stands on the door of OpenAI's protocol, and the front is told that a job calls: whatever that
door asks for is asked for under the job's key, as the batch class, within the job's time.
"""

import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from chassis import log
from chassis.bus import Bus
from chassis.errors import BusError, Code, Status
from chassis.ids import RequestId
from chassis.job_subjects import JobName
from chassis.messages.gateway import Finished, GenerateCall, GenerateEvent, ModelInfo
from chassis.messages.request import Reason, Terminal
from chassis.record_log import last_record
from chassis.trace import TraceContext
from gateway.access.caller import Caller
from gateway.admission import choice_id, request_id_of
from gateway.front import Front
from gateway.jobs.events import Failed, Ran, Run
from gateway.sampling import CHOICES_MAX, candidates_of

READ_TIMEOUT_S = 2.0
INTERVAL_LEN = 1024  # ids of a delta: nobody looks before the end
OK = 200

# the door of the JSON form: (front, who, url, body, client key) -> status code and body; raises nothing
Answerer = Callable[[Front, Caller, str, dict[str, Any], str], Awaitable[tuple[int, dict[str, Any]]]]


_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class Runner:
    def __init__(self, front: Front, bus: Bus, answer: Answerer) -> None:
        self._front = front
        self._bus = bus
        self._answer = answer

    async def run(self, effect: Run) -> Ran | Failed:
        """Never raises for what the job or the world does."""
        front = JobFront(self._front, effect)
        said: dict[str, Any] | None = None
        try:
            if effect.job.call is not None:
                call = replace(effect.job.call, client_key=front.key)
                events = [event async for event in front.generate(call)]
                ran = Ran(front.request_id, OK, None, tuple(events), tuple(front.reasons))
            else:
                body = dict(effect.job.body or {})
                who = Caller(effect.name.tenant)
                status, said = await self._answer(front, who, effect.job.url, body, front.key)
                ran = Ran(front.request_id, status, said, (), tuple(front.reasons))
            failure = front.failure
        except Status as status:
            failure = front.failure or status
        except Exception as error:  # what trips a door up must not stop one gateway after another
            log.exception("a job could not be run", error, request_id=front.request_id)
            failure = Status(Code.INTERNAL, "the job could not be run")
        if failure is None:
            return ran
        return await self._failed(front, failure, said)

    async def _failed(self, front: "JobFront", status: Status, said: dict[str, Any] | None) -> Failed:
        """With the end of the log, where that tells more than the status."""
        code, terminal = status.code, None
        if code in (Code.UNAVAILABLE, Code.INTERNAL):
            try:
                terminal = await self._end_of(front)
            except BusError:
                code = Code.UNAVAILABLE  # not known how it failed: it is looked at again
        request_id = front.request_id
        return Failed(request_id, code, status.message, status.retry_ms, terminal, said)

    async def _end_of(self, front: "JobFront") -> Terminal | None:
        """Of the first of its requests that was refused or failed. Raises BusError."""
        for request_id in front.request_ids:
            record, _ = await last_record(self._bus, request_id, READ_TIMEOUT_S)
            if isinstance(record, Terminal) and record.reason in (Reason.REFUSED, Reason.FAILED):
                return record
        return None


class JobFront:
    """The front, as it is for one job: whatever key a call has begins with the job's own."""

    def __init__(self, front: Front, run: Run) -> None:
        self.failure: Status | None = None  # the first
        self.reasons: list[Reason] = []
        self.request_ids: list[RequestId] = []  # of all choices that may have been asked for
        self._front = front
        self._run = run
        self._caller = trace_context(run.trace_parent)

    @property
    def key(self) -> str:
        """The same at every gateway; of what a queue refused another one."""
        return key_after(self._run.name, self._run.refusals)

    @property
    def request_id(self) -> RequestId:
        return request_id_of(self._run.name.tenant, self.key)

    @property
    def ready(self) -> bool:
        return self._front.ready

    def authenticate(self, token: str | None) -> Caller:
        return Caller(self._run.name.tenant)

    def generate(
        self, call: GenerateCall, caller: TraceContext | None = None
    ) -> AsyncGenerator[GenerateEvent, None]:
        run = self._run
        assert call.client_key.startswith(self.key)
        first = request_id_of(run.name.tenant, call.client_key)
        asked = replace(
            call,
            tenant=run.name.tenant,
            key=run.key,
            priority=run.priority,
            time_left_ms=run.time_left_ms,
            resume_window_s=0,
            stream_interval=max(call.stream_interval, INTERVAL_LEN),
            job=True,
        )
        return self._told(asked, first)

    async def _told(self, call: GenerateCall, first: RequestId) -> AsyncGenerator[GenerateEvent, None]:
        self.request_ids.append(first)
        try:
            choices = min(candidates_of(call), CHOICES_MAX)
            self.request_ids += [choice_id(first, i) for i in range(1, choices)]
            async with aclosing(self._front.generate(call, self._caller)) as events:
                async for event in events:
                    if isinstance(event, Finished):
                        self.reasons.append(event.reason)
                    yield event
        except Status as status:
            self.failure = self.failure or status
            raise

    def resume(
        self,
        request_id: str,
        output_ids: tuple[int, ...],
        tenant: str = "",
        caller: TraceContext | None = None,
        key: str = "",
    ) -> AsyncGenerator[GenerateEvent, None]:
        return self._front.resume(request_id, output_ids, tenant, caller, key)

    async def cancel(self, request_id: str, tenant: str = "") -> None:
        await self._front.cancel(request_id, tenant)

    async def tokenize(self, call: GenerateCall) -> tuple[int, ...]:
        return await self._front.tokenize(call)

    async def detokenize(self, call: GenerateCall) -> tuple[bytes, ...]:
        return await self._front.detokenize(call)

    def list_models(self, who: Caller | None = None) -> list[ModelInfo]:
        return self._front.list_models(who)

    def may_use(self, who: Caller, model: str) -> bool:
        return self._front.may_use(who, model)


def key_after(name: JobName, refusals: int) -> str:
    """Of the request that is made of a job once so many of it were refused by a queue."""
    return f"{name.client_key}~{refusals}" if refusals else name.client_key


def trace_context(text: str) -> TraceContext | None:
    """Of a `traceparent`, if it is one."""
    found = _TRACEPARENT.fullmatch(text)
    if not found:
        return None
    flags = int(found[3], 16) & 1
    return TraceContext.decode(bytes.fromhex(found[1] + found[2]) + bytes([flags]))
