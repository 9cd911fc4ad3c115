"""However bytes are cut on their way, the same frames come out of a link, or it closes."""

import asyncio
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from chassis.transport import socket_link as wire
from chassis.transport.interface import LinkOptions

SLOTS, SLOT_BYTES = 6, 40_000
HELLO = wire._PREFIX.pack(wire._MAGIC, wire._Kind.HELLO, 0, wire._OFFER.size, 0) + wire._OFFER.pack(2, 64)


class Taken:
    """A connection whose other end takes all."""

    def __init__(self) -> None:
        self.aborted = False

    def write(self, data: bytes) -> None:
        return None

    def abort(self) -> None:
        self.aborted = True

    def set_write_buffer_limits(self, high: int) -> None:
        return None

    def get_extra_info(self, name: str) -> None:
        return None


def frame(header: bytes, payload: bytes, kind: int = wire._Kind.FRAME, magic: int = wire._MAGIC) -> bytes:
    return wire._PREFIX.pack(magic, kind, 0, len(header), len(payload)) + header + payload


def received(data: bytes, cuts: list[int]) -> tuple[list[tuple[bytes, bytes]], bool, int]:
    """Frames, whether the link stands, and its credits. What arrives is released after each piece."""

    async def main() -> tuple[list[tuple[bytes, bytes]], bool, int]:
        connection = Taken()
        told: Callable[[Any, bool], None] = lambda link, standing: None  # noqa: E731
        link = wire.SocketLink("unix", True, LinkOptions(SLOTS, SLOT_BYTES), b"", told)
        link.connection_made(connection)  # type: ignore[arg-type]
        frames, begin = [], 0
        for end in (*cuts, len(data)):
            piece = memoryview(data)[begin:end]
            begin = end
            while piece and not link.closed:
                target = link.get_buffer(-1)
                count = min(len(target), len(piece))
                target[:count] = piece[:count]
                link.buffer_updated(count)
                piece = piece[count:]
                while link._flow._frames:
                    got = link._flow._frames.popleft()
                    frames.append((got.header, bytes(got.payload)))
                    got.release()
        assert link.closed == connection.aborted
        return frames, not link.closed, link._flow.credits

    return asyncio.run(main())


SIZES = st.sampled_from([0, 1, 15, 16, 17, 200, 16_000, 16_384, 40_000])


@given(
    st.lists(st.tuples(SIZES, SIZES), max_size=6),
    st.sampled_from(
        [b"", frame(b"", b"", kind=9), frame(b"h", b"p", magic=7), frame(b"", bytes(SLOT_BYTES + 1))]
    ),
    st.booleans(),
    st.data(),
)
@settings(deadline=None, derandomize=True, max_examples=80)
def test_cuts_do_not_matter(
    sizes: list[tuple[int, int]], bad: bytes, credit: bool, data: st.DataObject
) -> None:
    sent = [(bytes([i]) * header, bytes([i]) * payload) for i, (header, payload) in enumerate(sizes, 1)]
    stream = HELLO + (wire._CREDIT if credit else b"") + b"".join(frame(*one) for one in sent) + bad
    places = st.integers(0, len(stream)) | st.integers(0, min(len(stream), 120))
    cuts = sorted(data.draw(st.lists(places, max_size=8)))
    for way in (cuts, list(range(0, len(stream), 4_000))):
        frames, stands, credits = received(stream, way)
        assert stands == (not bad) and credits == 2 + credit
        assert frames == (sent[: len(frames)] if bad else sent), "what nobody took goes with its link"


def test_a_frame_without_a_slot_closes_the_link() -> None:
    whole = HELLO + frame(b"a", b"1") * (SLOTS + 1)
    frames, stands, _ = received(whole, [])
    assert not stands and frames == []
