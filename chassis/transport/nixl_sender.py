"""The sending half of a NIXL link: a credit, its slot, a copy of the frame in registered memory, a note.

A slot that is too small is asked to grow before. The payload of a direct frame is not copied: the card reads
it where it lies, and whoever sends waits for that. All of it runs on the loop; what NIXL does, on the thread
of the poller.
"""

import asyncio
from collections.abc import Callable
from functools import partial

from chassis.errors import LinkClosed
from chassis.transport import nixl_wire as wire
from chassis.transport.flow import Flow, check_size
from chassis.transport.nixl_control import Control
from chassis.transport.nixl_end import End
from chassis.transport.nixl_poller import Poller
from chassis.transport.nixl_slots import NixlFrame, Outgoing
from chassis.transport.nixl_wire import Grew, Note, Noted, Offer, Said
from chassis.transport.registered import MemoryRange

INLINE_BYTES_MAX = 2 << 10  # smaller frames travel within their notification
RING_AFTER_S = 2e-3  # of silence: then the peer's poller may sleep
_NOTHING = memoryview(b"")


class Sender:
    """`from_poller`: calls something on the loop, from any thread."""

    def __init__(
        self,
        flow: Flow[NixlFrame],
        control: Control,
        poller: Poller,
        from_poller: Callable[..., None],
        timeout_s: float,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._flow = flow
        self._control = control
        self._poller = poller
        self._from_poller = from_poller
        self._timeout_s = timeout_s
        self.outgoing = Outgoing()
        self.end: End | None = None  # once there is one, until it is closed
        self.sends_direct = False  # what payloads lie in is registered
        self._grown: dict[int, asyncio.Future[None]] = {}
        self._reading: set[asyncio.Future[None]] = set()  # direct payloads that are being written
        self._sent_at = 0.0

    @property
    def takes_direct(self) -> bool:
        return self.sends_direct and self.outgoing.takes_direct

    # ---- frames ------------------------------------------------------------------------------------

    async def send(self, header: bytes, payload: bytes | memoryview) -> None:
        """Raises ValueError, TimeoutError, LinkClosed."""
        size = self._checked(header, memoryview(payload).nbytes)
        await self._flow.take_credit(self._timeout_s)
        slot = self.outgoing.spend(size)
        if size > max(INLINE_BYTES_MAX, self.outgoing.place(slot).capacity):
            await self._grow(slot, size)
        self._post(slot, header, payload, size)

    def send_now(self, header: bytes, payload: bytes | memoryview) -> bool:
        """Raises ValueError, LinkClosed."""
        size = self._checked(header, memoryview(payload).nbytes)
        self._flow.check_open()
        if not self.outgoing.fits(size) or not self._flow.take_credit_now():
            return False
        self._post(self.outgoing.spend(size), header, payload, size)
        return True

    async def send_direct(self, header: bytes, payload: MemoryRange) -> None:
        """Raises ValueError, TimeoutError, LinkClosed."""
        self._checked(header, payload.nbytes)
        await self._flow.take_credit(self._timeout_s)
        slot = self.outgoing.spend(len(header), payload.nbytes)
        if len(header) > max(INLINE_BYTES_MAX, self.outgoing.place(slot).capacity):
            await self._grow(slot, len(header))
        if payload.nbytes > self.outgoing.place(slot, direct=True).capacity:
            await self._grow(slot, payload.nbytes, direct=True)
        read = self._post_direct(slot, header, payload)
        try:
            await read
        finally:
            self._reading.discard(read)

    def _checked(self, header: bytes, payload_bytes: int) -> int:
        """The bytes of both. Raises ValueError."""
        check_size(header, payload_bytes, self.outgoing.slot_bytes)
        return len(header) + payload_bytes

    def _post(self, slot: int, header: bytes, payload: bytes | memoryview, size: int) -> None:
        body = memoryview(payload).cast("B") if size > len(header) else _NOTHING
        number = self.outgoing.next_number()
        if size <= INLINE_BYTES_MAX:
            self._notify(Note(Noted.INLINE, number, slot, len(header), len(body), header + body))
        else:
            self._write(Note(Noted.WRITTEN, number, slot, len(header), len(body)), header, body)
        self._ring()

    def _post_direct(self, slot: int, header: bytes, payload: MemoryRange) -> "asyncio.Future[None]":
        """Done once it has been read."""
        assert self.end is not None
        number, size = self.outgoing.next_number(), payload.nbytes
        if len(header) <= INLINE_BYTES_MAX:
            self._notify(Note(Noted.DIRECT_INLINE, number, slot, len(header), size, header))
        else:
            self._write(Note(Noted.DIRECT_WRITTEN, number, slot, len(header), size), header)
        note = wire.build_note(Note(Noted.DIRECT_PAYLOAD, number, slot, 0, size))
        place, read = self.outgoing.place(slot, direct=True), self._loop.create_future()
        done = partial(self._from_poller, _set, read)
        work = partial(self.end.write_from, self._loop.time(), payload, place, note, done)
        self._poller.submit(work)
        self._reading.add(read)
        self._ring()
        return read

    def _notify(self, note: Note) -> None:
        assert self.end is not None
        self._poller.submit(partial(self.end.notify, wire.build_note(note)))

    def _write(self, note: Note, header: bytes, body: memoryview = _NOTHING) -> None:
        """Copies it to where the poller writes it from."""
        assert self.end is not None
        size, submit = len(header) + len(body), self._poller.submit
        staging, new = self.outgoing.staging(note.slot, size)
        if new:
            submit(partial(self.end.register, staging.region))
        staging.region.view[: len(header)] = header
        staging.region.view[len(header) : size] = body
        staging.busy = True
        place, told = self.outgoing.place(note.slot), wire.build_note(note)
        submit(partial(self.end.write, self._loop.time(), note.slot, staging, size, place, told))

    def _ring(self) -> None:
        """Wakes the peer's poller."""
        now = self._loop.time()
        if now - self._sent_at > RING_AFTER_S:
            self._control.say(Said.RING)
        self._sent_at = now

    # ---- slots -------------------------------------------------------------------------------------

    def stand(self, offer: Offer) -> None:
        self._flow.add_credits(self.outgoing.begin(offer))

    def credited(self, slots: list[int]) -> None:
        """Raises BadWire."""
        for slot in slots:
            if self.outgoing.credited(slot):
                self._flow.add_credits(1)

    def written(self, slot: int) -> None:
        if self._flow.closed is None and self.outgoing.written(slot):
            self._flow.add_credits(1)

    async def _grow(self, slot: int, size: int, direct: bool = False) -> None:
        """Raises TimeoutError, LinkClosed. Who is cancelled leaves the slot to others, once it has grown."""
        grown = self._grown[slot] = self._loop.create_future()
        self.outgoing.growing(slot, direct)
        self._control.say(Said.GROW, wire.build_grow(slot, size, direct))
        try:
            async with asyncio.timeout(self._timeout_s):
                await grown
        except asyncio.CancelledError:
            if grown.done() and not grown.cancelled() and grown.exception() is None:
                self._return(slot)
            raise

    def grew(self, grew: Grew) -> None:
        """Raises BadWire."""
        self.outgoing.grew(grew.slot, grew.place, grew.direct)
        if self.end is not None:
            self._poller.submit(partial(self.end.connect, grew.metadata))
        waiting = self._grown.pop(grew.slot)
        if waiting.done():
            self._return(grew.slot)  # who waited has been cancelled
        else:
            waiting.set_result(None)

    def _return(self, slot: int) -> None:
        """A slot that was taken and not sent."""
        if self._flow.closed is None:
            self.outgoing.free(slot)
            self._flow.add_credits(1)

    def forget(self) -> None:
        """Nothing happens here any more."""
        self.end = None
        self._from_poller = _not_at_all
        self.outgoing.forget()

    def shut(self, why: str) -> None:
        """The link is closed."""
        for waiting in (*self._grown.values(), *self._reading):
            if not waiting.done():
                waiting.set_exception(LinkClosed(why))
        self._grown.clear()


def _not_at_all(*arguments: object) -> None:
    return None


def _set(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
