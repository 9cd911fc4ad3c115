"""What is told of caches, there and back, and what is refused."""

import pytest

from chassis.ids import BlockHash, BootId, Epoch
from chassis.messages import BadMessage
from chassis.messages.cache import (
    CacheChanges,
    Held,
    Holdings,
    HoldingsQuestion,
    PoolTotals,
    build_changes,
    decode_holdings,
    decode_question,
    encode_holdings,
    encode_question,
    parse_changes,
)
from chassis.messages.kvstore import NO_PARENT, PoolRef
from chassis.wire import kvstore_pb2 as pb

REF = PoolRef("g", Epoch(1 << 40), 3)
A, B, C = BlockHash(b"a" * 32), BlockHash(b"b" * 32), BlockHash(b"c" * 32)
BOOT = BootId("kv0")


@pytest.mark.parametrize(
    "changes",
    [
        CacheChanges(BOOT, 1, REF, "n", 16, ((A, NO_PARENT), (B, A), (C, None)), (A, C), cleared=True),
        CacheChanges(BOOT, 1 << 40, REF, "", 1, gone=True),
    ],
)
def test_changes_there_and_back(changes: CacheChanges) -> None:
    assert parse_changes(build_changes(changes)) == changes


def test_questions_and_answers_there_and_back() -> None:
    question = HoldingsQuestion("g", 4096)
    assert decode_question(encode_question(question)) == question
    pool = PoolTotals(REF, "n", 16, 100, 50, 30, 20)
    held = (Held(A, NO_PARENT, 2, 7, 6, None), Held(B, None, 0, 0, 10, 1500))
    for holdings in (Holdings(BOOT, 9, (pool, pool), "g", 4096, held, 8192), Holdings(BOOT, 0, ())):
        assert decode_holdings(encode_holdings(holdings)) == holdings


def test_numbers_above_the_columns_are_the_largest_they_can_say() -> None:
    held = (Held(A, None, 1, 1 << 40, 6, 1 << 40),)
    (back,) = decode_holdings(encode_holdings(Holdings(BOOT, 1, (), "g", 0, held))).held
    assert (back.hits, back.unused_ms) == (0xFFFFFFFF, 0xFFFFFFFE)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff", "not a CacheChanges"),
        (pb.CacheChanges(boot="a b", number=1).SerializeToString(), "boot"),
        (pb.CacheChanges(boot="b").SerializeToString(), "number"),
        (pb.CacheChanges(boot="b", number=1, stored=b"x").SerializeToString(), "stored"),
        (pb.CacheChanges(boot="b", number=1, stored=A).SerializeToString(), "stored_parents"),
        (pb.CacheChanges(boot="b", number=1, evicted=b"x").SerializeToString(), "evicted"),
    ],
)
def test_changes_that_are_none_are_refused(data: bytes, words: str) -> None:
    with pytest.raises(BadMessage, match=words):
        parse_changes(data)


@pytest.mark.parametrize("column", ["parents", "references", "hits", "keeps", "unused_ms"])
def test_columns_must_fit(column: str) -> None:
    whole = pb.HoldingsReply.FromString(
        encode_holdings(Holdings(BOOT, 1, (), "g", 0, (Held(A, None, 1, 1, 6, None),)))
    )
    setattr(whole, column, getattr(whole, column) * 2)
    with pytest.raises(BadMessage, match=column):
        decode_holdings(whole.SerializeToString())
