"""What kvstore and workers say to each other of contents, and what is refused."""

from dataclasses import replace

import pytest

from chassis.ids import BlockHash, BlockId, Epoch
from chassis.messages import BadMessage
from chassis.messages.tier import (
    CALL_BLOCKS_MAX,
    LoadBlocks,
    SaveBlocks,
    TierContent,
    TierDone,
    TierMessage,
    TierStage,
    build_tier,
    checksums,
    parse_tier,
    seed_of,
)

A, B = BlockHash(b"a" * 32), BlockHash(b"b" * 32)
SAVE = SaveBlocks(Epoch(7), 3, 9, (BlockId(4), BlockId(1)), (A, B))


@pytest.mark.parametrize(
    "message",
    [
        TierStage(Epoch(7), range(2, 5), "bf16 pairs 16x3x64", 12288),
        SAVE,
        LoadBlocks(Epoch(7), 3, 9, (BlockId(4),), (A,)),
        TierContent(9, 1, 2, (1, (1 << 64) - 1), b"stamp"),
        TierDone(9),
        TierDone(9, "old_attachment", (0, 3)),
    ],
)
def test_a_message_comes_back_as_it_was(message: TierMessage) -> None:
    parsed = parse_tier(build_tier(message))
    assert parsed == message and type(parsed) is type(message)


@pytest.mark.parametrize(
    "message",
    [
        replace(SAVE, epoch=Epoch(0)),
        replace(SAVE, call=0),
        replace(SAVE, blocks=(), contents=()),
        replace(SAVE, blocks=(BlockId(4), BlockId(4))),
        replace(SAVE, contents=(A,)),
        replace(
            SAVE,
            blocks=tuple(map(BlockId, range(CALL_BLOCKS_MAX + 1))),
            contents=(A,) * (CALL_BLOCKS_MAX + 1),
        ),
        TierStage(Epoch(0), range(2, 5), "x", 1),
        TierStage(Epoch(1), range(5, 5), "x", 1),
        TierStage(Epoch(1), range(0, 5000), "x", 1),
        TierStage(Epoch(1), range(0, 1), "", 1),
        TierStage(Epoch(1), range(0, 1), "x", 0),
        TierContent(0, 0, 0, (1,)),
        TierContent(1, 0, 0, ()),
        TierContent(1, 0, 4096, (1,)),
        TierContent(1, 0, 0, (1,), bytes(65)),
        TierDone(0),
    ],
)
def test_what_means_nothing_is_refused(message: TierMessage) -> None:
    with pytest.raises(BadMessage):
        parse_tier(build_tier(message))


@pytest.mark.parametrize("header", [b"", b"\xff", b"\x12\x00", b"\x22\x05\x08\x01\x22\x01x"])
def test_what_is_no_message_is_refused(header: bytes) -> None:
    with pytest.raises(BadMessage):
        parse_tier(header)


def test_a_checksum_tells_bytes_and_where_they_belong() -> None:
    pages = bytes(range(256)) * 4
    seed = seed_of("bf16")
    sums = checksums(seed, A, range(2, 6), pages)
    assert len(dict.fromkeys(sums)) == 4, "the pages are the same, their layers are not"
    assert checksums(seed, A, range(3, 5), memoryview(pages)[256:768]) == sums[1:3]
    assert checksums(seed, B, range(2, 6), pages) != sums
    assert checksums(seed_of("f32"), A, range(2, 6), pages) != sums
    for bit in (0, 2047, 4096):
        flipped = bytearray(pages)
        flipped[bit // 8] ^= 1 << bit % 8
        wrong = [a != b for a, b in zip(checksums(seed, A, range(2, 6), bytes(flipped)), sums, strict=True)]
        assert wrong == [layer == bit // 2048 for layer in range(4)]
