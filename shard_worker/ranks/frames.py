"""Frames between the processes of one stage, over a socket that blocks: what kind, how long, then the bytes.

Whoever is silent for longer than agreed is taken for lost, as is whoever closes or says what is no frame.
Many threads may send; one receives.
"""

import fcntl
import select
import socket
import struct
import sys
import termios
import threading
from enum import IntEnum

_HEADER = struct.Struct("<4sB3xQ")
_MAGIC = b"SRK1"
FRAME_BYTES_MAX = 8 << 30  # of those who are known: activations of a step, pages
_HUNG_UP = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)
JOINED_UP_MAX = 1 << 16  # sent in one piece


class Kind(IntEnum):
    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    PING = 4
    LOAD = 5
    BLOCKS = 6
    POOL = 7
    DONE = 8
    COPY = 9
    RUN = 10
    LOGITS = 11
    READ = 12
    WRITE = 13
    PAGES = 14


_KINDS = frozenset(map(int, Kind))


class PeerLost(Exception):
    """The other process is gone, silent, or says what is no frame; the message says which."""


class Frames:
    def __init__(self, sock: socket.socket, silence_s: float | None) -> None:
        self._sock = sock
        self._sending = threading.Lock()
        self._num_read = 0
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.allow(silence_s)

    def allow(self, silence_s: float | None) -> None:
        """That much silence from here on; None: any."""
        self._silence_s = silence_s
        self._sock.settimeout(silence_s)

    @property
    def local_host(self) -> str:
        return str(self._sock.getsockname()[0])

    @property
    def peer(self) -> str:
        return ":".join(map(str, self._sock.getpeername()[:2]))

    def send(self, kind: Kind, *parts: bytes | memoryview) -> None:
        """Raises PeerLost."""
        size = sum(part.nbytes if isinstance(part, memoryview) else len(part) for part in parts)
        header = _HEADER.pack(_MAGIC, kind, size)
        try:
            with self._sending:
                if size <= JOINED_UP_MAX:
                    self._sock.sendall(b"".join((header, *parts)))
                    return
                for part in (header, *parts):
                    self._sock.sendall(part)
        except OSError as error:
            raise PeerLost(f"can't be sent to: {error}") from None

    def receive(self, bytes_max: int = FRAME_BYTES_MAX) -> tuple[Kind, memoryview]:
        """Raises PeerLost."""
        magic, kind, size = _HEADER.unpack(self._exactly(_HEADER.size))
        if magic != _MAGIC or kind not in _KINDS:
            raise PeerLost("said what is no frame")
        if size > bytes_max:
            raise PeerLost(f"a frame of {size} bytes, at most {bytes_max}")
        return Kind(kind), self._exactly(size)

    def _exactly(self, size: int) -> memoryview:
        view = memoryview(bytearray(size))
        got = 0
        try:
            while got < size:
                count = self._sock.recv_into(view[got:])
                if not count:
                    raise PeerLost("closed its connection")
                got += count
                self._num_read += count
        except TimeoutError:
            raise PeerLost(f"silent for {self._silence_s:g} s") from None
        except OSError as error:
            raise PeerLost(f"can't be heard: {error}") from None
        return view

    @property
    def gone(self) -> bool:
        """Whether it has closed, without waiting; from any thread."""
        try:
            poll = select.poll()
            poll.register(self._sock, _HUNG_UP)
            return bool(poll.poll(0))
        except (OSError, ValueError):
            return True

    @property
    def num_come(self) -> int:
        """Bytes that have come, read or not: how one who does not read knows that the other lives. From any
        thread. Raises PeerLost."""
        try:
            waiting = fcntl.ioctl(self._sock, termios.FIONREAD, bytes(4))
        except (OSError, ValueError) as error:
            raise PeerLost(f"can't be heard: {error}") from None
        return self._num_read + int.from_bytes(waiting, sys.byteorder)

    def close(self) -> None:
        """Who waits in it is woken."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._sock.close()
