"""One end of a link over a TCP or unix socket: bytes go straight from the kernel into their slot.

On the wire: a 16-byte prefix (magic, kind, header length, payload length), then the header, then the
payload. The dialling end greets with what it offers (slots, slot size) and its hello; the other end
answers with its own offer. A frame spends one of the peer's slots; releasing it gives a credit back. Credits
go back together when they are for half of the slots: each write wakes the peer.
Whatever does not fit this (wrong magic, a length above the limit, a frame without a slot) closes that
one connection. Slots grow on demand up to their limit, so that links of small frames stay small.
"""

import asyncio
import socket
import struct
from collections.abc import Callable
from enum import IntEnum
from typing import cast

from chassis.errors import LinkClosed
from chassis.transport.flow import Flow, Waiters, check_size
from chassis.transport.interface import HEADER_BYTES_MAX, LinkOptions
from chassis.transport.registered import MemoryRange

Told = Callable[["SocketLink", bool], None]  # once True when the link stands; False when it is lost

_PREFIX = struct.Struct("<HBBIQ")  # magic, kind, reserved, header length, payload length
_OFFER = struct.Struct("<IQ")  # slots, slot_bytes
_MAGIC = 0x51A0  # with the version of this format in its last digit
_STAGING_BYTES = 16 << 10  # small frames arrive through here in one read
_JOINED_BYTES_MAX = 32 << 10  # smaller frames are written in one call
_SLOT_BYTES_MIN = 4 << 10
_SLOTS_MAX = 1024
_KEEPALIVE_S = 1  # idle time and interval of the kernel's probes
_KEEPALIVE_COUNT = 3


class _Kind(IntEnum):
    HELLO = 1
    WELCOME = 2
    FRAME = 3
    CREDIT = 4


_FRAME = int(_Kind.FRAME)
_CREDIT_KIND = int(_Kind.CREDIT)
_NOTHING = memoryview(b"")
_CREDIT = _PREFIX.pack(_MAGIC, _Kind.CREDIT, 0, 0, 0)


class _BadBytes(Exception):
    """The peer does not speak this format."""


class SocketFrame:
    direct: MemoryRange | None = None

    def __init__(self, link: "SocketLink", header: bytes, slot: int, payload: memoryview) -> None:
        self._link = link
        self._header = header
        self._slot = slot
        self._payload = payload
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
            self._link.release_slot(self._slot)


