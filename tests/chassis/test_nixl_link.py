"""A NIXL link over agents of ours: what a network may do that no library here can be made to do.

Notifications in another order, writes that never end or can't be taken back, agents that break.
"""

import asyncio
import dataclasses
import random
import struct
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import cast

import pytest

from chassis.errors import LinkClosed
from chassis.ids_source import id_source
from chassis.transport import nixl_wire as wire
from chassis.transport.choice import ChosenTransport
from chassis.transport.interface import Link, LinkOptions
from chassis.transport.kinds import Kind, Links
from chassis.transport.nixl import NixlLinks
from chassis.transport.nixl_agent import AgentError, Lanes, Region
from chassis.transport.nixl_wire import BadWire, Place
from chassis.transport.registered import Memory, MemoryRange

OPTIONS = LinkOptions(slots=3, slot_bytes=4 << 20, send_timeout_s=0.3)
new_id = id_source(time.time_ns)


class Fabric:
    """Agents by name. `holds`: writes are not done; `reverses`: notifications of one look come last first."""

    def __init__(self) -> None:
        self.agents: dict[str, FakeAgent] = {}
        self.holds = self.reverses = self.keeps = self.broken = self.no_peer_memory = False
        self.waits_for = 3  # so many notifications are looked at together, if they are reversed

    def make(self, name: str, lanes: Lanes) -> "FakeAgent":
        assert name not in self.agents, "what a dead link left behind would be taken for this one's"
        self.agents[name] = FakeAgent(self, name)
        return self.agents[name]


