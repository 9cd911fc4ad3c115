"""The name of a block: golden vectors, and that everything the content depends on flows into it."""

import hashlib

import pytest

from batcher.block_hash import NO_PARENT, BlockHasher, Extras, chain, namespace
from chassis.ids import BlockHash

SPACE = namespace("m" * 4, "float32", "paged")


def field(tag: str, data: bytes) -> bytes:
    return tag.encode() + len(data).to_bytes(4, "little") + data


def straight(space: bytes, parent: bytes, ids: list[int], extras: list[tuple[str, bytes]]) -> bytes:
    """The encoding written down once more, the slow way."""
    tokens = b""
    for token_id in ids:
        tokens += token_id.to_bytes(4, "little")
    data = field("N", space) + field("P", parent) + field("T", tokens)
    for tag, value in extras:
        data += field(tag, value)
    return hashlib.sha256(data).digest()


def test_golden() -> None:
    """Never to change: what is stored under these names must be found again."""
    assert SPACE == b"m\4\0\0\0mmmmd\7\0\0\0float32l\5\0\0\0paged"
    ids = [1, 2, 3, 4, 0xFFFFFFFF, 0, 7, 8]
    assert [digest.hex() for digest in chain(SPACE, ids, 4, Extras(salt=b"tenant"))] == [
        "a2255b081254892295e1d42511f200dbc4b40931bbc0e42f94381bcf52fb8a0a",
        "be7ecb47a71759648c667bcb4369e7b386a25375aa1c697c266d45a37d80ff92",
    ]
    assert [digest.hex() for digest in chain(SPACE, ids, 4)] == [
        "7c738771bd93cec0727d5c1c43b22f714fb514221db8570753133962d0826615",
        "057b02f743ee51a26571134a80b937a3cfb53214d26baa2895cb8f9a1b7d7ea1",
    ]


def test_equals_the_straight_encoder() -> None:
    ids = list(range(100, 150))
    extras = Extras(salt=b"s", adapter=b"a", media=b"m")
    parent = bytes(32)
    expected = []
    for start in range(0, 48, 16):
        block = ids[start : start + 16]
        parent = straight(SPACE, parent, block, [("S", b"s"), ("A", b"a"), ("M", b"m")])
        expected.append(parent)
    assert list(chain(SPACE, ids, 16, extras)) == expected


def test_a_part_of_a_block_has_no_name() -> None:
    assert chain(SPACE, [1, 2, 3], 4) == ()
    assert len(chain(SPACE, range(11), 4)) == 2


def test_growing_gives_the_same_names() -> None:
    ids = list(range(40))
    hasher = BlockHasher(SPACE, 4, Extras(salt=b"t"))
    hashes: list[BlockHash] = []
    for num_blocks in (0, 1, 1, 4, 10):
        hasher.extend(hashes, ids, num_blocks)
        assert len(hashes) == num_blocks
    assert tuple(hashes) == chain(SPACE, ids, 4, Extras(salt=b"t"))
    hasher.check()


@pytest.mark.parametrize(
    "other",
    [
        chain(namespace("n" * 4, "float32", "paged"), range(8), 4),
        chain(namespace("m" * 4, "bfloat16", "paged"), range(8), 4),
        chain(namespace("m" * 4, "float32", "flat"), range(8), 4),
        chain(namespace("m" * 3, "mfloat32", "paged"), range(8), 4),
        chain(SPACE, range(8), 8),
        chain(SPACE, range(1, 9), 4),
        chain(SPACE, range(8), 4, Extras(salt=b"")),
        chain(SPACE, range(8), 4, Extras(salt=b"x")),
        chain(SPACE, range(8), 4, Extras(adapter=b"x")),
        chain(SPACE, range(8), 4, Extras(media=b"x")),
        chain(SPACE, range(8), 4, Extras(salt=b"x", adapter=b"x")),
    ],
)
def test_everything_matters(other: tuple[bytes, ...]) -> None:
    plain = chain(SPACE, range(8), 4)
    assert not set(plain) & set(other)


def test_extras_are_told_apart() -> None:
    """A tenant named like an adapter finds nothing of it."""
    names = [
        chain(SPACE, range(4), 4, extras)
        for extras in (Extras(salt=b"x"), Extras(adapter=b"x"), Extras(media=b"x"), Extras(salt=b"xx"))
    ]
    assert len(set(names)) == 4


def test_the_same_tokens_after_another_beginning_have_another_name() -> None:
    hasher = BlockHasher(SPACE, 4)
    first = hasher.block(NO_PARENT, [1, 2, 3, 4])
    assert hasher.block(first, [1, 2, 3, 4]) != first
