"""Messages in a connection's bytes, however these come in portions; the rest goes to whoever answers it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chassis.bus import Message
from chassis.nats_wire import MessageStream, build_publish, parse_headers

PLAIN = b"MSG shoal.tok.a 7 5\r\nhello\r\n"
ANSWERED = b"MSG a.b 12 _INBOX.x.1 4\r\n\r\n\r\n\r\n"
HEADED = b"HMSG a 3 re 21 23\r\nNATS/1.0\r\nk: v: w\r\n\r\nhi\r\n"
STATUS = b"HMSG inbox 3 30 30\r\nNATS/1.0 503 No Responders\r\n\r\n\r\n"
LINES = (
    b"PING\r\n",
    b"PONG\r\n",
    b"+OK\r\n",
    b'INFO {"max_payload":1048576}\r\n',
    b"-ERR 'Slow Consumer'\r\n",
)
MESSAGES = {
    PLAIN: (7, Message("shoal.tok.a", b"hello")),
    ANSWERED: (12, Message("a.b", b"\r\n\r\n", "_INBOX.x.1")),
    HEADED: (3, Message("a", b"hi", "re", {"k": "v: w"})),
    STATUS: (3, Message("inbox", b"", None, {"Status": "503", "Description": "No Responders"})),
}


class Heard:
    def __init__(self) -> None:
        self.messages: list[tuple[int, Message]] = []
        self.others = b""
        self.stream = MessageStream(lambda sid, m: self.messages.append((sid, m)), self._other)

    def _other(self, data: bytes) -> None:
        self.others += data


@given(
    st.lists(st.sampled_from((*MESSAGES, *LINES)), max_size=12),
    st.lists(st.integers(1, 40), min_size=1, max_size=20),
)
def test_portions_make_no_difference(items: list[bytes], sizes: list[int]) -> None:
    heard, data = Heard(), b"".join(items)
    for size in sizes * (len(data) + 1):
        if not data:
            break
        heard.stream.feed(data[:size])
        data = data[size:]
    assert heard.messages == [MESSAGES[item] for item in items if item in MESSAGES]
    assert heard.others == b"".join(item for item in items if item in LINES)


@pytest.mark.parametrize(
    "bad",
    [
        b"MSG a x 1\r\nb\r\n",
        b"MSG a 1\r\n",
        b"MSG a 1 -5\r\n",
        b"MSG a 1 b c 1\r\nx\r\n",
        b"MSG a 1 999999999999\r\n",
        b"HMSG a 1 9 3\r\nabc\r\n",
        b"x" * (1 << 17),
    ],
)
def test_what_cannot_be_read_ends_it(bad: bytes) -> None:
    """The library gets it and what follows, and closes the connection."""
    heard = Heard()
    heard.stream.feed(PLAIN + bad)
    heard.stream.feed(PLAIN)
    assert heard.messages == [MESSAGES[PLAIN]]
    assert heard.others == bad + PLAIN


@pytest.mark.parametrize(
    ("garbage", "heard_as"),
    [
        (b"HMSG a 1 4 5\r\nabcde\r\n", Message("a", b"e")),
        (b"HMSG a 1 3 3\r\n\xff\xfe\x00\r\n", Message("a", b"")),
        (b"MSG a 1 \xff\xfe 1\r\nz\r\n", Message("a", b"z", "\ufffd\ufffd")),
        (b"MSG a.\xff 1 1\r\nz\r\n", Message("a.\ufffd", b"z")),
    ],
)
def test_what_anybody_may_send_ends_no_connection(garbage: bytes, heard_as: Message) -> None:
    heard = Heard()
    heard.stream.feed(garbage + PLAIN)
    assert heard.messages == [(1, heard_as), MESSAGES[PLAIN]]
    assert not heard.others


def test_nothing_is_held_back_of_a_large_message() -> None:
    heard, payload = Heard(), bytes(1 << 20)
    data = b"MSG a 1 %d\r\n%b\r\n" % (len(payload), payload) + PLAIN
    for at in range(0, len(data), 1 << 16):
        heard.stream.feed(data[at : at + (1 << 16)])
    assert heard.messages == [(1, Message("a", payload)), MESSAGES[PLAIN]]


def test_messages_are_written_as_the_protocol_has_it() -> None:
    assert build_publish("a.b", b"hi") == b"PUB a.b  2\r\nhi\r\n"
    assert build_publish("a", b"", "re") == b"PUB a re 0\r\n\r\n"
    headed = build_publish("a", b"hi", "re", {"k": "v"})
    assert headed == b"HPUB a re 18 20\r\nNATS/1.0\r\nk: v\r\n\r\nhi\r\n"
    assert parse_headers(headed[17:-4]) == {"k": "v"}


@pytest.mark.parametrize("subject", ["", "a b", "a\r\nPUB b 0\r\n", "a\n"])
def test_a_subject_cannot_say_more(subject: str) -> None:
    assert build_publish(subject, b"") == b""
    if subject:
        assert build_publish("a", b"", subject) == b""


@pytest.mark.parametrize("headers", [{"k": "a\r\nb"}, {"k:": "v"}, {"": "v"}, {"k\n": "v"}])
def test_a_header_cannot_say_more(headers: dict[str, str]) -> None:
    assert build_publish("a", b"", "", headers) == b""
