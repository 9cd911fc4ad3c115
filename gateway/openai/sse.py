"""A stream of server-sent events: one write an event of the gateway.

Its head goes out with the first of them, so that what fails before has a status of its own.
"""

import asyncio

from starlette.types import Send

from chassis import log
from chassis.errors import Code, Status
from chassis.messages.gateway import GenerateEvent
from gateway.openai.answer import Answering
from gateway.openai.chunks import ChatChunks, TextChunks


class EventStream:
    """One answer on its way out."""

    def __init__(self, answering: Answering, send: Send) -> None:
        self._answering = answering
        self._send = send
        self._lock = asyncio.Lock()  # several prompts share it
        self._begun = False

    async def run(self) -> None:
        """Raises Status while nothing is sent yet."""
        answering = self._answering
        kind = ChatChunks if answering.asked.chat else TextChunks
        chunks = kind(answering.asked, answering.where, await answering.prepare())

        async def take(place: int, event: GenerateEvent) -> None:
            if data := chunks.take(place, event):
                if not self._begun:
                    await self._begin(chunks.request_id)
                await self._send({"type": "http.response.body", "body": data, "more_body": True})

        try:
            await answering.each_event(take)
            last = chunks.end()
        except Status as status:
            if not self._begun:
                raise
            last = chunks.failed(status)
        except Exception as error:
            if not self._begun:
                raise
            log.exception("stream failed", error)
            last = chunks.failed(Status(Code.INTERNAL, "gateway: internal error"))
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    async def _begin(self, request_id: str) -> None:
        async with self._lock:
            if self._begun:
                return
            self._begun = True
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
                (b"x-request-id", request_id.encode()),
            ]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
