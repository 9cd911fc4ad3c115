"""The client library with a short way for messages: in without its queues and tasks, out without its flusher.

Whoever waited finds the caches cold, so that each task a message passes through costs several times what it
does in a loop. The library keeps what is seldom: dialling, TLS, pings, subscriptions, coming back. Its
attributes that are used here are private: the version is pinned, and `tests/contract/test_bus.py` notices.
"""

import asyncio
from asyncio import StreamWriter
from typing import Any

from nats.aio.client import Client

from chassis.nats_wire import Deliver, MessageStream

UNSENT_BYTES_MAX = 1 << 20  # beyond it the library's own way, which waits for the kernel
TURN_BYTES_MAX = 1 << 16  # of a turn's messages, that leave together


class LeanClient(Client):
    def __init__(self, deliver: Deliver) -> None:
        super().__init__()
        self._deliver = deliver
        self._turn: list[bytes] = []
        self._turn_bytes = 0

    def write(self, data: bytes) -> bool:
        """Right behind what was written before. False: not now. A turn's writes leave together: uvloop sends
        each at once, which costs a call of the kernel and wakes the broker."""
        if self._pending_data_size or not self.is_connected or self._is_lost:
            self._send_turn()
            return False
        writer = self._transport._io_writer  # type: ignore[union-attr]
        assert writer is not None
        if writer.transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            self._send_turn()
            return False
        if not self._turn:
            asyncio.get_running_loop().call_soon(self._send_turn)
        self._turn.append(data)
        self._turn_bytes += len(data)
        if self._turn_bytes > TURN_BYTES_MAX:
            self._send_turn()
        return True

    def _send_turn(self) -> None:
        """Before anything that the library sends. Of a lost connection nothing is sent on the next one."""
        turn, self._turn, self._turn_bytes = self._turn, [], 0
        if turn and not self._is_lost:
            self._transport._io_writer.write(b"".join(turn))  # type: ignore[union-attr]

    @property
    def _is_lost(self) -> bool:
        """Though the library does not know it yet. What is written then asyncio drops; uvloop raises."""
        writer = self._transport._io_writer if self._transport else None  # type: ignore[attr-defined]
        return writer is None or bool(writer.transport.is_closing())

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        """What is pending stays so until the connection is back."""
        self._send_turn()
        if self._is_lost:
            done = asyncio.get_running_loop().create_future()
            done.set_result(None)
            return done
        return await super()._flush_pending(force_flush)

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        self._send_turn()
        if self._is_lost:
            self._pending.clear()
            self._pending_data_size = 0
        await super()._close(status, do_cbs)

    async def _read_loop(self) -> None:
        """Of one connection. The library reads what is no message."""
        reader = self._transport._io_reader  # type: ignore[union-attr]
        assert reader is not None
        _say_it_is_tls(self._transport._io_writer)  # type: ignore[union-attr]
        stream = MessageStream(self._deliver, reader.feed_data)
        early = bytes(reader._buffer)
        reader._buffer.clear()
        reader.feed_data = stream.feed
        if early:
            stream.feed(early)
        await super()._read_loop()


def _say_it_is_tls(writer: StreamWriter | None) -> None:
    """A connection that became TLS keeps a protocol that does not know, and asyncio complains at its end."""
    if writer is not None and writer.get_extra_info("ssl_object") is not None:
        writer.transport.get_protocol()._over_ssl = True  # type: ignore[attr-defined]