class FakePool(Region):
    """Memory of a GPU, as far as a link can tell."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.device = 3


class FakeAgent:
    def __init__(self, fabric: Fabric, name: str) -> None:
        self._fabric = fabric
        self._name = name
        self._peer: FakeAgent | None = None
        self.memory: dict[int, Region] = {}
        self.inbox: list[bytes] = []
        self.held: list[bytes] = []
        self.closed = False
        self.looks = 0

    def register(self, regions: Iterable[Memory]) -> None:
        for region in regions:
            if region.device is not None and self._fabric.no_peer_memory:
                raise AgentError("no kernel module lets the card reach the GPU")
            assert isinstance(region, Region)
            self.memory[region.address] = region

    def metadata(self) -> bytes:
        return self._name.encode()

    def metadata_of(self, region: Memory) -> bytes:
        return self._name.encode()

    def connect(self, metadata: bytes) -> None:
        self._peer = self._fabric.agents.get(metadata.decode())
        if self._peer is None:
            raise AgentError("no such agent")

    def write(self, source: MemoryRange, place: Place, note: bytes) -> object:
        assert self._peer is not None and source.memory.address in self.memory, "not registered"
        target, at = self._peer.registered(place.address, source.nbytes)
        assert target.device == place.device, "what the peer was told of its own memory"
        if not self._fabric.holds:
            assert isinstance(source.memory, Region)
            data = source.memory.view[source.offset : source.offset + source.nbytes]
            target.view[at : at + source.nbytes] = data
            self._peer.inbox.append(note)
        return note

    def registered(self, address: int, size: int) -> tuple[Region, int]:
        """The memory, and where in it that lies."""
        for memory in self.memory.values():
            if memory.address <= address and address + size <= memory.address + memory.capacity:
                return memory, address - memory.address
        raise AssertionError("the peer has not registered that")

    def done(self, handle: object) -> bool:
        return not self._fabric.holds

    def release(self, handle: object) -> None:
        if self._fabric.keeps:
            raise AgentError("it can't be taken back")

    def notify(self, note: bytes) -> None:
        assert self._peer is not None
        self._peer.inbox.append(note)

    def notifications(self) -> list[bytes]:
        self.looks += 1
        if self._fabric.broken:
            raise AgentError("the device is gone")
        if self._fabric.reverses and len(self.inbox) < self._fabric.waits_for:
            return []
        notes, self.inbox = self.inbox, []
        return notes[::-1] if self._fabric.reverses else notes

    def close(self) -> None:
        self.closed = True


class Pair:
    def __init__(self, kind: str) -> None:
        self.fabric = Fabric()
        clock = asyncio.get_running_loop().time
        self.nixl = [NixlLinks(new_id, clock, self.fabric.make) for _ in range(2)]
        links = Links(kinds=(cast(Kind, kind),))
        self.a, self.b = (
            ChosenTransport(links, new_id, clock, nixl=nixl, lacks=lambda lanes: None) for nixl in self.nixl
        )

    async def links(self) -> tuple[Link, Link]:
        accepted: asyncio.Queue[Link] = asyncio.Queue()
        address = await self.b.listen("tcp://127.0.0.1:0", accepted.put_nowait, OPTIONS)
        return await self.a.dial(address, b"hi", OPTIONS), await accepted.get()


def run(body: Callable[[Pair], Awaitable[None]], kind: str = "nixl+shm") -> None:
    async def main() -> None:
        async with asyncio.timeout(10):
            pair = Pair(kind)
            try:
                await body(pair)
            finally:
                await pair.a.close()
                await pair.b.close()
                await asyncio.sleep(0)
            assert all(agent.closed for agent in pair.fabric.agents.values()), "each agent is let go"

    asyncio.run(main())


def test_frames_come_in_order_whatever_order_notifications_have() -> None:
    async def body(pair: Pair) -> None:
        near, far = await pair.links()
        pair.fabric.reverses = True
        for turn in range(4):
            for i in range(3):
                await near.send(b"%d" % (3 * turn + i), bytes([i]) * (100 if i == 1 else 50_000))
            for i in range(3):
                frame = await far.receive()
                assert frame.header == b"%d" % (3 * turn + i) and set(frame.payload) == {i}
                frame.release()

    run(body)


def test_a_write_that_is_not_done_in_time_ends_the_link() -> None:
    async def body(pair: Pair) -> None:
        near, far = await pair.links()
        pair.fabric.holds = True
        await near.send(b"", bytes(50_000))
        with pytest.raises(LinkClosed, match="not done in 0.3 s"):
            await near.receive()
        with pytest.raises(LinkClosed, match="closed by the peer: a write was not done"):
            await far.receive()

    run(body)


@pytest.mark.parametrize("kind", ["nixl+shm", "nixl+tcp"])
@pytest.mark.parametrize("keeps", [False, True])
def test_what_a_write_may_still_land_in_is_kept(kind: str, keeps: bool) -> None:
    """A sender that can't take its write back does not say that it let go; by TCP none can land."""

    async def body(pair: Pair) -> None:
        near, far = await pair.links()
        pair.fabric.holds, pair.fabric.keeps = True, keeps
        await near.send(b"", bytes(50_000))
        near.close()
        with pytest.raises(LinkClosed):
            await far.receive()
        while not pair.nixl[1].ended:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert bool(pair.nixl[1].quarantined_bytes) == (keeps and kind == "nixl+shm")
        pair.fabric.keeps = False

    run(body, kind)


def test_who_has_nothing_to_do_sleeps_and_wakes_for_a_frame() -> None:
    """Nothing tells a NIXL agent of what comes: looking all the time would cost a core a process."""

    async def body(pair: Pair) -> None:
        near, far = await pair.links()
        clock = asyncio.get_running_loop().time

        async def looks_seldom(while_s: float) -> bool:
            """At each agent, two hundred times a second at most."""
            began, before = clock(), [agent.looks for agent in pair.fabric.agents.values()]
            await asyncio.sleep(while_s)
            looks = [agent.looks for agent in pair.fabric.agents.values()]
            seldom = (clock() - began) * 200 + 2
            return all(now - then <= seldom for now, then in zip(looks, before, strict=True))

        for i in range(2):
            while not await looks_seldom(0.2):  # what was just said may keep it busy for a while
                pass
            await near.send(b"%d" % i, bytes(50_000))
            (frame := await far.receive()).release()
            assert frame.header == b"%d" % i

    run(body)


