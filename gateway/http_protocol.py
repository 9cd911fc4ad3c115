"""One HTTP connection, with the bounds that uvicorn leaves open.

How many connections there are, how large a head is and how long it takes, how long one may say nothing.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.http_presence import PRESENCE, Presence

PIPELINE_LEN_MAX = 16  # requests that wait for the answer before theirs
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-type: application/json\r\ncontent-length: 121\r\n\r\n"
    b'{"error":{"message":"gateway: too many connections","type":"service_unavailable_error",'
    b'"param":null,"code":"overloaded"}}'
)
_HEAD_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
)


class HttpProtocol(HttpToolsProtocol):
    connections_max: int
    head_bytes_max: int
    head_timeout_s: float  # from a request's first byte to the end of its headers

    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _answering: Any = None  # the request that is under way; uvicorn's `cycle` may be one behind it
    _presence: Presence | None = None  # of who sent that

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.connections_max:
            transport.write(_FULL)
            transport.close()
            return
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        if (answering := self._answering) is not None and not answering.response_complete:
            answering.disconnected = True
            answering.message_event.set()
            if self._presence is not None:
                self._presence.leave()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._answering = cycle
        self._presence = cycle.scope[PRESENCE] = Presence()
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        """What begins no request (an empty line, a body that is not wanted any more) is no sign of one: who
        sends that goes when it would have gone."""
        if self.parser is None or self.transport.is_closing():
            return
        waiting = self.timeout_keep_alive_task
        super().data_received(data)
        if waiting is not None and self._idle:
            due = waiting.when()
            self.timeout_keep_alive_task = self.loop.call_at(due, self.timeout_keep_alive_handler)

    @property
    def _idle(self) -> bool:
        answered = self.cycle is None or self.cycle.response_complete
        return answered and self._head_timer is None and self.timeout_keep_alive_task is None

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(self.head_timeout_s, self.timeout_keep_alive_handler)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_head_timer()
        super().on_headers_complete()
        if len(self.pipeline) > PIPELINE_LEN_MAX:
            raise ValueError("too many requests wait")  # the parser stops
        if self.pipeline:
            self.flow.resume_reading()  # who reads nothing does not see the client leave

    def send_400_response(self, msg: str) -> None:
        if self._answering is not None and not self._answering.response_complete:
            self.transport.close()  # a word in the midst of an answer would be taken for a part of it
        elif self._head_bytes > self.head_bytes_max:
            self.transport.write(_HEAD_TOO_LARGE)
            self.transport.close()
        else:
            super().send_400_response(msg)

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self.head_bytes_max:
            raise ValueError("head too large")  # the parser stops, and says so

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def protocol_class(connections_max: int, head_bytes_max: int, head_timeout_s: float) -> type[HttpProtocol]:
    """uvicorn makes a protocol for each connection and gives it none of this."""
    bounds = {
        "connections_max": connections_max,
        "head_bytes_max": head_bytes_max,
        "head_timeout_s": head_timeout_s,
    }
    return type("BoundedHttpProtocol", (HttpProtocol,), bounds)
