"""A gateway for doors to stand before."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from chassis.errors import Code, Status
from chassis.messages.gateway import GenerateCall, GenerateEvent, ModelInfo
from chassis.trace import TraceContext
from gateway.access.caller import Caller


class FakeFront:
    """Plays what the test wrote down and notes what it was asked."""

    def __init__(self) -> None:
        self.ready = True
        self.events: list[GenerateEvent | Exception | asyncio.Event] = []
        self.calls: list[Any] = []
        self.left = asyncio.Event()

    def authenticate(self, token: str | None) -> Caller:
        if token == "wrong":
            raise Status(Code.UNAUTHENTICATED, "authorization: not a key of ours")
        return Caller(token or "t")

    async def _play(self) -> AsyncGenerator[GenerateEvent, None]:
        try:
            for event in self.events:
                if isinstance(event, asyncio.Event):
                    await event.wait()
                elif isinstance(event, Exception):
                    raise event
                else:
                    yield event
        finally:
            self.left.set()

    def generate(
        self, call: GenerateCall, caller: TraceContext | None = None
    ) -> AsyncGenerator[GenerateEvent, None]:
        self.calls.append((call, caller))
        return self._play()

    def resume(
        self,
        request_id: str,
        output_ids: tuple[int, ...],
        tenant: str = "",
        caller: TraceContext | None = None,
        key: str = "",
    ) -> AsyncGenerator[GenerateEvent, None]:
        self.calls.append((request_id, output_ids, tenant))
        return self._play()

    async def cancel(self, request_id: str, tenant: str = "") -> None:
        self.calls.append((request_id, tenant))
        if request_id == "gone":
            raise Status(Code.NOT_FOUND, "request_id: 'gone' is not known")

    async def tokenize(self, call: GenerateCall) -> tuple[int, ...]:
        self.calls.append(call)
        return (1, 2, 300)

    async def detokenize(self, call: GenerateCall) -> tuple[bytes, ...]:
        return tuple(f"<{i}>".encode() for i in call.token_ids or ())

    def list_models(self, who: Caller | None = None) -> list[ModelInfo]:
        return [ModelInfo("m", "d", 8, 9, True)]

    def may_use(self, who: Caller, model: str) -> bool:
        return True
