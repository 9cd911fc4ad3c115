"""Links over NIXL to a process that dies, freezes or says nonsense: an end, never a hang or our death."""

import asyncio
import contextlib
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import cast

import pytest

from chassis.errors import LinkClosed
from chassis.ids_source import id_source
from chassis.service import loop_factory
from chassis.transport.choice import ChosenTransport
from chassis.transport.interface import Link
from chassis.transport.kinds import Kind, Links
from chassis.transport.nixl import NixlLinks, build_hello
from chassis.transport.nixl_agent import KINDS, AgentError, Lanes, NixlAgent, Region, why_not
from chassis.transport.nixl_wire import PREFIX, Place, Said, build_said
from chassis.transport.registered import MemoryRange
from tests.chassis.link_peer import OPTIONS

ROOT = Path(__file__).resolve().parent.parent.parent
WITHOUT = why_not(Lanes.TCP)
pytestmark = pytest.mark.skipif(WITHOUT is not None, reason=str(WITHOUT))
LANES = ["nixl+tcp", "nixl+shm"]
new_id = id_source(time.time_ns)


class Peer:
    def __init__(self, process: "subprocess.Popen[str]", address: str) -> None:
        self._process = process
        self.address = address

    def send(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def peer(kind: str) -> Iterator[Peer]:
    command = [sys.executable, "-m", "tests.chassis.link_peer", kind, "127.0.0.1"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield Peer(process, process.stdout.readline().strip())
        finally:
            process.kill()


class Node:
    """A dialling transport, and what it keeps of dead links."""

    def __init__(self, kind: str) -> None:
        clock = asyncio.get_running_loop().time
        self.nixl = NixlLinks(new_id, clock)
        self.transport = ChosenTransport(Links(kinds=(cast(Kind, kind),)), new_id, clock, nixl=self.nixl)

    async def dial(self, address: str) -> Link:
        return await self.transport.dial(address, b"hi", OPTIONS, timeout_s=5.0)


@asynccontextmanager
async def node(kind: str) -> AsyncIterator[Node]:
    made = Node(kind)
    try:
        yield made
    finally:
        await made.transport.close()
        await asyncio.sleep(0)


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(20):
            await body()

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(main())


async def echo(link: Link, payload: bytes) -> None:
    await link.send(b"echo", payload)
    frame = await link.receive()
    assert frame.header == b"echo" and frame.payload == payload
    frame.release()


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def gone(link: Link) -> None:
    with pytest.raises(LinkClosed):
        while True:
            (await link.receive()).release()
    with pytest.raises(LinkClosed):
        await link.send(b"late")


@pytest.mark.parametrize("kind", LANES)
def test_a_peer_is_killed_and_another_takes_its_place(kind: str) -> None:
    """Idle, in the midst of large writes, and twice: what is left goes on."""

    async def body() -> None:
        payload = random.Random(1).randbytes(8 << 20)
        async with node(kind) as here:
            for busy in (False, True):
                with peer(kind) as there:
                    link = await here.dial(there.address)
                    await echo(link, payload)
                    sending = asyncio.ensure_future(flood(link, b"echo", payload) if busy else gone(link))
                    for _ in range(5 if busy else 0):
                        (await link.receive()).release()
                    there.kill()
                    await sending
                    await gone(link)
            with peer(kind) as there:
                await echo(await here.dial(there.address), payload)

    run(body)


async def flood(link: Link, header: bytes, payload: bytes) -> None:
    with pytest.raises(LinkClosed):
        while True:
            await link.send(header, payload)


@pytest.mark.parametrize("kind", LANES)
def test_a_frozen_peer_is_given_up_and_what_it_may_write_into_is_kept(kind: str) -> None:
    async def body() -> None:
        async with node(kind) as here:
            with peer(kind) as there:
                link = await here.dial(there.address)
                await echo(link, bytes(1 << 20))
                there.send(signal.SIGSTOP)
                await flood(link, b"hold", bytes(1 << 20))
                await gone(link)
                await until(lambda: here.nixl.ended)
                assert bool(here.nixl.quarantined_bytes) == (kind == "nixl+shm")
                there.kill()
                assert not here.nixl.full and here.nixl.quarantined_bytes == 0

    run(body)


@pytest.mark.parametrize("kind", LANES)
def test_a_peer_that_closes_in_order_leaves_nothing_behind(kind: str) -> None:
    async def body() -> None:
        async with node(kind) as here:
            with peer(kind) as there:
                for _ in range(5):
                    link = await here.dial(there.address)
                    await echo(link, bytes(100_000))
                    link.close()
                    await gone(link)
                await until(lambda: here.nixl.ended and not here.nixl.quarantined_bytes)

    run(body)


def test_whatever_the_library_raises_is_an_agents_error() -> None:
    """Else it ends the poller's thread, and with it every link of the process."""
    agent = NixlAgent(new_id(), Lanes.TCP)
    tries: list[Callable[[], object]] = [
        lambda: agent.connect(b"metadata that is none"),
        lambda: agent.notify(b"to nobody"),
        lambda: agent.write(MemoryRange(Region(4096), 0, 4096), Place(4096, 4096), b"not registered"),
        lambda: agent.done(object()),
        lambda: agent.release(object()),
    ]
    for fails in tries:
        with pytest.raises(AgentError):
            fails()
    agent.close()


@pytest.mark.parametrize("kind", ["nixl+tcp", pytest.param("nixl+shm", marks=pytest.mark.slow)])
def test_strangers_on_the_control_connection_end_alone(kind: str) -> None:
    """They greet as NIXL links and then send garbage, half messages, offers that can't be, or nothing."""
    rng = random.Random(2)
    fixed = struct.pack("<QQQHHIhH", 1 << 20, 1, 0, 1, 4, 3, -1, 0)
    offer = fixed + struct.pack("<QQ", 4096, 4096) + b"namexyz"
    words = [
        rng.randbytes(100),
        PREFIX.pack(0x51B0, Said.OFFER, 1 << 21),
        PREFIX.pack(0x51B0, 99, 0),
        build_said(Said.OFFER, b"short"),
        build_said(Said.OFFER, offer),  # metadata that is none
        build_said(Said.OFFER, offer) * 2,
        build_said(Said.CREDIT, b"\0\0"),
        build_said(Said.GROW, bytes(16)),
        build_said(Said.GREW, bytes(40)),
        build_said(Said.READY),
        build_said(Said.LET_GO),
        build_said(Said.CLOSING, b"\xff"),
        build_said(Said.RING) * 5000,
        b"",
    ]

    async def body() -> None:
        async with node(kind) as here:
            with peer(kind) as there:
                link = await here.dial(there.address)
                for said in words:
                    stranger = await greet(there.address.partition("://")[2], kind)
                    stranger.sendall(said)
                    await asyncio.to_thread(drained, stranger)
                    stranger.close()
                await echo(link, b"fine" * 5000)
                await echo(await here.dial(there.address), b"fine")

    run(body)


async def greet(place: str, kind: str) -> socket.socket:
    host, _, port = place.rpartition(":")
    sock = socket.create_connection((host, int(port)))
    sock.settimeout(0.1)
    hello = struct.pack("<IQ", 4, 1 << 20) + build_hello(KINDS[kind], b"hi")
    sock.sendall(struct.pack("<HBBIQ", 0x51A0, 1, 0, len(hello), 0) + hello)
    await asyncio.to_thread(sock.recv, 28)
    return sock


def drained(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while sock.recv(1 << 16):
            pass