class SocketLink(asyncio.BufferedProtocol):
    """One end, protocol and link at once. Receives in three targets: prefix, header, payload."""

    def __init__(self, kind: str, listening: bool, options: LinkOptions, hello: bytes, told: Told) -> None:
        self._kind = kind
        self._listening = listening
        self._options = options
        self._hello = hello
        self._told = told
        self._transport: asyncio.Transport | None = None
        self._flow: Flow[SocketFrame] = Flow(credits=0, slots=options.slots)
        self._peer_slot_bytes = 0
        self._standing = False  # both offers are known
        self._writable = True
        self._drained = Waiters()
        self._slots = [bytearray() for _ in range(options.slots)]
        self._free_slots = list(range(options.slots))
        self._owed = 0  # credits that the peer has not got yet
        self._owed_max = max(1, options.slots // 2)
        self._staging = memoryview(bytearray(_STAGING_BYTES))
        self._prefix = bytearray(_PREFIX.size)
        self._between = False  # nothing has come of the next frame
        self._expect_prefix()

    # ---- the link ----------------------------------------------------------------------------------

    @property
    def hello(self) -> bytes:
        return self._hello

    @property
    def kind(self) -> str:
        return self._kind

    @property
    def closed(self) -> bool:
        return self._flow.closed is not None

    async def send(self, header: bytes, payload: bytes | memoryview = b"") -> None:
        check_size(header, memoryview(payload).nbytes, self._peer_slot_bytes)
        try:
            await self._flow.take_credit(self._options.send_timeout_s)
            self._write(_Kind.FRAME, header, payload)
            if not self._writable:
                await self._drain()
        except TimeoutError:
            self.close("the peer took no frame in time")
            raise LinkClosed("the peer took no frame in time") from None

    def send_now(self, header: bytes, payload: bytes | memoryview = b"") -> bool:
        """Never of larger payloads: what the kernel does not take at once would have to be copied."""
        check_size(header, memoryview(payload).nbytes, self._peer_slot_bytes)
        if not self._writable or len(header) + memoryview(payload).nbytes > _JOINED_BYTES_MAX:
            return False
        if not self._flow.take_credit_now():
            return False
        self._write(_Kind.FRAME, header, payload)
        return True

    async def receive(self) -> SocketFrame:
        return await self._flow.take_frame()

    def close(self, why: str = "closed here") -> None:
        self._flow.shut(why)
        self._drained.wake_all()
        if self._transport is not None:
            self._transport.abort()

    def release_slot(self, slot: int) -> None:
        self._free_slots.append(slot)
        self._owed += 1
        if self._owed >= self._owed_max and self._flow.closed is None:
            assert self._transport is not None
            self._transport.write(_CREDIT * self._owed)
            self._owed = 0

    def say_hello(self) -> None:
        self._write(_Kind.HELLO, _offer(self._options) + self._hello)

    def hand_over(self, protocol: asyncio.BufferedProtocol) -> asyncio.Transport:
        """The connection goes on under another protocol, right after the greeting. Raises LinkClosed.

        The end that accepted says nothing before it has heard something: the other may not be that far.
        """
        self._flow.check_open()
        transport, self._transport = self._transport, None
        assert transport is not None and self._standing
        transport.set_protocol(protocol)
        self._flow.shut("handed over")
        self._told(self, False)
        return transport

    async def _drain(self) -> None:
        """Until the kernel has all: before that the payload is not ours to give back."""
        try:
            async with asyncio.timeout(self._options.send_timeout_s):
                while not self._writable:
                    await self._drained.wait()
                    self._flow.check_open()
        except asyncio.CancelledError:
            self.close("a send was broken off")
            raise

    def _write(self, kind: _Kind, header: bytes = b"", payload: bytes | memoryview = b"") -> None:
        assert self._transport is not None
        view = memoryview(payload)
        head = _PREFIX.pack(_MAGIC, kind, 0, len(header), view.nbytes) + header
        if not view.nbytes:
            self._transport.write(head)
            return
        view = view.cast("B")
        if len(view) <= _JOINED_BYTES_MAX:
            self._transport.write(head + view)
        else:
            self._transport.write(head)
            self._transport.write(view)

    # ---- asyncio's protocol ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=0)
        sock = transport.get_extra_info("socket")
        if sock is not None and self._kind == "tcp":
            _tune(sock, self._options.send_timeout_s)
        if self.closed:
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._flow.shut("connection lost" if error is None else f"connection lost: {error}")
        self._drained.wake_all()
        self._told(self, False)

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self._drained.wake_all()

    def get_buffer(self, size_hint: int) -> memoryview:
        """The target itself when much is missing, else the staging buffer."""
        missing = len(self._target) - self._filled
        return self._target[self._filled :] if missing >= _STAGING_BYTES else self._staging

    def buffer_updated(self, count: int) -> None:
        if self._flow.closed is not None:
            return
        try:
            if len(self._target) - self._filled >= _STAGING_BYTES:
                self._filled += count
                self._advance()
            else:
                self._take(self._staging[:count])
        except _BadBytes as error:
            self.close(f"not our format: {error}")

    def _take(self, data: memoryview) -> None:
        while data and self._flow.closed is None:
            if self._between and (taken := self._take_whole(data)):
                data = data[taken:]
                continue
            part = data[: len(self._target) - self._filled]
            self._target[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            self._between = False
            data = data[len(part) :]
            self._advance()

    def _take_whole(self, data: memoryview) -> int:
        """A small frame that is there as a whole, as most are. Returns its bytes; 0: it goes the long way."""
        if len(data) < _PREFIX.size:
            return 0
        magic, kind, _, header_len, payload_len = _PREFIX.unpack_from(data)
        header_end = _PREFIX.size + header_len
        end: int = header_end + payload_len
        if kind == _CREDIT_KIND and data[: _PREFIX.size] == _CREDIT and self._flow.credits < _SLOTS_MAX:
            self._flow.add_credits(1)
            return _PREFIX.size
        if kind != _FRAME or magic != _MAGIC or end > len(data) or not self._free_slots:
            return 0
        if payload_len > self._options.slot_bytes:
            return 0
        slot = self._free_slots.pop()
        target = _NOTHING
        if payload_len:
            target = self._target_of(slot, payload_len)
            target[:] = data[header_end:end]
        self._flow.put_frame(SocketFrame(self, bytes(data[_PREFIX.size : header_end]), slot, target))
        return end

    def _target_of(self, slot: int, payload_len: int) -> memoryview:
        buffer = self._slots[slot]
        if len(buffer) < payload_len:
            size = max(_SLOT_BYTES_MIN, 1 << (payload_len - 1).bit_length())
            buffer = self._slots[slot] = bytearray(min(size, self._options.slot_bytes))
        return memoryview(buffer)[:payload_len]

    def _advance(self) -> None:
        """Goes on to the next target whenever one is full; empty ones are full at once."""
        while self._filled == len(self._target) and self._flow.closed is None:
            self._next(self)

    # ---- targets -----------------------------------------------------------------------------------

    def _expect(self, target: memoryview, following: Callable[["SocketLink"], None]) -> None:
        """`following`: of the class: a link that refers to itself would keep its slots when it is closed."""
        self._target, self._filled, self._next = target, 0, following

    def _expect_prefix(self) -> None:
        self._between = self._standing
        self._expect(memoryview(self._prefix), SocketLink._prefix_done)

    def _prefix_done(self) -> None:
        magic, kind, _, header_len, payload_len = _PREFIX.unpack(self._prefix)
        if magic != _MAGIC or header_len > HEADER_BYTES_MAX or payload_len > self._options.slot_bytes:
            raise _BadBytes("prefix")
        first = _Kind.HELLO if self._listening else _Kind.WELCOME
        allowed = (_Kind.FRAME, _Kind.CREDIT) if self._standing else (first,)
        if kind not in allowed or (kind != _Kind.FRAME and payload_len):
            raise _BadBytes(f"kind {kind}")
        if kind == _Kind.FRAME and not self._free_slots:
            raise _BadBytes("a frame without a slot")
        self._arriving = _Kind(kind)
        self._arriving_payload = payload_len
        self._header = bytearray(header_len)
        self._expect(memoryview(self._header), SocketLink._header_done)

    def _header_done(self) -> None:
        match self._arriving:
            case _Kind.FRAME:
                self._slot = self._free_slots.pop()
                self._expect(self._target_of(self._slot, self._arriving_payload), SocketLink._payload_done)
                return
            case _Kind.CREDIT:
                if self._flow.credits >= _SLOTS_MAX:
                    raise _BadBytes("credits from nowhere")
                self._flow.add_credits(1)
            case _Kind.HELLO | _Kind.WELCOME:
                self._stand()
        self._expect_prefix()

    def _payload_done(self) -> None:
        payload = self._target
        self._expect_prefix()
        self._flow.put_frame(SocketFrame(self, bytes(self._header), self._slot, payload))

    def _stand(self) -> None:
        if len(self._header) < _OFFER.size:
            raise _BadBytes("offer")
        slots, self._peer_slot_bytes = _OFFER.unpack_from(self._header)
        if not 0 < slots <= _SLOTS_MAX:
            raise _BadBytes("offer")
        if self._arriving is _Kind.HELLO:
            self._hello = bytes(self._header[_OFFER.size :])
            self._write(_Kind.WELCOME, _offer(self._options))
        self._standing = True
        self._flow.add_credits(slots)
        self._told(self, True)


def _offer(options: LinkOptions) -> bytes:
    assert 0 < options.slots <= _SLOTS_MAX
    return _OFFER.pack(options.slots, options.slot_bytes)


def _tune(sock: socket.socket, send_timeout_s: float) -> None:
    """No waiting for more to send; a peer that vanishes without a word is noticed by the kernel."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_COUNT)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(send_timeout_s * 1000))
