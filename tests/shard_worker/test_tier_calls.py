"""Which calls of kvstores go on, where contents belong, and when a call is done."""

from dataclasses import replace

import pytest

from chassis.ids import BlockHash, BlockId, Epoch
from chassis.messages import BadMessage
from chassis.messages.tier import OLD_ATTACHMENT, OLD_EPOCH, LoadBlocks, SaveBlocks, TierContent, TierStage
from shard_worker.stamps import Stamp
from shard_worker.tier_calls import (
    CALLS_MAX,
    NO_SUCH_BLOCK,
    TOO_MANY,
    Fence,
    LinkCalls,
    Piece,
    pack_stamp,
    parse_stamp,
)

STAGE = TierStage(Epoch(5), range(2, 6), "words.4", 32)


def call(
    kind: type[SaveBlocks] | type[LoadBlocks], number: int, *blocks: int, attachment: int = 3
) -> SaveBlocks | LoadBlocks:
    hashes = tuple(BlockHash(bytes([b]) * 32) for b in blocks)
    return kind(Epoch(5), attachment, number, tuple(map(BlockId, blocks)), hashes)


def load(number: int, *blocks: int) -> LoadBlocks:
    made = call(LoadBlocks, number, *blocks)
    assert isinstance(made, LoadBlocks)
    return made


def content(number: int, index: int, first: int, layers: int) -> TierContent:
    return TierContent(number, index, first, tuple(range(layers)))


def placed(calls: LinkCalls, number: int, index: int, first: int = 2, layers: int = 4) -> Piece:
    piece = calls.placed(content(number, index, first, layers), layers * STAGE.page_bytes)
    assert piece is not None
    return piece


def test_the_fence_only_rises_within_an_epoch() -> None:
    fence = Fence()
    assert fence.refusal(load(1, 0)) == OLD_EPOCH, "nothing stands"
    fence.stand(Epoch(5))
    fence.rise(3)
    fence.rise(2)
    assert fence.refusal(load(1, 0)) == ""
    assert fence.refusal(call(SaveBlocks, 1, 0, attachment=2)) == OLD_ATTACHMENT
    assert fence.refusal(replace(load(1, 0), epoch=Epoch(4))) == OLD_EPOCH
    assert fence.refusal(replace(load(1, 0), epoch=Epoch(6))) == OLD_EPOCH
    fence.end()
    assert fence.refusal(load(1, 0)) == OLD_EPOCH
    fence.stand(Epoch(6))
    assert (fence.attachment, fence.prior_attachment) == (0, 3)
    fence.stand(Epoch(7))
    assert fence.prior_attachment == 0


def test_calls_are_numbered_bounded_and_of_this_pool() -> None:
    calls = LinkCalls(STAGE, 10)
    assert calls.open(load(1, 9)) == ""
    assert calls.open(load(2, 3, 10)) == NO_SUCH_BLOCK
    for number in (2, 1):
        with pytest.raises(BadMessage):
            calls.open(call(SaveBlocks, number, 0))
    for number in range(3, 2 + CALLS_MAX):
        assert calls.open(call(SaveBlocks, number, 1)) == ""
    assert calls.open(load(99, 1)) == TOO_MANY
    assert calls.close(load(1, 9)) and not calls.close(load(1, 9))
    assert calls.open(load(100, 1)) == ""


def test_a_load_is_done_when_every_layer_of_every_block_is_written() -> None:
    calls, asked = LinkCalls(STAGE, 10), load(1, 7, 4)
    assert calls.open(asked) == ""
    whole, upper, lower = placed(calls, 1, 0), placed(calls, 1, 1, 4, 2), placed(calls, 1, 1, 2, 2)
    assert (whole.block, whole.content) == (7, asked.contents[0])
    assert (upper.block, upper.first_layer, upper.num_layers) == (4, 2, 2)
    assert not calls.written(upper, True, b"")
    assert calls.written(whole, True, b"")
    assert calls.done(asked) is None
    assert calls.written(lower, True, b"")
    done = calls.done(asked)
    assert done is not None and (done.call, done.error, done.refused) == (1, "", ())
    assert calls.done(asked) is None, "once"


def test_a_piece_that_is_not_what_it_has_to_be_spoils_its_block_alone() -> None:
    calls, asked = LinkCalls(STAGE, 10), load(1, 7, 4)
    calls.open(asked)
    pieces = [placed(calls, 1, 0, 2, 2), placed(calls, 1, 0, 4, 2), placed(calls, 1, 1)]
    assert [calls.written(p, good, b"") for p, good in zip(pieces, (False, True, True), strict=True)] == [
        False,
        False,
        True,
    ]
    done = calls.done(asked)
    assert done is not None and done.refused == (0,)


def test_layers_of_which_stages_said_different_things_are_no_block() -> None:
    calls, asked = LinkCalls(STAGE, 10), load(1, 7, 4)
    calls.open(asked)
    halves = [placed(calls, 1, index, layer, 2) for index in (0, 1) for layer in (2, 4)]
    said = (b"one", b"other", b"one", b"one")
    assert [calls.written(half, True, stamp) for half, stamp in zip(halves, said, strict=True)] == [
        False,
        False,
        False,
        True,
    ]
    done = calls.done(asked)
    assert done is not None and done.refused == (0,)


def test_what_does_not_belong_is_told_from_what_is_late() -> None:
    calls = LinkCalls(STAGE, 10)
    calls.open(load(1, 7))
    calls.open(call(SaveBlocks, 2, 8))
    placed(calls, 1, 0, 2, 2)
    wrong = [
        (content(3, 0, 2, 4), 128),  # of a call that never was
        (content(2, 0, 2, 4), 128),  # of a save
        (content(1, 1, 2, 4), 128),  # of no block of the call
        (content(1, 0, 1, 2), 64),  # of another stage
        (content(1, 0, 4, 3), 96),
        (content(1, 0, 4, 2), 63),  # not of this size
        (content(1, 0, 3, 2), 64),  # came already, in part
    ]
    for message, size in wrong:
        with pytest.raises(BadMessage):
            calls.placed(message, size)
    rest = placed(calls, 1, 0, 4, 2)
    calls.close(load(1, 7))
    assert calls.placed(content(1, 0, 2, 2), 64) is None and calls.late == 1
    assert not calls.written(rest, True, b"")


def test_stamps_travel_as_they_are() -> None:
    stamp = Stamp((1 << 64) - 1, 5, 7, 16)
    assert parse_stamp(pack_stamp(stamp)) == stamp
    assert parse_stamp(pack_stamp(stamp)[:16] + b"\0\0\0\x80" + bytes(4)) is None, "a place that is none"
    assert parse_stamp(b"") is None and parse_stamp(pack_stamp(stamp)[1:]) is None
