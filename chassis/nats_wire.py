"""Pure. Messages as they stand on a connection to NATS: taken out of its bytes, and put into bytes.

All that is no message (pings, the server's words, errors) is handed on line by line, for the library to
answer. What can't be read is handed on too, with all that follows: the library then closes the connection.
That only the broker can bring about: what others put into a message ends no connection.
"""

import re
from collections.abc import Callable

from chassis.bus import Headers, Message

LINE_BYTES_MAX = 1 << 16
MESSAGE_BYTES_MAX = 1 << 27

_LINE_END = b"\r\n"
_VERSION = b"NATS/1.0"
_STATUS_LEN = 3
_ODD_SUBJECT = re.compile(r"[\s\x00]")
_ODD_KEY = re.compile(r"[\s:\x00]")
_ODD_VALUE = re.compile(r"[\r\n\x00]")

Deliver = Callable[[int, Message], None]  # the number of its subscription


class MessageStream:
    """Of one connection, from where its greeting ended."""

    def __init__(self, deliver: Deliver, others: Callable[[bytes], None]) -> None:
        self._deliver = deliver
        self._others = others
        self._held = bytearray()  # the beginning of what is not whole yet
        self._wanted = 0  # bytes that it has at least
        self._broken = False

    def feed(self, data: bytes) -> None:
        if self._held:
            self._held += data
            if len(self._held) < self._wanted:
                return
            data = bytes(self._held)
            self._held.clear()
        if self._broken:
            self._others(data)
            return
        at, end, self._wanted = 0, len(data), 0
        try:
            while at < end and (next_at := self._take(data, at)):
                at = next_at
        except ValueError:
            self._broken = True
            self._others(data[at:])
            return
        self._held += data[at:]

    def _take(self, data: bytes, at: int) -> int:
        """One message or line; returns where it ends, 0 when that is not there yet. Raises ValueError."""
        line_end = data.find(_LINE_END, at)
        if line_end < 0:
            if len(data) - at > LINE_BYTES_MAX:
                raise ValueError("a line without end")
            return 0
        begin = line_end + 2
        if data.startswith(b"MSG ", at):
            subject, sid, *reply, size = data[at + 4 : line_end].split()
            headers_end = begin
        elif data.startswith(b"HMSG ", at):
            subject, sid, *reply, headers_size, size = data[at + 5 : line_end].split()
            headers_end = begin + int(headers_size)
        else:
            self._others(data[at:begin])
            return begin
        payload_end = begin + int(size)
        if len(reply) > 1 or not begin <= headers_end <= payload_end <= begin + MESSAGE_BYTES_MAX:
            raise ValueError("not a message")
        if payload_end + 2 > len(data):
            self._wanted = payload_end + 2 - at
            return 0
        number, name = int(sid), _text(subject)
        headers = parse_headers(data[begin:headers_end]) if headers_end > begin else {}
        answer_to = _text(reply[0]) if reply else None
        self._deliver(number, Message(name, data[headers_end:payload_end], answer_to, headers))
        return payload_end + 2


def _text(name: bytes) -> str:
    """The broker does not look at what others call their subjects."""
    return name.decode(errors="replace")


def parse_headers(data: bytes) -> Headers:
    """A status of the server is `Status`, what it says to it `Description`. Nothing of another version: the
    broker passes on whatever it was sent."""
    first, *lines = _text(data).split("\r\n")
    if not data.startswith(_VERSION):
        return {}
    headers: dict[str, str] = {}
    words = first[len(_VERSION) :].strip()
    if words[:_STATUS_LEN].isdigit():
        headers["Status"] = words[:_STATUS_LEN]
        if description := words[_STATUS_LEN:].strip():
            headers["Description"] = description
    for line in lines:
        key, colon, value = line.partition(":")
        if colon:
            headers[key.strip()] = value.strip()
    return headers


def build_publish(subject: str, data: bytes, reply: str = "", headers: Headers | None = None) -> bytes:
    """Empty for what no message can say: a space in its subject, a line's end in its headers."""
    if not subject or _ODD_SUBJECT.search(subject) or _ODD_SUBJECT.search(reply):
        return b""
    if not headers:
        return b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), reply.encode(), len(data), data)
    lines = [_VERSION.decode()]
    for key, value in headers.items():
        if not key or _ODD_KEY.search(key) or _ODD_VALUE.search(value):
            return b""
        lines.append(f"{key}: {value}")
    head = ("\r\n".join(lines) + "\r\n\r\n").encode()
    sizes = len(head), len(head) + len(data)
    return b"HPUB %b %b %d %d\r\n%b%b\r\n" % (subject.encode(), reply.encode(), *sizes, head, data)


def size_of(data: bytes, headers: Headers | None) -> int:
    """As the broker counts: headers are part of a message."""
    if not headers:
        return len(data)
    return len(data) + 12 + sum(len(k.encode()) + len(v.encode()) + 4 for k, v in headers.items())
