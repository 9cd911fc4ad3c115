"""The client for asyncio: the same as the blocking one, for one event loop."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from chassis.wire import gateway_pb2 as pb
from shoal.client.calls import (
    CALL_TIMEOUT_S,
    HEALTH_CHECK,
    WHOLE_INTERVAL,
    reading_of,
    resumed,
)
from shoal.client.course import Course
from shoal.client.errors import NotFound
from shoal.client.events import Accepted, Event, Result, result_of
from shoal.client.lines import DEFAULT_ADDRESS, Lines, Tls, error_from
from shoal.client.params import Messages, Model, Params, Prompt
from shoal.client.retry import Retry, Tries
from shoal.client.wire import build_cancel, build_generate, build_resume, build_tokenize, model_of


class AsyncStream(AsyncIterator[Event]):
    """The events of one call. Leaving it, by `close`, the end of an `async with` or dropping it, cancels the
    request unless that has a resume window."""

    def __init__(self, course: Course, cancel: Callable[[str], Awaitable[None]], has_window: bool) -> None:
        self._course = course
        self._cancel = cancel
        self._has_window = has_window
        self._left = False
        self._cancelled = False

    @property
    def request_id(self) -> str:
        """Of the first choice; empty until it is accepted."""
        return self._course.reading.request_id

    def request_id_of(self, choice: int) -> str:
        return self._course.reading.request_id_of(choice)

    def output_ids(self, choice: int = 0) -> tuple[int, ...]:
        """Handed out so far: with the request id all that `resume` needs."""
        return self._course.reading.ids_of(choice)

    async def __anext__(self) -> Event:
        """Raises ShoalError."""
        course = self._course
        while not (course.reading.over or self._left):
            try:
                message = await course.call(time.monotonic()).read()
            except asyncio.CancelledError:
                if self._left:  # by `close`, from another task
                    break
                self.close()
                raise
            except grpc.aio.AioRpcError as error:
                if self._left:
                    break
                wait_s = course.lost(error_from(error), time.monotonic())
            else:
                if self._left:
                    break
                if message is not grpc.aio.EOF:
                    if (event := course.take(message)) is not None:
                        if self._cancelled and isinstance(event, Accepted):
                            await self.cancel()
                        return event
                    continue
                wait_s = course.ended(time.monotonic())
            if wait_s:
                await asyncio.sleep(wait_s)
        self.close()
        raise StopAsyncIteration

    async def cancel(self) -> None:
        """Asks for the end: the stream goes on to its Finished, `cancelled`. A call that is not accepted yet
        is given up. Raises ShoalError."""
        request_id = self.request_id
        self._cancelled = True
        if request_id:
            try:
                await self._cancel(request_id)
            except NotFound:
                pass  # it has ended long ago
        elif not self._has_window:
            self.close()

    def close(self) -> None:
        self._left = True
        self._course.leave()

    async def aclose(self) -> None:
        self.close()

    async def __aenter__(self) -> "AsyncStream":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_left"):
            self.close()


class AsyncClient:
    """Close it, or use it in an `async with`. Parameters as the blocking Client's."""

    def __init__(
        self,
        address: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        api_key: str = "",
        tls: Tls | bool = False,
        retry: Retry | None = Retry(),  # noqa: B008 - frozen
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._lines = Lines(address, api_key, tls, grpc.aio.insecure_channel, grpc.aio.secure_channel)
        self._retry = retry
        self._chance = chance

    @property
    def address(self) -> str:
        """Of the gateway that is asked now."""
        return self._lines.addresses[self._lines.now]

    def generate(
        self, prompt: Prompt, params: Params | None = None, *, timeout_s: float | None = None
    ) -> AsyncStream:
        """Accepted, deltas, Finished. `timeout_s`: for all of it. Raises ShoalError."""
        said = params or Params()
        return self._stream(build_generate(prompt, said), reading_of(said), timeout_s, said.resume_window_s)

    async def complete(
        self, prompt: Prompt, params: Params | None = None, *, timeout_s: float | None = None
    ) -> Result:
        """The whole answer. Raises ShoalError."""
        said = params or Params()
        if not said.stream_interval:
            said = replace(said, stream_interval=WHOLE_INTERVAL)
        async with self.generate(prompt, said, timeout_s=timeout_s) as stream:
            return result_of([event async for event in stream])

    def resume(
        self, request_id: str, output_ids: Sequence[int] = (), *, timeout_s: float | None = None
    ) -> AsyncStream:
        """What comes after the output ids already held; the choices of a call have ids of their own.
        Raises ShoalError."""
        build_resume(request_id, output_ids)  # says at once what cannot be sent
        return self._stream(None, resumed(request_id, output_ids), timeout_s, 1)

    async def cancel(self, request_id: str) -> None:
        """All choices, if it is the first's. Raises ShoalError."""
        await self._call("Cancel", build_cancel(request_id))

    async def models(self) -> list[Model]:
        reply = await self._call("ListModels", pb.ListModelsRequest())
        return [model_of(m) for m in reply.models]

    async def tokenize(self, text: str | Messages, model: str = "") -> list[int]:
        return list((await self._call("Tokenize", build_tokenize(text, model))).ids)

    async def serving(self) -> bool:
        """Whether the gateway that is asked now says that it is healthy. Raises ShoalError."""
        check = self._lines.channels[self._lines.now].unary_unary(
            HEALTH_CHECK,
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            reply = await check(health_pb2.HealthCheckRequest(), timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise error_from(error) from None
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        """What is under way ends, and what is asked later: with CANCELLED."""
        self._lines.closed = True
        for channel in self._lines.channels:
            await channel.close()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _stream(self, whole: Any, reading: Any, timeout_s: float | None, window_s: int) -> AsyncStream:
        course = Course(self._lines, whole, reading, self._retry, time.monotonic(), timeout_s, self._chance)
        stream = AsyncStream(course, self.cancel, window_s > 0)
        course.call(time.monotonic())  # it is on its way before it is read
        return stream

    async def _call(self, method: str, request: Any) -> Any:
        lines = self._lines
        tries = Tries(self._retry, len(lines), time.monotonic())
        while True:
            line = lines.now
            try:
                return await getattr(lines.stub(line), method)(
                    request, timeout=CALL_TIMEOUT_S, metadata=lines.metadata
                )
            except grpc.aio.AioRpcError as error:
                lines.failed(line)
                wait_s = tries.wait_s(error_from(error), time.monotonic(), self._chance())
            await asyncio.sleep(wait_s)
