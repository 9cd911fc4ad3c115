"""Chunks survive the wire, and columns that do not add up are refused."""

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chassis.ids import Attempt, BootId, RequestId
from chassis.messages import BadMessage
from chassis.messages.chunk import (
    EMPTY_DIGEST,
    Chunk,
    Finish,
    Part,
    build_chunk,
    extend_digest,
    parse_chunk,
)
from chassis.messages.request import Reason, Usage
from chassis.wire import request_pb2 as pb

U32 = st.integers(0, (1 << 32) - 1)
PARTS = st.builds(
    Part,
    request_id=st.text("0123456789abcdef", min_size=1, max_size=32).map(RequestId),
    attempt=U32.map(Attempt),
    first_index=U32,
    ids=st.lists(U32, max_size=5).map(tuple),
    digest=st.integers(0, (1 << 64) - 1),
    logprobs=st.just(()),  # one an id: tests of their own
    prompt=st.none(),
)
FINISH = Finish(RequestId("a"), Attempt(3), 7, (1 << 64) - 1, Reason.STOP, 0, Usage(1, 2, 3))


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.lists(PARTS, max_size=6).map(tuple), st.sampled_from([(), (FINISH,)]))
def test_chunk_round_trip(parts: tuple[Part, ...], finishes: tuple[Finish, ...]) -> None:
    chunk = Chunk(BootId("b"), 1, parts, finishes)
    assert parse_chunk(build_chunk(chunk)) == chunk


@pytest.mark.parametrize(
    "changed",
    [
        {"request_ids": ["a"]},
        {"attempts": [1, 1, 1]},
        {"first_indices": []},
        {"lens": [1, 1]},
        {"lens": [1, 2, 0]},
        {"lens": [3, 1]},
        {"ids": [7, 8]},
        {"digests": [5]},
    ],
)
def test_columns_that_do_not_add_up(changed: dict[str, list[int]]) -> None:
    columns: dict[str, object] = {
        "request_ids": ["a", "b"],
        "attempts": [1, 1],
        "first_indices": [0, 9],
        "lens": [1, 2],
        "ids": [7, 8, 9],
        "digests": [5, 6],
    }
    whole = pb.Chunk(boot="b", number=1, parts=pb.Parts(**columns))  # type: ignore[arg-type]
    assert [part.ids for part in parse_chunk(whole.SerializeToString()).parts] == [(7,), (8, 9)]
    broken = pb.Chunk(boot="b", number=1, parts=pb.Parts(**(columns | changed)))  # type: ignore[arg-type]
    with pytest.raises(BadMessage, match="do not add up"):
        parse_chunk(broken.SerializeToString())


def test_the_digest_is_a_chain_of_blake2b() -> None:
    state = (0).to_bytes(8, "little")
    for token_id in (5, (1 << 32) - 1, 0):
        state = hashlib.blake2b(state + token_id.to_bytes(4, "little"), digest_size=8).digest()
    whole = extend_digest(EMPTY_DIGEST, (5, (1 << 32) - 1, 0))
    assert whole == int.from_bytes(state, "little")
    assert extend_digest(extend_digest(EMPTY_DIGEST, (5,)), ((1 << 32) - 1, 0)) == whole
