"""The card survives the wire, and its table decodes exactly as the tokenizer does."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chassis.messages import BadMessage
from chassis.messages.card import (
    ModelCard,
    TokenBytes,
    Tokenizer,
    build_card,
    byte_level_bytes,
    card_digest,
    parse_card,
    parse_tokenizer,
    sentencepiece_bytes,
    strips_leading_space,
    token_bytes_of,
)

CARD = ModelCard(
    name="tiny",
    model_digest="ab",
    config_json="{}",
    vocab_size=4,
    num_layers=2,
    context_len_max=64,
    eos_ids=(3,),
    tokenizer_json=b"{}",
    chat_template="{{ messages }}",
    bos_token="<s>",
    eos_token="</s>",
    token_bytes=TokenBytes.of([b"a", b"", b"\xc3\xa9", b""]),
    strip_leading_space=True,
    add_bos=True,
)


def test_card_survives_the_wire_and_keeps_its_digest() -> None:
    data = build_card(CARD)
    assert parse_card(data) == CARD
    assert build_card(parse_card(data)) == data
    assert card_digest(data) != card_digest(build_card(replace(CARD, name="other")))


@given(st.lists(st.binary(max_size=5), max_size=30))
@settings(deadline=None, derandomize=True)
def test_table_returns_each_piece(pieces: list[bytes]) -> None:
    table = TokenBytes.of(pieces)
    again = TokenBytes.parse(table.data, table.encode_ends())
    assert again == table
    assert list(again) == pieces
    assert again.join(range(len(pieces))) == b"".join(pieces)
    assert again.join([len(pieces), len(pieces) + 7]) == b""
    with pytest.raises(IndexError):
        again[len(pieces)]
    with pytest.raises(IndexError):
        again[-1]


@pytest.mark.parametrize(
    ("data", "ends"),
    [
        (b"ab", b"\x01\0\0"),
        (b"ab", b"\x02\0\0\0\x01\0\0\0"),
        (b"ab", b"\x01\0\0\0"),
        (b"ab", b"\x03\0\0\0"),
    ],
)
def test_broken_tables_are_refused(data: bytes, ends: bytes) -> None:
    with pytest.raises(BadMessage):
        TokenBytes.parse(data, ends)


def test_garbage_is_refused() -> None:
    for data in (b"", b"\xff\xff\xff", build_card(CARD)[:-9]):
        with pytest.raises(BadMessage):
            parse_card(data)


def _tokenizer(decoder: object, vocab: object) -> Tokenizer:
    added = [
        {"id": 2, "content": "<|end|>", "special": True},
        {"id": 3, "content": "<tool>", "special": False},
    ]
    return parse_tokenizer(
        json.dumps({"decoder": decoder, "model": {"vocab": vocab}, "added_tokens": added}).encode()
    )


def test_byte_level_table() -> None:
    data = _tokenizer({"type": "ByteLevel"}, {"\u0120hi": 0, "\u00c3": 1, "<|end|>": 2, "<tool>": 3})
    assert list(token_bytes_of(data, 5)) == [b" hi", b"\xc3", b"", b"<tool>", b""]
    assert not strips_leading_space(data)


def test_sentencepiece_table() -> None:
    decoder = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    data = _tokenizer(decoder, [["\u2581hi", 0.0], ["<0xC3>", 0.0], ["x", 0.0]])
    assert list(token_bytes_of(data, 4)) == [b" hi", b"\xc3", b"", b"<tool>"]
    assert strips_leading_space(data)
    assert sentencepiece_bytes("<0xZZ>") == b"<0xZZ>"


def test_other_vocabularies_are_refused() -> None:
    with pytest.raises(ValueError, match="WordPiece"):
        token_bytes_of(_tokenizer({"type": "WordPiece"}, {}), 4)


def test_every_byte_has_its_character() -> None:
    alphabet = [c for c in map(chr, range(0xA1, 0x200)) if len(byte_level_bytes(c)) == 1]
    alphabet += map(chr, range(0x21, 0x7F))
    assert sorted(byte_level_bytes(c)[0] for c in alphabet) == list(range(256))
    assert byte_level_bytes("\u4e00") == "\u4e00".encode()