def test_each_link_has_agents_of_its_own() -> None:
    async def body(pair: Pair) -> None:
        accepted: asyncio.Queue[Link] = asyncio.Queue()
        address = await pair.b.listen("tcp://127.0.0.1:0", accepted.put_nowait, OPTIONS)
        for _ in range(3):  # one after another, too
            near = await pair.a.dial(address, b"hi", OPTIONS)
            near.close()
            with pytest.raises(LinkClosed):
                await (await accepted.get()).receive()
        assert len(pair.fabric.agents) == 6

    run(body)


def test_a_broken_agent_ends_its_link() -> None:
    async def body(pair: Pair) -> None:
        near, far = await pair.links()
        pair.fabric.broken = True
        for link in (near, far):
            with pytest.raises(LinkClosed, match="the device is gone"):
                await link.receive()

    run(body)


def test_who_is_ready_before_it_made_an_offer_is_no_peer() -> None:
    async def body(pair: Pair) -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readexactly(16)
            writer.write(struct.pack("<HBBIQ", 0x51A0, 2, 0, 12, 0) + struct.pack("<IQ", 3, 1 << 20))
            await reader.readuntil(b"shoal-")  # in its offer, its agent's name
            (agent,) = pair.fabric.agents.values()
            agent.inbox.append(wire.build_note(wire.Note(wire.Noted.HELLO)))
            writer.write(wire.build_said(wire.Said.READY))
            await reader.read()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(LinkClosed, match="ready before its offer"):
            await pair.a.dial(f"nixl+shm://127.0.0.1:{port}", b"hi", OPTIONS)
        server.close()

    run(body)


def test_who_is_cancelled_while_a_slot_grows_leaves_it_to_others() -> None:
    async def body(pair: Pair) -> None:
        near, far = await pair.links()
        cancelled = asyncio.ensure_future(near.send(b"never", bytes(3 << 20)))
        await asyncio.sleep(0)
        assert not cancelled.done()
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        for i in range(6):
            await near.send(b"%d" % i, bytes(3 << 20))
            frame = await far.receive()
            assert frame.header == b"%d" % i and len(frame.payload) == 3 << 20
            frame.release()

    run(body)


def test_slots_grow_no_further_than_they_may() -> None:
    async def body(pair: Pair) -> None:
        near, far = await pair.links()
        with pytest.raises(ValueError):
            await near.send(b"", bytes(OPTIONS.slot_bytes + 1))
        await near.send(bytes(1 << 20), bytes(OPTIONS.slot_bytes))
        frame = await far.receive()
        assert len(frame.header) == 1 << 20 and len(frame.payload) == OPTIONS.slot_bytes

    run(body)


def test_what_is_no_message_is_refused() -> None:
    rng = random.Random(3)
    parsers: list[Callable[[bytes], object]] = [
        wire.parse_note,
        wire.parse_offer,
        wire.parse_slots,
        wire.parse_grow,
        wire.parse_grew,
    ]
    offer = wire.Offer("n", b"m" * 50, (wire.Place(4096, 1 << 18),) * 4, 1 << 20, 7, 9)
    second = tuple(wire.Place(8192 + i, 1 << 16, 3) for i in range(4))
    direct = dataclasses.replace(offer, direct=second)
    in_host = dataclasses.replace(offer, direct=tuple(dataclasses.replace(at, device=None) for at in second))
    grew = wire.Grew(2, wire.Place(1, 2), b"xy", True)
    note = wire.Note(wire.Noted.INLINE, 7, 1, 2, 3, b"hhppp")
    for each in (offer, direct, in_host):
        assert wire.parse_offer(wire.build_offer(each)) == each
    assert wire.parse_grew(wire.build_grew(grew)) == grew
    assert wire.parse_note(wire.build_note(note)) == note
    assert wire.parse_grow(wire.build_grow(1, 2, True)) == (1, 2, True)
    good = [wire.build_offer(direct), wire.build_grew(grew), wire.build_note(note), wire.build_grow(1, 2)]
    for _ in range(3000):
        data = bytearray(rng.choice(good) if rng.random() < 0.7 else rng.randbytes(rng.randrange(80)))
        for _ in range(rng.randrange(4)):
            if data:
                data[rng.randrange(len(data))] = rng.randrange(256)
        for parse in parsers:
            try:
                parse(bytes(data[: rng.randrange(len(data) + 1)]))
            except BadWire:
                pass
