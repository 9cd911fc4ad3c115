"""One end of a link over NIXL: each frame is written into a slot of the peer, and a notification says so.

How it opens: the ends, joined by a greeted TCP connection, tell each other agent and slots (OFFER), connect,
and send a first notification through NIXL; who gets it says READY. So an open link has passed data both ways.
Then a sender takes a credit and its slot and copies header and payload into registered memory, from where the
poller writes; the receiver hands the slot out as a frame and gives the credit back over the TCP connection,
whose loss is the link's end.
"""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from chassis import log
from chassis.errors import LinkClosed
from chassis.transport import nixl_wire as wire
from chassis.transport.flow import Flow, check_size
from chassis.transport.interface import LinkOptions
from chassis.transport.nixl_agent import Agent, AgentError, Lanes
from chassis.transport.nixl_control import Control
from chassis.transport.nixl_end import End
from chassis.transport.nixl_poller import Poller
from chassis.transport.nixl_quarantine import Process, Quarantine, pid_namespace
from chassis.transport.nixl_slots import Incoming, NixlFrame, Outgoing
from chassis.transport.nixl_wire import BadWire, Grew, Note, Noted, Offer, Place, Said
from chassis.transport.socket_link import SocketLink

Told = Callable[["NixlLink", bool], None]  # once True when the link stands; False when it is lost

INLINE_BYTES_MAX = 2 << 10  # smaller frames travel within their notification
RING_AFTER_S = 2e-3  # of silence: then the peer's poller may sleep


