"""One end of a link over NIXL: each frame is written into a slot of the peer, and a notification says so.

How it opens: the ends, joined by a greeted TCP connection, tell each other agent and slots (OFFER), connect,
and send a first notification through NIXL; who gets it says READY. So an open link has passed data both ways.
Then a sender takes a credit and its slot and copies header and payload into registered memory, from where the
poller writes; the receiver hands the slot out as a frame and gives the credit back over the TCP connection,
whose loss is the link's end.
"""

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from chassis import log
from chassis.errors import LinkClosed
from chassis.transport import nixl_wire as wire
from chassis.transport.flow import Flow
from chassis.transport.interface import LinkOptions
from chassis.transport.nixl_agent import AgentError, Lanes
from chassis.transport.nixl_control import Control
from chassis.transport.nixl_end import End
from chassis.transport.nixl_opening import Made, MakeAgent, make
from chassis.transport.nixl_poller import Poller
from chassis.transport.nixl_quarantine import Process, Quarantine, pid_namespace
from chassis.transport.nixl_sender import Sender
from chassis.transport.nixl_slots import Incoming, NixlFrame
from chassis.transport.nixl_wire import BadWire, Grew, Note, Noted, Offer, Place, Said
from chassis.transport.registered import Memory, MemoryRange
from chassis.transport.socket_link import SocketLink

Told = Callable[["NixlLink", bool], None]  # once True when the link stands; False when it is lost


@dataclass(frozen=True, slots=True)
class Means:
    """What the links of one process share."""

    make_agent: MakeAgent  # raises AgentError; called on a thread of its own
    poller: Poller
    quarantine: Quarantine
    links: "set[NixlLink]" = field(default_factory=set)  # until their control connection is gone
    making: "set[asyncio.Future[Made]]" = field(default_factory=set)


