"""Links that carry frames (a header and its payload, together) between ring neighbours.

Shaped by RDMA: a receiver registers `slots` of fixed size; a sender needs a credit (a free slot of the
peer) before it writes; the write and its notification arrive as one frame; releasing the frame returns
the credit. Memory and sockets imitate that. A peer that vanishes is `LinkClosed`, never a hang.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from chassis.transport.registered import Memory, MemoryRange

SLOTS_DEFAULT = 4
HEADER_BYTES_MAX = 1 << 24  # a step that starts many long sequences anew carries their ids


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """What the listening end offers for each accepted link (and the dialling end for what it receives)."""

    slots: int = SLOTS_DEFAULT
    slot_bytes: int = 1 << 20  # largest payload
    send_timeout_s: float = 5.0  # waiting for a credit or for the peer to take bytes: then the link closes
    slots_on: Callable[[int], Memory] | None = None  # makes memory of so many bytes where payloads are wanted
    sends_from: tuple[Memory, ...] = ()  # where payloads lie that `DirectLink.send_direct` gets


class Frame(Protocol):
    """One received frame. `payload` may be a view of a registered slot: valid until `release`."""

    @property
    def header(self) -> bytes: ...

    @property
    def payload(self) -> memoryview: ...

    @property
    def direct(self) -> MemoryRange | None:
        """Where the payload lies if it came straight into memory of `slots_on`: then the other is empty."""

    def release(self) -> None: ...


class Link(Protocol):
    """A connection between two ends; both may send. Frames arrive in order, each once, or the link closes."""

    @property
    def hello(self) -> bytes:
        """What the dialling end said when it connected."""

    @property
    def kind(self) -> str:
        """The backend in use, for the log: memory, unix, tcp, ..."""

    async def send(self, header: bytes, payload: bytes | memoryview = b"") -> None:
        """Waits for a credit; raises LinkClosed. `payload` may be reused when it returns."""

    def send_now(self, header: bytes, payload: bytes | memoryview = b"") -> bool:
        """Sends if that needs no waiting; False: nothing was sent. Raises LinkClosed."""

    async def receive(self) -> Frame:
        """The next frame; raises LinkClosed once the link is gone."""

    def close(self) -> None:
        """At once, from any state; both ends' pending calls raise LinkClosed."""


@runtime_checkable
class DirectLink(Link, Protocol):
    """One that may carry payloads from the memory they lie in straight into what the peer computes with."""

    @property
    def takes_direct(self) -> bool:
        """Whether both ends have such memory, and it could be registered."""

    async def send_direct(self, header: bytes, payload: MemoryRange) -> None:
        """`payload`: in memory of `sends_from`. Returns once it has been read. Raises LinkClosed."""


Accept = Callable[[Link], None]


class Transport(Protocol):
    async def listen(self, address: str, accept: Accept, options: LinkOptions) -> str:
        """Starts accepting; returns the address to dial (port 0 resolved). `accept` must not block."""

    async def dial(self, address: str, hello: bytes, options: LinkOptions, timeout_s: float = 2.0) -> Link:
        """Raises LinkClosed when nobody answers in time."""

    async def close(self) -> None: ...
