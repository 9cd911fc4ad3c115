"""The TCP connection beside a NIXL link: agents' metadata, freed slots, rings, and the news of a dead peer.

It is a socket link that has greeted (`socket_link.py`: strangers, limits, keepalive) and goes on under this
protocol. What does not fit the format closes it.
"""

import asyncio
from collections.abc import Callable
from typing import cast

from chassis.transport.nixl_wire import PREFIX, BadWire, Said, build_said, parse_prefix

_STAGING_BYTES = 64 << 10


class Control(asyncio.BufferedProtocol):
    """`heard` gets each message; `lost` the reason, once, unless it was closed here."""

    def __init__(self, heard: Callable[[Said, bytes], None], lost: Callable[[str], None]) -> None:
        self._heard = heard
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        self._staging = memoryview(bytearray(_STAGING_BYTES))
        self._data = bytearray()

    def take(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def say(self, kind: Said, body: bytes = b"") -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(build_said(kind, body))

    def close(self) -> None:
        """What was said before is still sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def forget(self) -> None:
        """Who made it: the connection is gone, and nothing more is heard."""
        self._heard, self._lost = _hear_nothing, _lose_nothing

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._lost("connection lost" if error is None else f"connection lost: {error}")

    def eof_received(self) -> bool:
        return False

    def get_buffer(self, size_hint: int) -> memoryview:
        return self._staging

    def buffer_updated(self, count: int) -> None:
        self._data += self._staging[:count]
        try:
            while len(self._data) >= PREFIX.size:
                kind, body_len = parse_prefix(self._data)
                end = PREFIX.size + body_len
                if len(self._data) < end:
                    return
                body = bytes(self._data[PREFIX.size : end])
                del self._data[:end]
                self._heard(kind, body)
        except BadWire as error:
            self._lost(f"not our format: {error}")
            self.abort()


def _hear_nothing(kind: Said, body: bytes) -> None:
    pass


def _lose_nothing(why: str) -> None:
    pass
