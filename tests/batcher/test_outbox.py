"""Chunks to gateways: numbered without a gap, and none too large for the bus."""

from batcher.events import SendParts
from batcher.outbox import Outbox
from chassis.errors import MessageTooLarge
from chassis.ids import Attempt, BootId, GatewayId, RequestId
from chassis.messages.chunk import (
    EMPTY_DIGEST,
    Chunk,
    Finish,
    Part,
    parse_chunk,
)
from chassis.messages.request import Reason
from chassis.messages.sampling import TokenLogprobs

GATEWAY = GatewayId("g")
MESSAGE_BYTES_MAX = 1 << 20  # the broker's default
WIDE_ID = (1 << 21) - 1  # three bytes


class Bus:
    def __init__(self) -> None:
        self.chunks: list[Chunk] = []

    def publish(self, subject: str, data: bytes) -> None:
        if len(data) > MESSAGE_BYTES_MAX:
            raise MessageTooLarge(f"{len(data)} bytes")
        self.chunks.append(parse_chunk(data))


def part(name: str, length: int) -> Part:
    return Part(RequestId(name), Attempt(1), 0, (WIDE_ID,) * length, EMPTY_DIGEST)


def send(*parts: Part) -> tuple[Outbox, Bus]:
    bus = Bus()
    outbox = Outbox(BootId("me"), bus)  # type: ignore[arg-type]
    finish = Finish(parts[-1].request_id, Attempt(1), len(parts[-1].ids), EMPTY_DIGEST, Reason.LENGTH)
    outbox.add(SendParts(GATEWAY, parts, (finish,)))
    outbox.flush(0.0, ())
    return outbox, bus


def test_what_gathered_in_a_turn_is_one_chunk() -> None:
    _, bus = send(part("a", 1), part("b", 2))
    assert [(len(c.parts), len(c.finishes), c.number) for c in bus.chunks] == [(2, 1, 1)]


def test_whole_outputs_that_are_owed_at_once_go_out_as_several_chunks() -> None:
    """64 streams of 8,000 tokens that attach anew in one turn are 1.5 MB, more than a message may have."""
    parts = [part(f"r{i}", 8000) for i in range(64)]
    outbox, bus = send(*parts)
    assert [p for c in bus.chunks for p in c.parts] == parts
    assert [c.number for c in bus.chunks] == list(range(1, len(bus.chunks) + 1)) and len(bus.chunks) > 1
    assert [len(c.finishes) for c in bus.chunks] == [0] * (len(bus.chunks) - 1) + [1], "the end goes last"
    outbox.flush(1.0, (GATEWAY,))
    assert bus.chunks[-1].number == len(bus.chunks)


def test_ids_are_sent_without_log_probabilities_that_no_message_can_hold() -> None:
    whole = part("a", 8000)
    entry = TokenLogprobs(-1.0, 1, (WIDE_ID,) * 20, (-1.0,) * 20)
    _, bus = send(whole._replace(logprobs=(entry,) * 8000))
    assert [p for c in bus.chunks for p in c.parts] == [whole]


def test_a_part_that_no_message_can_hold_is_lost_and_nothing_else() -> None:
    _, bus = send(part("small", 3), part("huge", MESSAGE_BYTES_MAX // 3 + 1))
    assert [p.request_id for c in bus.chunks for p in c.parts] == ["small"]
