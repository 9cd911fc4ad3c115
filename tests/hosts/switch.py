"""An Ethernet switch in user space that holds frames back: `python -m tests.hosts.switch NAMESPACE...`

Each namespace gets an interface `eth0`, whose other end is here. All frames lie in one line, in order, until
their time has come: a wire of any length, as many frames under way as come. Ways from one host to another can
be cut. Orders come as JSON, one a line, on standard input, whose end ends it; `ok` says that one is in force.
The loop is a `select` of its own, because uvloop's timers count whole milliseconds and wires do not.
"""

import ctypes
import fcntl
import json
import os
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

INTERFACE = "eth0"
MAC_PREFIX = bytes((2, 0, 0, 0, 0))  # then the host's number, from 1
FRAME_BYTES_MAX = 1 << 16
LINE_BYTES_MAX = 256 << 20  # what comes beyond it is lost, as with any switch
FRAMES_AT_ONCE = 64  # of one host, before the others have their turn
NICENESS = -10  # a wire waits for no processor
_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_CLONE_NEWNET = 0x40000000
_PR_SET_TIMERSLACK = 29
_libc = ctypes.CDLL(None, use_errno=True)

Send = Callable[[int, bytes], None]


class Line:
    """Frames under way. Hosts are numbered from 1; `delay_s` is of every way."""

    def __init__(self, num_hosts: int, send: Send) -> None:
        self._hosts = range(1, num_hosts + 1)
        self._send = send
        self._frames: deque[tuple[float, int, bytes]] = deque()
        self._bytes = 0
        self.delay_s = 0.0
        self.cut: Collection[tuple[int, int]] = ()  # ways, from one host to another
        self.lost = 0

    def put(self, sender: int, frame: bytes, now: float) -> None:
        """A frame came from a host's interface."""
        for receiver in self._receivers(sender, frame):
            if (sender, receiver) in self.cut or self._bytes + len(frame) > LINE_BYTES_MAX:
                self.lost += 1
            else:
                self._frames.append((now + self.delay_s, receiver, frame))
                self._bytes += len(frame)

    def pass_on(self, now: float) -> float | None:
        """Sends what is due; returns how long the next one waits, None if there is none."""
        frames = self._frames
        while frames:
            due, receiver, frame = frames[0]
            if due > now:
                return due - now
            frames.popleft()
            self._bytes -= len(frame)
            self._send(receiver, frame)
        return None

    def _receivers(self, sender: int, frame: bytes) -> Sequence[int]:
        if frame[0] & 1:  # to all
            return [host for host in self._hosts if host != sender]
        known = frame[:5] == MAC_PREFIX and frame[5] in self._hosts and frame[5] != sender
        return (frame[5],) if known else ()

    def order(self, text: str) -> None:
        """`{"delay_s": 0.001, "cut": [[1, 2]]}`: what is from now on."""
        wanted = json.loads(text)
        self.delay_s = float(wanted["delay_s"])
        self.cut = {(int(sender), int(receiver)) for sender, receiver in wanted["cut"]}


def interface_in(namespace: str) -> int:
    """The other end of a new `eth0` there. Raises OSError."""
    with inside(namespace):
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        wanted = struct.pack("16sH22x", INTERFACE.encode(), _IFF_TAP | _IFF_NO_PI)
        fcntl.ioctl(end, _TUNSETIFF, wanted)
    return end


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """This thread opens its sockets and starts its processes there. Raises OSError."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(Path("/run/netns") / namespace, os.O_RDONLY)
    try:
        _enter(there)
        try:
            yield
        finally:
            _enter(home)
    finally:
        os.close(there)
        os.close(home)


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _read_some(line: Line, host: int, end: int) -> None:
    for _ in range(FRAMES_AT_ONCE):
        try:
            frame = os.read(end, FRAME_BYTES_MAX)
        except OSError:  # no more of them, or the interface is down
            return
        line.put(host, frame, time.monotonic())


def serve(ends: Sequence[int]) -> None:
    """Until standard input ends."""
    hosts = {end: number for number, end in enumerate(ends, 1)}

    def send(host: int, frame: bytes) -> None:
        try:
            os.write(ends[host - 1], frame)
        except OSError:  # nobody takes it: the interface is down
            line.lost += 1

    line = Line(len(ends), send)
    orders = sys.stdin.fileno()
    wait_s: float | None = None
    while True:
        readable, _, _ = select.select([orders, *ends], [], [], wait_s)
        for end in readable:
            if end in hosts:
                _read_some(line, hosts[end], end)
        if orders in readable:
            text = sys.stdin.readline()
            if not text:
                return
            line.order(text)
            _say_ok()
        wait_s = line.pass_on(time.monotonic())


def _say_ok() -> None:
    sys.stdout.write("ok\n")
    sys.stdout.flush()


def main(namespaces: Sequence[str]) -> None:
    _libc.prctl(_PR_SET_TIMERSLACK, 1)
    with suppress(PermissionError):
        os.nice(NICENESS)
    ends = [interface_in(namespace) for namespace in namespaces]
    _say_ok()
    serve(ends)


if __name__ == "__main__":
    main(sys.argv[1:])
