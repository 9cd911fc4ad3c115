"""Links that write payloads from the memory of a device straight into that of the peer's (GPUDirect).

Over agents of ours with a device that is none, and over NIXL's own with the host's memory for it.
"""

import asyncio
import dataclasses
import random
import time
from collections.abc import Awaitable, Callable
from typing import cast

import pytest

from chassis.errors import LinkClosed
from chassis.ids_source import id_source
from chassis.transport.choice import ChosenTransport
from chassis.transport.interface import DirectLink, Link, LinkOptions
from chassis.transport.kinds import Kind, Links
from chassis.transport.nixl import NixlLinks
from chassis.transport.nixl_agent import Lanes, Region, why_not
from chassis.transport.nixl_slots import SLOT_BYTES_FIRST, Incoming
from chassis.transport.nixl_wire import BadWire, Note, Noted
from chassis.transport.registered import MemoryRange
from tests.chassis.test_nixl_link import Fabric, FakePool

SLOT_BYTES = 2 << 20
POOL_BYTES = 8 << 20
PLAIN = LinkOptions(slots=3, slot_bytes=SLOT_BYTES, send_timeout_s=1.0)
new_id = id_source(time.time_ns)
Make = Callable[[int], Region]


class Nodes:
    """a has payloads on a device, b wants them there. `make`: memory of it."""

    def __init__(self, a: ChosenTransport, b: ChosenTransport, make: Make) -> None:
        self.a, self.b = a, b
        self.pool = make(POOL_BYTES)
        self.sends = dataclasses.replace(PLAIN, sends_from=(self.pool,))
        self.receives = dataclasses.replace(PLAIN, slots_on=make)
        self.fabric = Fabric()

    async def links(
        self, sends: LinkOptions | None = None, receives: LinkOptions | None = None
    ) -> tuple[Link, Link]:
        accepted: asyncio.Queue[Link] = asyncio.Queue()
        address = await self.b.listen("tcp://127.0.0.1:0", accepted.put_nowait, receives or self.receives)
        near = await self.a.dial(address, b"hi", sends or self.sends)
        return near, await accepted.get()

    def payload(self, rng: random.Random, size: int) -> MemoryRange:
        at = rng.randrange((POOL_BYTES - size) // 256) * 256
        self.pool.view[at : at + size] = rng.randbytes(size)
        return MemoryRange(self.pool, at, size)


def run(
    body: Callable[[Nodes], Awaitable[None]],
    kind: str = "nixl+rdma",
    make: Make = FakePool,
    real: bool = False,
) -> None:
    async def main() -> None:
        async with asyncio.timeout(20):
            clock, fabric = asyncio.get_running_loop().time, Fabric()
            links = Links(kinds=(cast(Kind, kind),))
            a, b = (
                ChosenTransport(
                    links,
                    new_id,
                    clock,
                    nixl=NixlLinks(new_id, clock) if real else NixlLinks(new_id, clock, fabric.make),
                    lacks=lambda lanes: None,
                )
                for _ in range(2)
            )
            nodes = Nodes(a, b, make)
            nodes.fabric = fabric
            try:
                await body(nodes)
            finally:
                await a.close()
                await b.close()
                await asyncio.sleep(0)

    asyncio.run(main())


def content(at: MemoryRange) -> bytes:
    assert isinstance(at.memory, Region)
    return bytes(at.memory.view[at.offset : at.offset + at.nbytes])


async def all_pass(nodes: Nodes, near: Link, far: Link) -> None:
    """Small and large headers and payloads, in places that have to grow, with plain frames between."""
    rng = random.Random(5)
    assert isinstance(near, DirectLink) and near.takes_direct
    assert isinstance(far, DirectLink) and not far.takes_direct, "the far end has nothing on a device"
    for turn in range(40):
        header = rng.randbytes(rng.choice([0, 10, 3_000, 300_000]))
        size = rng.choice([16, 4_096, SLOT_BYTES_FIRST, 700_000, SLOT_BYTES])
        if turn % 3 == 2:
            plain = rng.randbytes(size)
            await near.send(header, plain)
            frame = await far.receive()
            assert (frame.header, bytes(frame.payload), frame.direct) == (header, plain, None)
        else:
            payload = nodes.payload(rng, size)
            await near.send_direct(header, payload)
            frame = await far.receive()
            assert frame.header == header and not frame.payload and frame.direct is not None
            assert frame.direct.memory is not nodes.pool and content(frame.direct) == content(payload)
        frame.release()


@pytest.mark.parametrize("reverses", [False, True])
def test_payloads_go_from_device_to_device_in_whatever_order_notifications_come(reverses: bool) -> None:
    async def body(nodes: Nodes) -> None:
        near, far = await nodes.links()
        await all_pass(nodes, near, far)
        nodes.fabric.reverses, nodes.fabric.waits_for = reverses, 6
        rng = random.Random(6)
        assert isinstance(near, DirectLink)
        for _ in range(4):
            sent = {}
            async with asyncio.TaskGroup() as group:
                for i in range(3):
                    at = MemoryRange(nodes.pool, i * 256_000, rng.choice([100_000, 5_000]))
                    sent[b"%d" % i] = at, rng.randbytes(at.nbytes)
                    nodes.pool.view[at.offset : at.offset + at.nbytes] = sent[b"%d" % i][1]
                    group.create_task(near.send_direct(b"%d" % i, at))
            for _ in range(3):
                frame = await far.receive()
                assert frame.direct is not None and content(frame.direct) == sent.pop(frame.header)[1]
                frame.release()

    run(body)


@pytest.mark.parametrize("kind", ["nixl+tcp", "nixl+shm"])
@pytest.mark.skipif(why_not(Lanes.TCP) is not None, reason=str(why_not(Lanes.TCP)))
def test_the_same_over_nixl_with_memory_of_the_host(kind: str) -> None:
    async def body(nodes: Nodes) -> None:
        await all_pass(nodes, *await nodes.links())

    run(body, kind, Region, real=True)


def test_who_lacks_it_gets_payloads_through_the_host() -> None:
    async def passes(near: Link, far: Link) -> None:
        assert isinstance(near, DirectLink) and not near.takes_direct
        await near.send(b"h", bytes(50_000))
        frame = await far.receive()
        assert frame.payload.nbytes == 50_000 and frame.direct is None
        frame.release()

    async def one_end(nodes: Nodes) -> None:
        await passes(*await nodes.links(sends=PLAIN))
        await passes(*await nodes.links(receives=PLAIN))

    async def no_driver(nodes: Nodes) -> None:
        nodes.fabric.no_peer_memory = True
        await passes(*await nodes.links())

    async def no_memory(nodes: Nodes) -> None:
        def full(num_bytes: int) -> Region:
            raise RuntimeError("out of memory")

        await passes(*await nodes.links(receives=dataclasses.replace(PLAIN, slots_on=full)))

    async def other_lanes(nodes: Nodes) -> None:
        await passes(*await nodes.links())

    run(one_end)
    run(no_driver)
    run(no_memory)
    run(other_lanes, "nixl+tcp")


def test_a_device_without_room_for_a_larger_place_ends_the_link() -> None:
    async def body(nodes: Nodes) -> None:
        def first_only(num_bytes: int) -> Region:
            if num_bytes > PLAIN.slots * SLOT_BYTES_FIRST:
                raise RuntimeError("out of memory")
            return FakePool(num_bytes)

        near, far = await nodes.links(receives=dataclasses.replace(PLAIN, slots_on=first_only))
        assert isinstance(near, DirectLink)
        with pytest.raises(LinkClosed, match="no memory for 1048576 bytes"):
            await near.send_direct(b"", MemoryRange(nodes.pool, 0, 1 << 20))
        with pytest.raises(LinkClosed, match="out of memory"):
            await far.receive()

    run(body)


def test_sending_lasts_until_the_memory_has_been_read() -> None:
    async def body(nodes: Nodes) -> None:
        near, far = await nodes.links()
        assert isinstance(near, DirectLink)
        nodes.fabric.holds = True
        sending = asyncio.create_task(near.send_direct(b"h", MemoryRange(nodes.pool, 0, 5_000)))
        await asyncio.sleep(0.05)
        assert not sending.done(), "the card has not read it yet"
        far.close()
        with pytest.raises(LinkClosed):
            await sending

    run(body)


def test_a_lying_peer_is_found_out() -> None:
    def incoming() -> Incoming:
        slots = Incoming(dataclasses.replace(PLAIN, slots_on=FakePool))
        slots.open_direct()
        return slots

    header = Note(Noted.DIRECT_INLINE, 0, 1, 2, 100, b"hh")
    payload = Note(Noted.DIRECT_PAYLOAD, 0, 1, 0, 100)
    (arrived,) = [*(slots := incoming()).take(payload), *slots.take(header)]
    assert arrived.header == b"hh" and arrived.direct is not None and arrived.direct.nbytes == 100
    for first, second in [
        (payload, payload),
        (header, header),
        (header, dataclasses.replace(payload, slot=2)),
        (header, dataclasses.replace(payload, number=1)),
        (header, dataclasses.replace(payload, payload_len=99)),
        (header, Note(Noted.INLINE, 0, 1, 1, 0, b"h")),
        (Note(Noted.INLINE, 0, 1, 1, 0, b"h"), payload),
    ]:
        slots = incoming()
        slots.take(first)
        with pytest.raises(BadWire):
            slots.take(second)
    for alone in (
        dataclasses.replace(payload, payload_len=SLOT_BYTES_FIRST + 1),
        dataclasses.replace(payload, slot=3),
        Note(Noted.DIRECT_WRITTEN, 0, 1, SLOT_BYTES_FIRST + 1, 100),
    ):
        with pytest.raises(BadWire):
            incoming().take(alone)
    with pytest.raises(BadWire, match="direct place"):
        Incoming(PLAIN).take(payload)
    for slot, size in ((1, SLOT_BYTES + 1), (1, 5), (3, 1 << 20), (-1, 1 << 20)):
        with pytest.raises(BadWire):
            incoming().grow_direct(slot, size)
