"""A process that listens for links, says where, and sends back what it receives; or one that dials it.

`python -m tests.chassis.link_peer KINDS HOST`: kinds with commas; a frame `hold` is not released.
`python -m tests.chassis.link_peer KINDS dial ADDRESS`: says the kind, sends and hears, and says why it ended.
"""

import asyncio
import sys
import time
from typing import cast

from chassis import log
from chassis.errors import LinkClosed
from chassis.ids_source import id_source
from chassis.service import loop_factory
from chassis.transport.choice import ChosenTransport
from chassis.transport.interface import Link, LinkOptions
from chassis.transport.kinds import Kind, Links

OPTIONS = LinkOptions(slots=4, slot_bytes=32 << 20, send_timeout_s=0.5)


async def answer(link: Link) -> None:
    try:
        while True:
            frame = await link.receive()
            if frame.header != b"hold":
                await link.send(frame.header, frame.payload)
                frame.release()
    except LinkClosed:
        pass


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def ask(transport: ChosenTransport, address: str) -> None:
    payload = bytes(300_000)
    try:
        link = await transport.dial(address, b"hi", OPTIONS, timeout_s=5.0)
        say(link.kind)
        while True:
            await link.send(b"echo", payload)
            frame = await link.receive()
            assert frame.payload == payload
            frame.release()
    except LinkClosed as error:
        say(f"closed: {error}")
    await transport.close()


async def main(kinds: str, host: str, address: str = "") -> None:
    clock = asyncio.get_running_loop().time
    links = Links(kinds=tuple(cast(Kind, kind) for kind in kinds.split(",")))
    transport = ChosenTransport(links, id_source(time.time_ns), clock)
    if address:
        await ask(transport, address)
        return
    async with asyncio.TaskGroup() as group:

        def accept(link: Link) -> None:
            group.create_task(answer(link))

        say(await transport.listen(f"tcp://{host}:0", accept, OPTIONS))
        await asyncio.Event().wait()


if __name__ == "__main__":
    log.bind(level="off")
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(main(*sys.argv[1:]))