class NixlLink:
    """`name`: of the agent, never used before."""

    def __init__(
        self, name: str, lanes: Lanes, hello: bytes, options: LinkOptions, means: Means, told: Told
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._name = name
        self._lanes = lanes
        self._hello = hello
        self._options = options
        self._means = means
        self._told = told
        self._flow: Flow[NixlFrame] = Flow(credits=0, slots=options.slots)
        self._incoming = Incoming(options)
        self._control = Control(self._heard, self._lost)
        timeout_s = options.send_timeout_s
        self._sender = Sender(self._flow, self._control, means.poller, self._from_poller, timeout_s)
        self._metadata = b""
        self._offer: Offer | None = None  # the peer's
        self._speaks_first = False
        self._begun = False
        self._timer: asyncio.TimerHandle | None = None
        self._passed = self._ready = False  # data has: to us, to the peer
        self._let_go = False  # we write nothing any more, or never did
        self._heard_last = False
        self._peer_let_go = False
        self._held: int | None = None  # in quarantine

    # ---- the link ----------------------------------------------------------------------------------

    @property
    def hello(self) -> bytes:
        return self._hello

    @property
    def kind(self) -> str:
        return self._lanes.kind

    @property
    def closed(self) -> bool:
        return self._flow.closed is not None

    @property
    def why_closed(self) -> str:
        return self._flow.closed or ""

    async def send(self, header: bytes, payload: bytes | memoryview = b"") -> None:
        with self._ends_when_late():
            await self._sender.send(header, payload)

    def send_now(self, header: bytes, payload: bytes | memoryview = b"") -> bool:
        return self._sender.send_now(header, payload)

    @property
    def takes_direct(self) -> bool:
        return self._sender.takes_direct

    async def send_direct(self, header: bytes, payload: MemoryRange) -> None:
        with self._ends_when_late():
            await self._sender.send_direct(header, payload)

    @contextmanager
    def _ends_when_late(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            self.close("the peer took no frame in time")
            raise LinkClosed("the peer took no frame in time") from None

    async def receive(self) -> NixlFrame:
        return await self._flow.take_frame()

    def close(self, why: str = "closed here") -> None:
        """`why` is told to the peer, unless it has not spoken yet."""
        if not self.closed:
            if self._begun:
                self._control.say(Said.CLOSING, why.encode()[: wire.WHY_BYTES_MAX])
            self._shut(why)
            if not self._begun:
                self._control.abort()

    def abort(self) -> None:
        """Without waiting for the peer to let go."""
        self.close("transport closed")
        self._control.abort()

    def release_slot(self, slot: int) -> None:
        if not self.closed and (freed := self._incoming.release(slot)):
            self._control.say(Said.CREDIT, wire.build_slots(freed))

    # ---- opening -----------------------------------------------------------------------------------

    def open(self, link: SocketLink, speaks_first: bool, timeout_s: float) -> None:
        """`link` has greeted and goes on as our control connection. The end that dialled speaks first."""
        self._speaks_first = speaks_first
        self._control.take(link.hand_over(self._control))
        self._means.links.add(self)
        self._timer = self._loop.call_later(timeout_s, self.close, "not open in time")
        if speaks_first:
            self._control.say(Said.RING)
            self._begin()

    def _begin(self) -> None:
        self._begun = True
        arguments = self._means.make_agent, self._name, self._lanes, self._options
        making = self._loop.run_in_executor(None, make, *arguments, self._incoming, self._sender.outgoing)
        self._means.making.add(making)
        making.add_done_callback(self._made)

    def _made(self, made: "asyncio.Future[Made]") -> None:
        self._means.making.discard(made)
        if made.cancelled() or (error := made.exception()) is not None:
            why = "the loop ends" if made.cancelled() else str(error)
            if not made.cancelled() and not isinstance(error, AgentError):
                log.warning("no NIXL agent", error=f"{type(error).__name__}: {error}")
            self.close(why)
            self._ended(True)
            return
        self._metadata, self._sender.sends_direct = made.result().metadata, made.result().sends_direct
        self._sender.end = end = End(
            made.result().agent,
            self._options.send_timeout_s,
            tell_notes=partial(self._from_poller, self._noted),
            tell_written=partial(self._from_poller, self._sender.written),
            tell_broken=partial(self._from_poller, self.close),
        )
        if self.closed:
            self._means.poller.submit(self._close_end)
            return
        self._means.poller.submit(partial(self._means.poller.add, end))
        if self._speaks_first:
            self._say_offer()
        if self._offer is not None:
            self._join(self._offer)

    def _from_poller(self, what: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(what, *arguments)
        except RuntimeError:
            pass  # the loop is over, and wants to know nothing

    def _say_offer(self) -> None:
        slot_bytes = self._options.slot_bytes
        offer = Offer(
            self._name,
            self._metadata,
            self._incoming.places,
            slot_bytes,
            os.getpid(),
            pid_namespace(),
            self._incoming.direct_places,
        )
        self._control.say(Said.OFFER, wire.build_offer(offer))

    def _join(self, offer: Offer) -> None:
        assert self._sender.end is not None
        if not self._speaks_first:
            self._say_offer()
        self._means.poller.submit(partial(self._sender.end.connect, offer.metadata))
        self._means.poller.submit(partial(self._sender.end.notify, wire.build_note(Note(Noted.HELLO))))

    def _stand_if_open(self) -> None:
        if self._passed and self._ready and self._timer is not None and not self.closed:
            assert self._offer is not None
            self._end_timer()
            self._sender.stand(self._offer)
            self._told(self, True)

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ---- what the peer says ------------------------------------------------------------------------

    def _heard(self, kind: Said, body: bytes) -> None:
        """Raises BadWire."""
        if not self._begun and not self.closed:
            self._begin()
        match kind:
            case Said.LET_GO:
                self._peer_let_go = True
                self._part()
            case Said.CLOSING:
                self._shut(f"closed by the peer: {body.decode(errors='replace')}")
            case _ if self.closed:
                pass
            case Said.OFFER:
                if self._offer is not None:
                    raise BadWire("a second offer")
                self._offer = wire.parse_offer(body)
                if self._sender.end is not None:
                    self._join(self._offer)
            case Said.READY:
                if self._offer is None:
                    raise BadWire("ready before its offer")
                self._ready = True
                self._stand_if_open()
            case Said.RING:
                self._means.poller.wake()
            case Said.CREDIT:
                self._sender.credited(wire.parse_slots(body))
            case Said.GROW:
                self._asked_to_grow(*wire.parse_grow(body))
            case Said.GREW:
                self._sender.grew(wire.parse_grew(body))

    def _asked_to_grow(self, slot: int, size: int, direct: bool) -> None:
        try:
            region: Memory = (self._incoming.grow_direct if direct else self._incoming.grow)(slot, size)
        except BadWire:
            raise
        except Exception as error:  # the device's own
            self.close(f"no memory for {size} bytes: {type(error).__name__}: {error}")
            return

        def tell(metadata: bytes) -> None:
            grew = Grew(slot, Place(region.address, region.capacity), metadata, direct)
            self._from_poller(self._control.say, Said.GREW, wire.build_grew(grew))

        if self._sender.end is not None:
            self._means.poller.submit(partial(self._sender.end.extend, region, tell))

    def _noted(self, notes: list[bytes]) -> None:
        try:
            for data in notes:
                note = wire.parse_note(data)
                if note.kind is Noted.HELLO:
                    self._passed = True
                    self._control.say(Said.READY)
                    self._stand_if_open()
                elif not self.closed:
                    for arrived in self._incoming.take(note):
                        self._flow.put_frame(NixlFrame(arrived, self.release_slot))
        except BadWire as error:
            self.close(f"not our format: {error}")

    # ---- the end -----------------------------------------------------------------------------------

    def _lost(self, why: str) -> None:
        """The control connection is gone: nothing more is heard of the peer."""
        self._means.links.discard(self)
        self._shut(why)
        self._heard_last = True
        self._forget()

    def _shut(self, why: str) -> None:
        if self.closed:
            return
        self._end_timer()
        self._flow.shut(why)
        self._sender.shut(why)
        self._told(self, False)
        if self._sender.end is not None:
            self._means.poller.submit(self._close_end)

    def _close_end(self) -> None:
        """On the poller's thread."""
        assert self._sender.end is not None
        self._means.poller.remove(self._sender.end)
        self._from_poller(self._ended, self._sender.end.close())

    def _ended(self, certain: bool) -> None:
        """Our agent is gone. `certain`: none of our writes is under way."""
        self._let_go = True
        if certain:
            self._control.say(Said.LET_GO)
        if self._lanes is Lanes.SHM and self._offer is not None and not self._peer_let_go:
            same = self._offer.pid_namespace == pid_namespace()
            if same:
                peer = Process(self._offer.pid)
                self._held = self._means.quarantine.hold(self._incoming.regions, peer)
        self._part()
        self._loop.call_later(self._options.send_timeout_s, self._control.close)
        self._forget()

    def _forget(self) -> None:
        """Once nothing happens here any more. What refers to itself would keep its slots until the next
        whole collection, which a service practically never makes."""
        if self._heard_last and (self._let_go or not self._begun):
            self._control.forget()
            self._incoming.forget()
            self._sender.forget()

    def _part(self) -> None:
        """Both have let go: the connection has nothing more to say."""
        if self._peer_let_go and self._held is not None:
            self._means.quarantine.let_go(self._held)
            self._held = None
        if self._peer_let_go and self._let_go:
            self._control.close()
