"""What batchers and kvstore say to each other survives the wire, and garbage is named."""

from collections.abc import Callable
from typing import Any

import pytest

from chassis.ids import MAX_U32, BlockHash, BlockId, BootId, Epoch
from chassis.messages import BadMessage
from chassis.messages import kvstore as messages
from chassis.messages.kvstore import (
    Attach,
    Attached,
    Commit,
    Exchange,
    Exchanged,
    Locate,
    Match,
    PoolRef,
    StageAddress,
    Stats,
    TraceRef,
)
from chassis.wire import kvstore_pb2 as pb

REF = PoolRef("g", Epoch((1 << 64) - 1), 3)
A, B = BlockHash(b"a" * 32), BlockHash(b"b" * 32)
ZEROS = BlockHash(bytes(32))
ONE, LAST = BlockId(1), BlockId(MAX_U32)
TRACES = (TraceRef("request", b"t" * 25), TraceRef("other", b""))


@pytest.mark.parametrize(
    ("value", "build", "parse"),
    [
        (Attach(REF, ("w.1", "v.2"), 9, 16, "n"), messages.build_attach, messages.parse_attach),
        (
            Attach(REF, (), 9, 16, "n", (ONE, ONE, LAST), ((ONE, A), (LAST, B)), Epoch(7), 8),
            messages.build_attach,
            messages.parse_attach,
        ),
        (
            Attach(
                REF,
                ("w.1",),
                9,
                16,
                "n",
                stages=(StageAddress("tcp://a:1", range(2)), StageAddress("b", range(2, 5))),
            ),
            messages.build_attach,
            messages.parse_attach,
        ),
        (Match(REF, ((A, B), (), (B,))), messages.build_match, messages.parse_match),
        (Match(REF, ((A, B), (B,)), TRACES), messages.build_match, messages.parse_match),
        (Locate("n", 16, ((A, B), ())), messages.build_locate, messages.parse_locate),
        (
            (("g", (2, 0)), ("h", (1, 7))),
            messages.build_located,
            lambda m: messages.parse_located(m, 2),
        ),
        (Exchange(REF), messages.build_exchange, messages.parse_exchange),
        (
            Exchange(REF, (Commit(ONE, A, ZEROS), Commit(LAST, B, A)), (LAST, ONE), 7),
            messages.build_exchange,
            messages.parse_exchange,
        ),
        (Exchanged((ONE, LAST), 2, 3), messages.build_exchanged, messages.parse_exchanged),
        (Stats(9, 1, 2, 6, 4, 5, 6, ("g", "h"), 8), messages.build_stats, messages.parse_stats),
        (
            Stats(9, 1, 2, 6, 4, 5, 6, tiers={"saved": 3, "restored": 0}),
            messages.build_stats,
            messages.parse_stats,
        ),
        ("g", messages.build_stats_question, messages.parse_stats_question),
        (
            Attached(4, 5, tiers=True),
            lambda value: messages.build_attached(value, BootId("boot")),
            messages.parse_attached,
        ),
        (((ONE,), (), (LAST, ONE)), messages.build_matched, lambda m: messages.parse_matched(m, 3)),
    ],
)
def test_it_comes_back_as_it_was(
    value: Any, build: Callable[[Any], Any], parse: Callable[[Any], Any]
) -> None:
    built = build(value)
    assert parse(type(built).FromString(built.SerializeToString())) == value


@pytest.mark.parametrize(
    ("parse", "message", "words"),
    [
        (messages.parse_attach, pb.AttachRequest(held=b"123"), "held: 3 bytes"),
        (messages.parse_attach, pb.AttachRequest(committed=b"12345"), "committed: 5 bytes"),
        (
            messages.parse_attach,
            pb.AttachRequest(committed=b"1234"),
            "committed_hashes: 0 hashes for 1 blocks",
        ),
        (messages.parse_match, pb.MatchRequest(chains=[b"x" * 33]), "chains: 33 bytes"),
        (messages.parse_match, pb.MatchRequest(chains=[b""] * 4097), "chains: 4097 is above 4096"),
        (messages.parse_locate, pb.LocateRequest(chains=[b""] * 4097), "chains: 4097 is above 4096"),
        (
            lambda m: messages.parse_located(m, 1),
            pb.LocateReply(generations=["g"], blocks=[b"12345678"]),
            "blocks: not one number for each of 1",
        ),
        (
            lambda m: messages.parse_located(m, 1),
            pb.LocateReply(generations=["g"]),
            "blocks: 0 answers of 1 pools",
        ),
        (messages.parse_match, pb.MatchRequest(traces=[pb.TraceRef()]), "traces: 1 for 0 chains"),
        (messages.parse_exchange, pb.ExchangeRequest(release_blocks=b"1"), "release_blocks: 1 bytes"),
        (
            messages.parse_exchange,
            pb.ExchangeRequest(commit_hashes=b"x" * 32),
            "commit_hashes: 1 hashes for 0",
        ),
        (
            messages.parse_exchange,
            pb.ExchangeRequest(commit_blocks=b"1234", commit_hashes=b"x" * 32),
            "commit_parents: 0 hashes for 1",
        ),
        (messages.parse_exchanged, pb.ExchangeReply(leased_blocks=b"12"), "leased_blocks: 2 bytes"),
        (lambda m: messages.parse_matched(m, 2), pb.MatchReply(blocks=[b""]), "blocks: 1 answers for 2"),
    ],
)
def test_what_is_no_message_names_the_field(parse: Callable[[Any], Any], message: Any, words: str) -> None:
    with pytest.raises(BadMessage, match=words):
        parse(message)