@dataclass(frozen=True, slots=True)
class Means:
    """What the links of one process share."""

    make_agent: Callable[[str, Lanes], Agent]  # raises AgentError; called on a thread of its own
    poller: Poller
    quarantine: Quarantine
    links: "set[NixlLink]" = field(default_factory=set)  # until their control connection is gone
    making: "set[asyncio.Future[tuple[Agent, bytes]]]" = field(default_factory=set)


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
        self._outgoing = Outgoing()
        self._control = Control(self._heard, self._lost)
        self._end: End | None = None
        self._metadata = b""
        self._offer: Offer | None = None  # the peer's
        self._speaks_first = False
        self._begun = False
        self._timer: asyncio.TimerHandle | None = None
        self._passed = self._ready = False  # data has: to us, to the peer
        self._grown: dict[int, asyncio.Future[None]] = {}
        self._sent_at = 0.0
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
        check_size(header, payload, self._outgoing.slot_bytes)
        size = len(header) + memoryview(payload).nbytes
        try:
            await self._flow.take_credit(self._options.send_timeout_s)
            slot = self._outgoing.spend(size)
            if size > max(INLINE_BYTES_MAX, self._outgoing.place(slot).capacity):
                await self._grow(slot, size)
        except TimeoutError:
            self.close("the peer took no frame in time")
            raise LinkClosed("the peer took no frame in time") from None
        self._post(slot, header, payload, size)

    def send_now(self, header: bytes, payload: bytes | memoryview = b"") -> bool:
        check_size(header, payload, self._outgoing.slot_bytes)
        size = len(header) + memoryview(payload).nbytes
        self._flow.check_open()
        if not self._outgoing.fits(size) or not self._flow.take_credit_now():
            return False
        self._post(self._outgoing.spend(size), header, payload, size)
        return True

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

    async def _grow(self, slot: int, size: int) -> None:
        """Raises TimeoutError, LinkClosed. Who is cancelled leaves the slot to others, once it has grown."""
        grown = self._grown[slot] = self._loop.create_future()
        self._outgoing.growing(slot)
        self._control.say(Said.GROW, wire.build_grow(slot, size))
        try:
            async with asyncio.timeout(self._options.send_timeout_s):
                await grown
        except asyncio.CancelledError:
            if grown.done() and not grown.cancelled() and grown.exception() is None:
                self._return(slot)
            raise

    def _post(self, slot: int, header: bytes, payload: bytes | memoryview, size: int) -> None:
        assert self._end is not None
        now, submit = self._loop.time(), self._means.poller.submit
        body = memoryview(payload).cast("B") if size > len(header) else memoryview(b"")
        number = self._outgoing.next_number()
        if size <= INLINE_BYTES_MAX:
            inline = Note(Noted.INLINE, number, slot, len(header), len(body), header + body)
            submit(partial(self._end.notify, wire.build_note(inline)))
        else:
            staging, new = self._outgoing.staging(slot, size)
            if new:
                submit(partial(self._end.register, staging.region))
            staging.region.view[: len(header)] = header
            staging.region.view[len(header) : size] = body
            staging.busy = True
            note = wire.build_note(Note(Noted.WRITTEN, number, slot, len(header), len(body)))
            place = self._outgoing.place(slot)
            submit(partial(self._end.write, now, slot, staging, size, place, note))
        if now - self._sent_at > RING_AFTER_S:
            self._control.say(Said.RING)
        self._sent_at = now

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
        making = self._loop.run_in_executor(None, self._make)
        self._means.making.add(making)
        making.add_done_callback(self._made)

    def _make(self) -> tuple[Agent, bytes]:
        """On a thread of its own: UCX takes its time."""
        agent = self._means.make_agent(self._name, self._lanes)
        try:
            agent.register(self._incoming.regions)
            return agent, agent.metadata()
        except AgentError:
            agent.close()
            raise

    def _made(self, made: "asyncio.Future[tuple[Agent, bytes]]") -> None:
        self._means.making.discard(made)
        if made.cancelled() or (error := made.exception()) is not None:
            why = "the loop ends" if made.cancelled() else str(error)
            if not made.cancelled() and not isinstance(error, AgentError):
                log.warning("no NIXL agent", error=f"{type(error).__name__}: {error}")
            self.close(why)
            self._ended(True)
            return
        agent, self._metadata = made.result()
        self._end = end = End(
            agent,
            self._options.send_timeout_s,
            tell_notes=partial(self._from_poller, self._noted),
            tell_written=partial(self._from_poller, self._written),
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
            self._name, self._metadata, self._incoming.places, slot_bytes, os.getpid(), pid_namespace()
        )
        self._control.say(Said.OFFER, wire.build_offer(offer))

    def _join(self, offer: Offer) -> None:
        assert self._end is not None
        if not self._speaks_first:
            self._say_offer()
        self._means.poller.submit(partial(self._end.connect, offer.metadata))
        self._means.poller.submit(partial(self._end.notify, wire.build_note(Note(Noted.HELLO))))

    def _stand_if_open(self) -> None:
        if self._passed and self._ready and self._timer is not None and not self.closed:
            assert self._offer is not None
            self._end_timer()
            self._flow.add_credits(self._outgoing.begin(self._offer))
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
                if self._end is not None:
                    self._join(self._offer)
            case Said.READY:
                if self._offer is None:
                    raise BadWire("ready before its offer")
                self._ready = True
                self._stand_if_open()
            case Said.RING:
                self._means.poller.wake()
            case Said.CREDIT:
                for slot in wire.parse_slots(body):
                    if self._outgoing.credited(slot):
                        self._flow.add_credits(1)
            case Said.GROW:
                self._asked_to_grow(*wire.parse_grow(body))
            case Said.GREW:
                self._grew(wire.parse_grew(body))

    def _asked_to_grow(self, slot: int, size: int) -> None:
        region = self._incoming.grow(slot, size)

        def tell(metadata: bytes) -> None:
            grew = Grew(slot, Place(region.address, region.capacity), metadata)
            self._from_poller(self._control.say, Said.GREW, wire.build_grew(grew))

        if self._end is not None:
            self._means.poller.submit(partial(self._end.extend, region, tell))

    def _grew(self, grew: Grew) -> None:
        self._outgoing.grew(grew.slot, grew.place)
        if self._end is not None:
            self._means.poller.submit(partial(self._end.connect, grew.metadata))
        waiting = self._grown.pop(grew.slot)
        if waiting.done():
            self._return(grew.slot)  # who waited has been cancelled
        else:
            waiting.set_result(None)

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

    def _written(self, slot: int) -> None:
        if not self.closed and self._outgoing.written(slot):
            self._flow.add_credits(1)

    def _return(self, slot: int) -> None:
        """A slot that was taken and not sent."""
        if not self.closed:
            self._outgoing.free(slot)
            self._flow.add_credits(1)

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
        for waiting in self._grown.values():
            if not waiting.done():
                waiting.set_exception(LinkClosed(why))
        self._grown.clear()
        self._told(self, False)
        if self._end is not None:
            self._means.poller.submit(self._close_end)

    def _close_end(self) -> None:
        """On the poller's thread."""
        assert self._end is not None
        self._means.poller.remove(self._end)
        self._from_poller(self._ended, self._end.close())

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
            self._end = None
            self._incoming.forget()
            self._outgoing.forget()

    def _part(self) -> None:
        """Both have let go: the connection has nothing more to say."""
        if self._peer_let_go and self._held is not None:
            self._means.quarantine.let_go(self._held)
            self._held = None
        if self._peer_let_go and self._let_go:
            self._control.close()
