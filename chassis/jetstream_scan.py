"""Reading much of a stream at once: a short-lived consumer without acknowledgements, asked in batches.

It begins at a time and ends with what was there when it began. A gap is an error, never skipped.
"""

import asyncio
from collections.abc import AsyncGenerator

from chassis import jetstream as js
from chassis.bus import Message, Stored
from chassis.errors import BusTimeout, BusUnavailable
from chassis.jetstream_client import JetStream, Wire

BATCH_LEN = 1000
TIMEOUT_S = 10.0  # for one batch


class _Batch:
    """What came of one request."""

    def __init__(self) -> None:
        self.wanted = 0
        self.messages: list[Message] = []
        self.whole = asyncio.Event()
        self.status = ""

    def ask(self, wanted: int) -> None:
        self.wanted, self.messages, self.status = wanted, [], ""
        self.whole.clear()

    def on_message(self, message: Message) -> None:
        if message.reply is None or not message.reply.startswith("$JS.ACK."):
            self.status = message.headers.get("Status", "no answer")
            if self.status != "100":  # a heartbeat
                self.whole.set()
            return
        self.messages.append(message)
        if len(self.messages) == self.wanted:
            self.whole.set()


async def scan(
    wire: Wire, jetstream: JetStream, stream: str, subject: str, since_ns: int
) -> AsyncGenerator[Stored, None]:
    """Raises BusError."""
    batch, inbox = _Batch(), wire.new_inbox()
    name = "r-" + inbox.rpartition(".")[2]
    listener = await wire.listen(inbox, batch.on_message)
    try:
        config = js.scan_config(name, subject, since_ns)
        answer = await jetstream.api(
            f"CONSUMER.CREATE.{stream}.{name}", {"stream_name": stream, "config": config}
        )
        if isinstance(answer, js.Refused):
            raise js.refusal(subject, answer)
        left, serial = int(answer["num_pending"]), 0
        while left > 0:
            batch.ask(min(BATCH_LEN, left))
            request = {"batch": batch.wanted, "expires": round(TIMEOUT_S * 1e9)}
            wire.send(f"{js.API}.CONSUMER.MSG.NEXT.{stream}.{name}", js.encode(request), inbox)
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await batch.whole.wait()
            except TimeoutError:
                raise BusTimeout(f"reading {stream}") from None
            for message in batch.messages:
                parts = js.parse_token(message.reply or "")
                if parts is None or parts.serial != serial + 1:
                    raise BusUnavailable(f"reading {stream}: a gap")
                serial, left = parts.serial, min(left - 1, parts.pending)
                yield Stored(message.subject, message.data, parts.seq, parts.stored_at_ns, message.headers)
            if len(batch.messages) < batch.wanted and left > 0:
                raise BusUnavailable(f"reading {stream}: {batch.status}")
        wire.send(f"{js.API}.CONSUMER.DELETE.{stream}.{name}", b"")
    finally:
        await listener.close()
