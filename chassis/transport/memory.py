"""Links inside one process, and the habits of real networks for the simulation to inject.

`MemoryNetwork` knows nodes, their listeners and links. Messages between two nodes take `delay_s` of loop
time, keep their order, and wait while the nodes are partitioned; a partition longer than `keepalive_s`
closes the links on both ends, as a kernel's keepalive would. Payloads are copied. Deterministic: only
loop time, no randomness of its own, order of creation everywhere.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import copy_context

from chassis.errors import LinkClosed
from chassis.transport.flow import Flow, Waiters, check_size
from chassis.transport.interface import Accept, Link, LinkOptions
from chassis.transport.registered import MemoryRange

SCHEME = "mem://"
KEEPALIVE_S = 4.0

Delay = Callable[[str, str], float]  # seconds from one node to another


def _pair(a: str, b: str) -> tuple[str, str]:
    return (min(a, b), max(a, b))


def _no_delay(source: str, target: str) -> float:
    return 0.0


class MemoryFrame:
    direct: MemoryRange | None = None

    def __init__(self, link: "MemoryLink", header: bytes, payload: bytes) -> None:
        self._link = link
        self._header = header
        self._payload = memoryview(payload)
        self._released = False

    @property
    def header(self) -> bytes:
        return self._header

    @property
    def payload(self) -> memoryview:
        return self._payload

    def release(self) -> None:
        if not self._released:
            self._released = True
            self._link.return_credit()


class _Wire:
    """One direction of a link: an ordered queue of deliveries."""

    def __init__(self, network: "MemoryNetwork", source: str, target: str) -> None:
        self._network = network
        self._source = source
        self._target = target
        self._queue: deque[tuple[float, Callable[[], None]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def put(self, deliver: Callable[[], None]) -> None:
        now = asyncio.get_running_loop().time()
        at = now + self._network.delay_s(self._source, self._target)
        if self._queue:
            at = max(at, self._queue[-1][0])
        self._queue.append((at, deliver))
        self._arm()

    def pump(self) -> None:
        """Delivers what is due; called by the timer and when a partition heals."""
        self._timer = None
        now = asyncio.get_running_loop().time()
        while (
            self._queue
            and self._queue[0][0] <= now
            and not self._network.partitioned(self._source, self._target)
        ):
            self._queue.popleft()[1]()
        self._arm()

    def _arm(self) -> None:
        blocked = self._network.partitioned(self._source, self._target)
        if self._queue and self._timer is None and not blocked:
            self._timer = asyncio.get_running_loop().call_at(self._queue[0][0], self.pump)


class MemoryLink:
    """One end of a pair."""

    kind = "memory"

    def __init__(self, network: "MemoryNetwork", node: str, peer_node: str, hello: bytes) -> None:
        self.node = node
        self.peer_node = peer_node
        self._network = network
        self._hello = hello
        self._wire = _Wire(network, node, peer_node)

    def join(self, peer: "MemoryLink", options: LinkOptions, peer_options: LinkOptions) -> None:
        self._peer = peer
        self._options = options
        self._peer_options = peer_options
        self._flow: Flow[MemoryFrame] = Flow(credits=peer_options.slots, slots=options.slots)

    @property
    def hello(self) -> bytes:
        return self._hello

    @property
    def closed(self) -> bool:
        return self._flow.closed is not None

    async def send(self, header: bytes, payload: bytes | memoryview = b"") -> None:
        check_size(header, memoryview(payload).nbytes, self._peer_options.slot_bytes)
        data = bytes(payload)
        try:
            await self._flow.take_credit(self._options.send_timeout_s)
        except TimeoutError:
            self.close("the peer took no frame in time")
            raise LinkClosed("the peer took no frame in time") from None
        peer = self._peer
        self._wire.put(lambda: peer.deliver(header, data))

    def send_now(self, header: bytes, payload: bytes | memoryview = b"") -> bool:
        check_size(header, memoryview(payload).nbytes, self._peer_options.slot_bytes)
        if not self._flow.take_credit_now():
            return False
        peer, data = self._peer, bytes(payload)
        self._wire.put(lambda: peer.deliver(header, data))
        return True

    async def receive(self) -> MemoryFrame:
        return await self._flow.take_frame()

    def deliver(self, header: bytes, payload: bytes) -> None:
        if not self.closed:
            self._flow.put_frame(MemoryFrame(self, header, payload))

    def return_credit(self) -> None:
        if not self.closed:
            peer = self._peer
            self._wire.put(lambda: peer.add_credit())

    def add_credit(self) -> None:
        self._flow.add_credits(1)

    def close(self, why: str = "closed here") -> None:
        if not self.closed:
            self._flow.shut(why)
            self._wire.put(self._tell_closed)

    def _tell_closed(self) -> None:
        self._peer.shut("closed by the peer")
        self._network.forget(self)

    def shut(self, why: str) -> None:
        self._flow.shut(why)
        self._network.forget(self)

    def pump(self) -> None:
        self._wire.pump()


class MemoryNetwork:
    """All nodes of one process or simulation. Faults: partition, heal, cut, kill."""

    def __init__(self, delay_s: Delay = _no_delay, keepalive_s: float = KEEPALIVE_S) -> None:
        self.delay_s = delay_s
        self._keepalive_s = keepalive_s
        self._listeners: dict[str, tuple[str, Accept, LinkOptions]] = {}
        self._links: dict[MemoryLink, None] = {}  # ordered; an end stays until it has heard of the close
        self._partitions: dict[tuple[str, str], int] = {}  # the serial tells a new one from an old one
        self._healed = Waiters()
        self._serial = 0

    def transport(self, node: str) -> "MemoryTransport":
        return MemoryTransport(self, node)

    # ---- faults ------------------------------------------------------------------------------------

    def partitioned(self, a: str, b: str) -> bool:
        return _pair(a, b) in self._partitions

    def partition(self, a: str, b: str) -> None:
        """Nothing passes between two nodes until `heal`; links outlive it if it is short."""
        if a != b and not self.partitioned(a, b):
            self._serial += 1
            self._partitions[_pair(a, b)] = self._serial
            for link in self._between(a, b):
                asyncio.get_running_loop().call_later(self._keepalive_s, self._give_up, link, self._serial)

    def heal(self, a: str, b: str) -> None:
        self._partitions.pop(_pair(a, b), None)
        self._healed.wake_all()
        for link in self._between(a, b):
            link.pump()

    def cut(self, a: str, b: str) -> None:
        """Both ends of every link between two nodes are gone at once."""
        for link in self._between(a, b):
            link.shut("link lost")

    def kill(self, node: str) -> None:
        """A process dies: its listeners and links are gone; peers notice when the news arrives."""
        for address in [a for a, (owner, _, _) in self._listeners.items() if owner == node]:
            del self._listeners[address]
        for link in [link for link in self._links if link.node == node]:
            link.close("this node died")

    # ---- for transports ----------------------------------------------------------------------------

    def listen(self, node: str, address: str, accept: Accept, options: LinkOptions) -> str:
        if address.endswith(":0"):
            self._serial += 1
            address = f"{address[:-2]}:{self._serial}"
        if not address.startswith(SCHEME) or address in self._listeners:
            raise ValueError(f"address {address!r} can't be listened on")
        own = copy_context()  # who accepts logs as its own service
        self._listeners[address] = (node, lambda link: own.run(accept, link), options)
        return address

    def unlisten(self, address: str) -> None:
        self._listeners.pop(address, None)

    async def dial(self, node: str, address: str, hello: bytes, options: LinkOptions) -> Link:
        """Raises LinkClosed when nobody listens; waits for ever while partitioned."""
        listener = self._listeners.get(address)
        if listener is None:
            raise LinkClosed(f"nobody listens on {address}")
        target = listener[0]
        await self._passage(node, target)
        listener = self._listeners.get(address)
        if listener is None:
            raise LinkClosed(f"nobody listens on {address}")
        target, accept, offered = listener
        near = MemoryLink(self, node, target, hello)
        far = MemoryLink(self, target, node, hello)
        near.join(far, options, offered)
        far.join(near, offered, options)
        self._links[near] = self._links[far] = None
        accept(far)
        try:
            await self._passage(target, node)
        except asyncio.CancelledError:
            near.close()
            raise
        return near

    async def _passage(self, source: str, target: str) -> None:
        """The time of one message from node to node."""
        await asyncio.sleep(self.delay_s(source, target))
        while self.partitioned(source, target):
            await self._healed.wait()

    def forget(self, link: MemoryLink) -> None:
        self._links.pop(link, None)

    def _between(self, a: str, b: str) -> list[MemoryLink]:
        return [link for link in self._links if {link.node, link.peer_node} == {a, b}]

    def _give_up(self, link: MemoryLink, partition: int) -> None:
        if self._partitions.get(_pair(link.node, link.peer_node)) == partition:
            link.shut("no sign of the peer")


class MemoryTransport:
    """A node's `Transport`."""

    def __init__(self, network: MemoryNetwork, node: str) -> None:
        self._network = network
        self._node = node
        self._addresses: list[str] = []
        self._links: list[MemoryLink] = []
        self._closed = False

    async def listen(self, address: str, accept: Accept, options: LinkOptions) -> str:
        def accepted(link: Link) -> None:
            assert isinstance(link, MemoryLink)
            self._own(link)
            accept(link)

        resolved = self._network.listen(self._node, address, accepted, options)
        self._addresses.append(resolved)
        return resolved

    async def dial(self, address: str, hello: bytes, options: LinkOptions, timeout_s: float = 2.0) -> Link:
        if self._closed:
            raise LinkClosed("transport is closed")
        try:
            async with asyncio.timeout(timeout_s):
                link = await self._network.dial(self._node, address, hello, options)
        except TimeoutError:
            raise LinkClosed(f"no answer from {address}") from None
        assert isinstance(link, MemoryLink)
        self._own(link)
        if self._closed:
            link.close()
        return link

    def _own(self, link: MemoryLink) -> None:
        self._links = [other for other in self._links if not other.closed]
        self._links.append(link)

    async def close(self) -> None:
        self._closed = True
        for address in self._addresses:
            self._network.unlisten(address)
        for link in self._links:
            link.close()
        self._links.clear()
