"""One contract for every transport: memory, TCP and unix sockets, NIXL over UCX's TCP and shared memory.

On asyncio and on uvloop. RDMA needs hardware, and takes the same code as NIXL's others.
"""

import asyncio
import gc
import random
import socket
import struct
import tempfile
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar, cast

import pytest
import uvloop

from chassis.errors import LinkClosed
from chassis.ids_source import id_source
from chassis.transport.choice import ChosenTransport
from chassis.transport.interface import HEADER_BYTES_MAX, Frame, Link, LinkOptions, Transport
from chassis.transport.kinds import Kind, Links
from chassis.transport.memory import MemoryNetwork
from chassis.transport.nixl_agent import Lanes, why_not
from chassis.transport.tcp import SocketTransport

T = TypeVar("T")
SOCKETS = ["tcp", "unix", "tcp-uvloop", "unix-uvloop"]
WITHOUT_NIXL = why_not(Lanes.TCP)  # the extra `rdma`
NIXL = [
    pytest.param(name, marks=pytest.mark.skipif(WITHOUT_NIXL is not None, reason=str(WITHOUT_NIXL)))
    for name in ("nixl+tcp", "nixl+shm", "nixl+tcp-uvloop", "nixl+shm-uvloop")
]
BACKENDS = ["memory", *SOCKETS, *NIXL]
new_id = id_source(time.time_ns)
OPTIONS = LinkOptions(slots=3, slot_bytes=1 << 20, send_timeout_s=2.0)


@dataclass
class Pair:
    """Two nodes; node b listens."""

    a: Transport
    b: Transport
    address: str
    accepted: "asyncio.Queue[Link]" = field(default_factory=asyncio.Queue)

    async def links(self, hello: bytes = b"hi", options: LinkOptions = OPTIONS) -> tuple[Link, Link]:
        near = await self.a.dial(self.address, hello, options)
        return near, await soon(self.accepted.get())


async def soon(awaitable: Awaitable[T]) -> T:
    async with asyncio.timeout(5):
        return await awaitable


@asynccontextmanager
async def pair(backend: str, options: LinkOptions = OPTIONS) -> AsyncIterator[Pair]:
    accepted: asyncio.Queue[Link] = asyncio.Queue()
    with tempfile.TemporaryDirectory() as folder:
        a: Transport
        b: Transport
        if backend == "memory":
            network = MemoryNetwork(delay_s=lambda source, target: 0.001)
            a, b, address = network.transport("a"), network.transport("b"), "mem://b"
        elif backend.startswith("nixl"):
            links = Links(kinds=(cast(Kind, backend.partition("-")[0]),))
            a, b = (ChosenTransport(links, new_id, asyncio.get_running_loop().time) for _ in range(2))
            address = "tcp://127.0.0.1:0"
        else:
            a, b = SocketTransport(), SocketTransport()
            address = f"unix://{folder}/s" if backend.startswith("unix") else "tcp://127.0.0.1:0"
        address = await b.listen(address, accepted.put_nowait, options)
        try:
            yield Pair(a, b, address, accepted)
        finally:
            await a.close()
            await b.close()
            await asyncio.sleep(0)


def run(backend: str, body: Callable[[Pair], Awaitable[None]], options: LinkOptions = OPTIONS) -> None:
    async def main() -> None:
        async with pair(backend, options) as nodes:
            await body(nodes)

    loop_factory = uvloop.new_event_loop if backend.endswith("uvloop") else None
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


async def receive(link: Link) -> tuple[bytes, bytes]:
    frame = await soon(link.receive())
    data = frame.header, bytes(frame.payload)
    frame.release()
    return data


