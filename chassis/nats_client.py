"""The client library with a short way for messages: in without its queues and tasks, out without its flusher.

Whoever waited finds the caches cold, so that each task a message passes through costs several times what it
does in a loop. The library keeps what is seldom: dialling, TLS, pings, subscriptions, coming back. Its
attributes that are used here are private: the version is pinned, and `tests/contract/test_bus.py` notices.
"""

from nats.aio.client import Client

from chassis.nats_wire import Deliver, MessageStream

UNSENT_BYTES_MAX = 1 << 20  # beyond it the library's own way, which waits for the kernel


class LeanClient(Client):
    def __init__(self, deliver: Deliver) -> None:
        super().__init__()
        self._deliver = deliver

    def write(self, data: bytes) -> bool:
        """Right behind what was written before; a turn's writes leave together. False: not now."""
        if self._pending_data_size or not self.is_connected:
            return False
        writer = self._transport._io_writer  # type: ignore[union-attr]
        if writer is None or writer.transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            return False
        writer.write(data)
        return True

    async def _read_loop(self) -> None:
        """Of one connection. The library reads what is no message."""
        reader = self._transport._io_reader  # type: ignore[union-attr]
        assert reader is not None
        stream = MessageStream(self._deliver, reader.feed_data)
        early = bytes(reader._buffer)
        reader._buffer.clear()
        reader.feed_data = stream.feed
        if early:
            stream.feed(early)
        await super()._read_loop()
