"""The line of frames under way, by itself."""

import pytest

from tests.hosts.switch import LINE_BYTES_MAX, MAC_PREFIX, Line


def frame(receiver: int, text: bytes = b"") -> bytes:
    return MAC_PREFIX + bytes((receiver,)) + b"......" + text


class Wire:
    def __init__(self, num_hosts: int = 3) -> None:
        self.got: list[tuple[int, bytes]] = []
        self.line = Line(num_hosts, lambda host, frame: self.got.append((host, frame)))


def test_frames_come_in_order_after_the_delay() -> None:
    wire = Wire()
    wire.line.delay_s = 0.5
    wire.line.put(1, frame(2, b"a"), 10.0)
    wire.line.put(1, frame(3, b"b"), 10.2)
    assert wire.line.pass_on(10.4) == pytest.approx(0.1)
    assert wire.got == []
    assert wire.line.pass_on(10.5) == pytest.approx(0.2)
    assert wire.got == [(2, frame(2, b"a"))]
    assert wire.line.pass_on(11.0) is None
    assert wire.got[1] == (3, frame(3, b"b"))


def test_as_many_are_under_way_as_come() -> None:
    """A delay is no limit on what passes."""
    wire = Wire()
    wire.line.delay_s = 1.0
    for number in range(1000):
        wire.line.put(1, frame(2, b"%d" % number), number / 1000)
    wire.line.pass_on(1.9995)
    assert [text for _, text in wire.got] == [frame(2, b"%d" % number) for number in range(1000)]


def test_a_shorter_delay_lets_none_overtake() -> None:
    wire = Wire()
    wire.line.delay_s = 1.0
    wire.line.put(1, frame(2, b"slow"), 0.0)
    wire.line.order('{"delay_s": 0.0, "cut": []}')
    wire.line.put(1, frame(2, b"quick"), 0.1)
    wire.line.pass_on(0.2)
    assert wire.got == []
    wire.line.pass_on(1.0)
    assert [text[12:] for _, text in wire.got] == [b"slow", b"quick"]


def test_what_is_for_all_comes_to_all_others_and_what_is_for_nobody_is_lost() -> None:
    wire = Wire()
    wire.line.put(2, b"\xff" * 6 + b"......", 0.0)
    wire.line.put(2, frame(9), 0.0)
    wire.line.put(2, frame(2), 0.0)
    wire.line.put(2, b"\x00" * 14, 0.0)
    wire.line.pass_on(0.0)
    assert [host for host, _ in wire.got] == [1, 3]


def test_a_way_that_is_cut_is_cut_one_way() -> None:
    wire = Wire()
    wire.line.order('{"delay_s": 0.0, "cut": [[1, 2]]}')
    wire.line.put(1, frame(2), 0.0)
    wire.line.put(2, frame(1), 0.0)
    wire.line.put(1, b"\xff" * 6 + b"......", 0.0)
    wire.line.pass_on(0.0)
    assert [host for host, _ in wire.got] == [1, 3]
    assert wire.line.lost == 2


def test_beyond_its_bound_frames_are_lost() -> None:
    wire = Wire()
    wire.line.delay_s = 1.0
    large = frame(2, b"x" * (LINE_BYTES_MAX // 2))
    for _ in range(3):
        wire.line.put(1, large, 0.0)
    assert wire.line.lost == 2
    wire.line.pass_on(1.0)
    wire.line.put(1, large, 1.0)
    wire.line.pass_on(2.0)
    assert len(wire.got) == 2