async def gone(link: Link) -> None:
    with pytest.raises(LinkClosed):
        while True:
            (await soon(link.receive())).release()
    with pytest.raises(LinkClosed):
        await soon(link.send(b"h", b"p"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_hello_and_both_directions(backend: str) -> None:
    async def body(nodes: Pair) -> None:
        near, far = await nodes.links(b"\x00hello")
        assert far.hello == b"\x00hello" and near.hello == b"\x00hello"
        assert near.kind == far.kind == backend.partition("-")[0]
        await near.send(b"h1", b"p1")
        await far.send(b"h2", b"p2")
        assert await receive(far) == (b"h1", b"p1")
        assert await receive(near) == (b"h2", b"p2")

    run(backend, body)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_needs_no_waiting_is_sent_now(backend: str) -> None:
    async def body(nodes: Pair) -> None:
        near, far = await nodes.links()
        assert [near.send_now(b"%d" % i, b"p") for i in range(4)] == [True] * 3 + [False], "three slots"
        frames = [await soon(far.receive()) for _ in range(3)]
        assert [(f.header, bytes(f.payload)) for f in frames] == [(b"%d" % i, b"p") for i in range(3)]
        waiting = asyncio.ensure_future(near.send(b"3"))
        for frame in frames:
            frame.release()
        await soon(waiting)
        assert await receive(far) == (b"3", b"")
        with pytest.raises(ValueError):
            near.send_now(b"", bytes((1 << 20) + 1))
        near.close()
        with pytest.raises(LinkClosed):
            near.send_now(b"late")

    run(backend, body)


@pytest.mark.parametrize("backend", SOCKETS)
def test_large_payloads_wait_for_the_kernel(backend: str) -> None:
    async def body(nodes: Pair) -> None:
        near, far = await nodes.links()
        assert not near.send_now(b"h", bytes(1 << 16))
        assert near.send_now(b"h", b"small")
        assert await receive(far) == (b"h", b"small"), "nothing of the large one was written"

    run(backend, body)


@pytest.mark.parametrize("backend", BACKENDS)
def test_order_and_sizes(backend: str) -> None:
    """Empty, tiny, around every inner limit, and the largest; each once, in order, untouched."""
    rng = random.Random(1)
    sizes = [0, 1, 0, 16367, 16368, 16369, 32767, 32768, 32769, 65536, 1 << 20, 3, 1 << 20, 0]
    sizes += [rng.randrange(1 << 18) for _ in range(30)]
    headers = [rng.randbytes(rng.choice([0, 1, 100, 5000, 40000])) for _ in sizes]
    payloads = [rng.randbytes(size) for size in sizes]

    async def body(nodes: Pair) -> None:
        near, far = await nodes.links()

        async def send() -> None:
            scratch = bytearray(1 << 20)
            for header, payload in zip(headers, payloads, strict=True):
                scratch[: len(payload)] = payload
                view = memoryview(scratch)[: len(payload)]
                await near.send(header, view)
                scratch[:] = bytes(len(scratch))  # the payload is ours again

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(send())
            for header, payload in zip(headers, payloads, strict=True):
                got_header, got_payload = await receive(far)
                assert got_header == header and got_payload == payload

    run(backend, body)


@pytest.mark.parametrize("backend", BACKENDS)
def test_credits_bound_what_is_in_flight(backend: str) -> None:
    async def body(nodes: Pair) -> None:
        near, far = await nodes.links()
        for i in range(3):
            await soon(near.send(bytes([i])))
        blocked = asyncio.ensure_future(near.send(b"\x03"))
        frames = [await soon(far.receive()) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert not blocked.done()  # received, not released
        assert [f.header for f in frames] == [b"\0", b"\1", b"\2"]
        frames[1].release()
        frames[1].release()  # twice is once
        await soon(blocked)
        again = asyncio.ensure_future(near.send(b"\x04"))
        await asyncio.sleep(0.05)
        assert not again.done()
        assert (await soon(far.receive())).header == b"\3"
        frames[0].release()
        await soon(again)
        assert (await soon(far.receive())).header == b"\4"

    run(backend, body)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_slot_is_not_reused_before_release(backend: str) -> None:
    async def body(nodes: Pair) -> None:
        near, far = await nodes.links()
        held: list[Frame] = []
        for i in range(2):
            await near.send(b"held", bytes([i]) * 1000)
            held.append(await soon(far.receive()))
        for i in range(20):
            await near.send(b"", bytes([100 + i]) * 1000)
            await receive(far)
        for i, frame in enumerate(held):
            assert bytes(frame.payload) == bytes([i]) * 1000

    run(backend, body)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_credit_in_time_closes(backend: str) -> None:
    options = LinkOptions(slots=1, send_timeout_s=0.1)

    async def body(nodes: Pair) -> None:
        near, far = await nodes.links(options=options)
        await near.send(b"1")
        with pytest.raises(LinkClosed):
            await soon(near.send(b"2"))
        await gone(near)
        await gone(far)

    run(backend, body, options)


@pytest.mark.parametrize("backend", SOCKETS)
def test_a_peer_that_takes_no_bytes_closes(backend: str) -> None:
    """It greets and then never reads: the kernel's buffers fill in the middle of a frame."""
    options = LinkOptions(slots=2, slot_bytes=32 << 20, send_timeout_s=0.2)

    async def body(nodes: Pair) -> None:
        sock = await connect(nodes.address)
        sock.sendall(prefix(1, 12) + struct.pack("<IQ", 2, 32 << 20))
        far = await soon(nodes.accepted.get())
        with pytest.raises(LinkClosed):
            await soon(far.send(b"h", bytes(32 << 20)))
        await gone(far)
        sock.close()

    run(backend, body, options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_oversize_payload_is_refused_and_the_link_stays(backend: str) -> None:
    async def body(nodes: Pair) -> None:
        near, far = await nodes.links()
        with pytest.raises(ValueError):
            await near.send(b"h", bytes(OPTIONS.slot_bytes + 1))
        with pytest.raises(ValueError):
            await near.send(bytes(HEADER_BYTES_MAX + 1))
        await near.send(b"still", b"here")
        assert await receive(far) == (b"still", b"here")

    run(backend, body)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("closer", ["near", "far"])
@pytest.mark.parametrize("state", ["idle", "receiving", "blocked in send", "unread frames"])
def test_close_from_either_side_in_any_state(backend: str, closer: str, state: str) -> None:
    async def body(nodes: Pair) -> None:
        near, far = await nodes.links()
        pending: list[asyncio.Future[object]] = []
        match state:
            case "receiving":
                pending = [asyncio.ensure_future(near.receive()), asyncio.ensure_future(far.receive())]
            case "blocked in send":
                for link in (near, far):
                    for _ in range(3):
                        await link.send(b"x", b"y")
                    pending.append(asyncio.ensure_future(link.send(b"x", b"y")))
            case "unread frames":
                await near.send(b"x", b"y")
                await far.send(b"x", b"y")
        await asyncio.sleep(0.01)
        (near if closer == "near" else far).close()
        for future in pending:
            with pytest.raises(LinkClosed):
                await soon(future)
        await gone(near)
        await gone(far)
        near.close()
        far.close()

    run(backend, body)


@pytest.mark.parametrize("backend", BACKENDS)
def test_release_after_close_is_harmless(backend: str) -> None:
    async def body(nodes: Pair) -> None:
        near, far = await nodes.links()
        await near.send(b"x", b"y")
        frame = await soon(far.receive())
        near.close()
        await gone(far)
        assert bytes(frame.payload) == b"y"
        frame.release()

    run(backend, body)


@contextmanager
def uncollected() -> Iterator[None]:
    """As in a service, where what outlives the first collections is practically never looked at again."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_a_closed_link_takes_its_memory_along(backend: str) -> None:
    """Its slots may hold hundreds of megabytes, and each epoch that is lost closes some."""

    async def body(nodes: Pair) -> None:
        near, far = await nodes.links()
        for _ in range(3):
            await near.send(b"h", bytes(500_000))
            await far.send(b"h", bytes(500_000))
            await receive(near)
            await receive(far)
        ends = [weakref.ref(near), weakref.ref(far)]
        near.close()
        await gone(far)
        far.close()
        del near, far
        async with asyncio.timeout(5):
            while any(end() is not None for end in ends):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    with uncollected():
        run(backend, body)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cancelled_receive_loses_nothing(backend: str) -> None:
    async def body(nodes: Pair) -> None:
        near, far = await nodes.links()
        first = asyncio.ensure_future(far.receive())
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await near.send(b"kept")
        assert (await receive(far))[0] == b"kept"

    run(backend, body)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cancelled_wait_for_credit_takes_none(backend: str) -> None:
    async def body(nodes: Pair) -> None:
        near, far = await nodes.links()
        for _ in range(3):
            await near.send(b"x")
        blocked = asyncio.ensure_future(near.send(b"never"))
        await asyncio.sleep(0.01)
        blocked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await blocked
        for _ in range(3):
            assert (await receive(far))[0] == b"x"
        for i in range(3):
            await soon(near.send(bytes([i])))
        for i in range(3):
            assert (await receive(far))[0] == bytes([i])

    run(backend, body)


@pytest.mark.parametrize("backend", BACKENDS)
def test_closing_a_transport_closes_its_links(backend: str) -> None:
    async def body(nodes: Pair) -> None:
        near, far = await nodes.links()
        await nodes.b.close()
        await gone(far)
        await gone(near)
        with pytest.raises(LinkClosed):
            await nodes.a.dial(nodes.address, b"", OPTIONS, timeout_s=0.5)
        await nodes.a.close()
        with pytest.raises(LinkClosed):
            await nodes.a.dial(nodes.address, b"", OPTIONS, timeout_s=0.5)

    run(backend, body)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nobody_listens(backend: str) -> None:
    async def body(nodes: Pair) -> None:
        missing = {
            "memory": "mem://nobody",
            "tcp": "tcp://127.0.0.1:9",
            "unix": "unix:///nowhere/s",
            "nixl+tcp": "nixl+tcp://127.0.0.1:9",
            "nixl+shm": "nixl+shm://127.0.0.1:9",
        }[backend.partition("-")[0]]
        with pytest.raises(LinkClosed):
            await soon(nodes.a.dial(missing, b"", OPTIONS, timeout_s=0.5))

    run(backend, body)


# ---- sockets: what strangers and the dying do ------------------------------------------------------


def prefix(kind: int, header_len: int, payload_len: int = 0, magic: int = 0x51A0) -> bytes:
    return struct.pack("<HBBIQ", magic, kind, 0, header_len, payload_len)


HELLO = prefix(1, 14) + struct.pack("<IQ", 3, 1 << 20) + b"yo"


async def connect(address: str) -> socket.socket:
    if address.startswith("unix://"):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address.removeprefix("unix://"))
    else:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        sock = socket.create_connection((host, int(port)))
    return sock


@pytest.mark.parametrize("backend", SOCKETS)
@pytest.mark.parametrize(
    "tail",
    [
        b"",
        prefix(3, 0)[:7],
        prefix(3, 10) + b"half",
        prefix(3, 2, 100) + b"hh" + b"p" * 50,
        prefix(3, 2, 1 << 20) + b"hh" + b"p" * 70000,
    ],
)
def test_a_peer_vanishes_within_a_frame(backend: str, tail: bytes) -> None:
    async def body(nodes: Pair) -> None:
        sock = await connect(nodes.address)
        sock.sendall(HELLO + tail)
        far = await soon(nodes.accepted.get())
        assert far.hello == b"yo"
        pending = asyncio.ensure_future(far.receive())
        await asyncio.sleep(0.01)
        sock.close()
        with pytest.raises(LinkClosed):
            await soon(pending)
        await gone(far)

    run(backend, body)


@pytest.mark.parametrize("backend", SOCKETS)
@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        bytes(64),
        bytes(range(256)) * 200,
        prefix(3, 0),  # a frame before hello
        prefix(1, 3) + b"abc",  # no offer
        prefix(1, 12) + struct.pack("<IQ", 0, 10),  # no slots
        prefix(1, 12) + struct.pack("<IQ", 1 << 31, 10),
        prefix(2, 12) + struct.pack("<IQ", 3, 10),  # a welcome from the dialling end
        prefix(1, 0xFFFFFFFF),
    ],
)
def test_garbage_kills_nothing(backend: str, garbage: bytes) -> None:
    async def body(nodes: Pair) -> None:
        near, far = await nodes.links()
        sock = await connect(nodes.address)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_sendall(sock, garbage)
        with pytest.raises(ConnectionError):
            if await soon(asyncio.get_running_loop().sock_recv(sock, 100)) == b"":
                raise ConnectionResetError
        sock.close()
        await near.send(b"fine")
        assert (await receive(far))[0] == b"fine"
        assert nodes.accepted.empty()

    run(backend, body)


@pytest.mark.parametrize("backend", SOCKETS)
@pytest.mark.parametrize(
    "tail",
    [
        HELLO,  # greeted twice
        prefix(3, 0, (1 << 20) + 1),  # larger than a slot
        prefix(3, HEADER_BYTES_MAX + 1),
        prefix(4, 0, 5),  # a credit with a payload
        prefix(4, 0) * 2000,  # credits from nowhere
        prefix(3, 0) * 4,  # more frames than slots
        prefix(3, 0, magic=0x51A1),
        prefix(9, 0),
    ],
)
def test_breaking_the_rules_closes_that_link(backend: str, tail: bytes) -> None:
    async def body(nodes: Pair) -> None:
        sock = await connect(nodes.address)
        sock.sendall(HELLO)
        far = await soon(nodes.accepted.get())
        sock.sendall(tail)
        frames = []
        with pytest.raises(LinkClosed):
            while True:
                frames.append(await soon(far.receive()))
        sock.close()

    run(backend, body)


@pytest.mark.parametrize("backend", SOCKETS)
def test_strangers_that_say_nothing_are_dropped(backend: str) -> None:
    options = LinkOptions(slots=3, send_timeout_s=0.2)

    async def body(nodes: Pair) -> None:
        silent = [await connect(nodes.address) for _ in range(70)]
        for sock in silent:
            sock.setblocking(False)
            assert await soon(asyncio.get_running_loop().sock_recv(sock, 1)) == b""
            sock.close()
        near, far = await nodes.links()
        await near.send(b"fine")
        assert (await receive(far))[0] == b"fine"

    run(backend, body, options)


@pytest.mark.parametrize("backend", SOCKETS)
def test_dialling_something_that_does_not_answer(backend: str) -> None:
    async def body(nodes: Pair) -> None:
        with tempfile.TemporaryDirectory() as folder:
            if backend.startswith("unix"):
                sock = socket.socket(socket.AF_UNIX)
                sock.bind(f"{folder}/s")
                address = f"unix://{folder}/s"
            else:
                sock = socket.socket()
                sock.bind(("127.0.0.1", 0))
                address = f"tcp://127.0.0.1:{sock.getsockname()[1]}"
            sock.listen()
            with pytest.raises(LinkClosed):
                await soon(nodes.a.dial(address, b"", OPTIONS, timeout_s=0.2))
            sock.close()

    run(backend, body)


@pytest.mark.parametrize("address", ["tcp://host", "tcp://h:x", "http://h:1", "h:1", "tcp://h:99999"])
def test_bad_addresses(address: str) -> None:
    async def main() -> None:
        with pytest.raises(ValueError):
            await SocketTransport().dial(address, b"", OPTIONS)

    asyncio.run(main())


# ---- memory: the habits ----------------------------------------------------------------------------


def run_network(body: Callable[[MemoryNetwork, Pair], Awaitable[None]], keepalive_s: float = 5.0) -> None:
    async def main() -> None:
        network = MemoryNetwork(delay_s=lambda source, target: 0.001, keepalive_s=keepalive_s)
        nodes = Pair(network.transport("a"), network.transport("b"), "mem://b:0")
        nodes.address = await nodes.b.listen("mem://b:0", nodes.accepted.put_nowait, OPTIONS)
        assert nodes.address != "mem://b:0"
        await body(network, nodes)
        await nodes.a.close()
        await nodes.b.close()

    asyncio.run(main())


def test_a_short_partition_delays() -> None:
    async def body(network: MemoryNetwork, nodes: Pair) -> None:
        near, far = await nodes.links()
        await near.send(b"1")
        network.partition("a", "b")
        await near.send(b"2")
        pending = asyncio.ensure_future(far.receive())
        dialling = asyncio.ensure_future(nodes.a.dial(nodes.address, b"late", OPTIONS))
        await asyncio.sleep(0.02)
        assert not pending.done() and not dialling.done()
        network.heal("a", "b")
        assert (await soon(pending)).header == b"1"
        assert (await soon(far.receive())).header == b"2"
        assert (await soon(dialling)).hello == b"late"

    run_network(body)


def test_a_long_partition_closes_both_ends() -> None:
    async def body(network: MemoryNetwork, nodes: Pair) -> None:
        near, far = await nodes.links()
        network.partition("a", "b")
        await gone(near)
        await gone(far)
        with pytest.raises(LinkClosed):
            await nodes.a.dial(nodes.address, b"", OPTIONS, timeout_s=0.05)

    run_network(body, keepalive_s=0.05)


def test_a_healed_partition_does_not_close_later() -> None:
    async def body(network: MemoryNetwork, nodes: Pair) -> None:
        near, far = await nodes.links()
        network.partition("a", "b")
        network.heal("a", "b")
        await asyncio.sleep(0.03)
        network.partition("a", "b")
        await asyncio.sleep(0.04)  # past the first partition's time, not the second's
        network.heal("a", "b")
        await near.send(b"alive")
        assert (await receive(far))[0] == b"alive"

    run_network(body, keepalive_s=0.06)


def test_cut_and_kill() -> None:
    async def body(network: MemoryNetwork, nodes: Pair) -> None:
        near, far = await nodes.links()
        network.cut("b", "a")
        await gone(near)
        await gone(far)
        near, far = await nodes.links()
        network.kill("b")
        await gone(far)
        await gone(near)
        with pytest.raises(LinkClosed):
            await nodes.a.dial(nodes.address, b"", OPTIONS)

    run_network(body)
