"""The short way out is closed once the connection is lost; the library then holds what is sent."""

import asyncio
import socket

import pytest

from chassis.nats_client import LeanClient
from chassis.service import loop_factory


class _Wire:
    """What the library keeps of a connection."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._io_writer = writer

    def close(self) -> None:
        self._io_writer.close()

    async def wait_closed(self) -> None:
        pass


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, loop_factory()])
def test_nothing_is_written_once_the_other_side_is_gone(factory: object) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        client = LeanClient(lambda number, message: None)
        client._status = client.CONNECTED
        client._transport = _Wire(writer)  # type: ignore[assignment]
        assert client.write(b"PING\r\n") and client.write(b"PONG\r\n")
        await asyncio.sleep(0)  # a turn's writes leave at its end, together
        assert theirs.recv(32) == b"PING\r\nPONG\r\n"
        theirs.close()
        await reader.read()
        writer.transport.abort()
        assert not client.write(b"PING\r\n")
        await asyncio.sleep(0)  # uvloop refuses to write by now, with an error
        assert not client.write(b"PING\r\n")
        client._pending, client._pending_data_size = [b"PING\r\n"], 6
        client._flush_queue = asyncio.Queue()
        await client._flush_pending()  # without a flusher the library writes at once
        assert client._pending_data_size == 6
        client._current_server = object()  # type: ignore[assignment]
        await client._close(client.CLOSED, do_cbs=False)
        assert client._pending_data_size == 0

    with asyncio.Runner(loop_factory=factory) as runner:  # type: ignore[arg-type]
        runner.run(main())
