"""A tokenizer built from GGUF metadata cuts text as SentencePiece does, and puts it together again."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from chassis.messages.card import strips_leading_space, token_bytes_of
from shard_worker.executor import LoadFailed
from shard_worker.gguf_tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    USER_DEFINED,
    adds_bos,
    tokenizer_from_gguf,
)

BYTES = [f"<0x{i:02X}>" for i in range(256)]
PIECES = ["a", "b", "c", SPACE, "ab", "bc", "abc", f"{SPACE}a", f"{SPACE}ab", "ca", "aa", "cab", f"a{SPACE}"]


def metadata(scores: list[float], prefix: bool = True) -> dict[str, object]:
    """Pieces of a SentencePiece model with these scores, then runs of spaces and line ends."""
    more = [f"{SPACE}{SPACE}", "\n"]
    assert len(scores) == len(PIECES)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", *BYTES, *PIECES, *more],
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, *[BYTE] * 256]
        + [NORMAL] * len(PIECES)
        + [USER_DEFINED] * 2,
        "tokenizer.ggml.scores": [0.0, 0.0, *[0.0] * 256, *scores, -1000.0, -1000.0],
        "tokenizer.ggml.add_space_prefix": prefix,
    }


def built(made: dict[str, object]) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(tokenizer_from_gguf(made)))


def sentencepiece(text: str, scores: dict[str, float]) -> list[str]:
    """The two neighbours whose union scores best become one, the left ones first, until none do."""
    symbols = list(SPACE + text.replace(" ", SPACE))
    while True:
        unions = [a + b for a, b in zip(symbols, symbols[1:], strict=False)]
        best = max((scores[union] for union in unions if union in scores), default=None)
        if best is None:
            return symbols
        at = next(i for i, union in enumerate(unions) if scores.get(union) == best)
        symbols[at : at + 2] = [unions[at]]


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    order=st.permutations(range(len(PIECES))),
    texts=st.lists(st.text("abc", min_size=1, max_size=8), min_size=1, max_size=4),
)
def test_pieces_are_merged_as_sentencepiece_merges_them(order: list[int], texts: list[str]) -> None:
    scores = [-float(place) for place in order]
    text = " ".join(texts)  # runs of spaces are tokens of their own
    expected = sentencepiece(text, dict(zip(PIECES, scores, strict=True)))
    tokenizer = built(metadata(scores))
    encoded = tokenizer.encode(text)
    assert encoded.tokens == expected
    assert tokenizer.decode(encoded.ids) == text


def test_what_no_piece_spells_is_bytes_and_runs_are_tokens_of_their_own() -> None:
    made = metadata([-float(i) for i in range(len(PIECES))], prefix=False)
    tokenizer = built(made)
    text = "ab  c\né"
    encoded = tokenizer.encode(text)
    tokens: list[str] = made["tokenizer.ggml.tokens"]  # type: ignore[assignment]
    assert [tokens[i] for i in encoded.ids] == ["ab", f"{SPACE}{SPACE}", "c", "\n", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(encoded.ids) == text
    table = token_bytes_of(tokenizer_from_gguf(made), len(tokens))
    assert b"".join(table[i] for i in encoded.ids) == text.encode()


def test_the_space_before_the_first_word_is_taken_off_again() -> None:
    for prefix in (True, False):
        made = tokenizer_from_gguf(metadata([0.0] * len(PIECES), prefix))
        assert strips_leading_space(made) == prefix


def test_qwen_cuts_numbers_into_digits() -> None:
    alphabet = ["1", "2", "a", "\u0120", "12", "\u01201"]
    made: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": alphabet,
        "tokenizer.ggml.merges": ["1 2", "\u0120 1"],
    }
    assert built(made).encode("12a 1").tokens == ["1", "2", "a", "\u0120", "1"]


def test_sentencepiece_begins_with_the_begin_token_unless_told_otherwise() -> None:
    key = "tokenizer.ggml.add_bos_token"
    assert adds_bos({"tokenizer.ggml.model": "llama"})
    assert not adds_bos({"tokenizer.ggml.model": "llama", key: False})
    assert not adds_bos({"tokenizer.ggml.model": "gpt2"})
    assert adds_bos({"tokenizer.ggml.model": "gpt2", key: True})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "t5"}, "'t5' is not one of gpt2, llama"),
        ({"tokenizer.ggml.pre": "unheard-of"}, "unheard-of"),
        ({"tokenizer.ggml.merges": ["a"]}, "do not fit"),
        ({"tokenizer.ggml.merges": ["a zz"]}, "do not fit"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "do not fit"),
        ({"tokenizer.ggml.token_type": [1]}, "do not fit"),
        ({"tokenizer.ggml.tokens": "a"}, "not a list"),
        ({"tokenizer.ggml.model": "llama"}, "scores is not a list"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0]}, "do not fit"),
        (
            {
                "tokenizer.ggml.model": "llama",
                "tokenizer.ggml.scores": [0.0] * 3,
                "tokenizer.ggml.unknown_token_id": 3,
            },
            "unknown_token_id is 3",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_rebuilt_is_refused(changes: dict[str, object], message: str) -> None:
    made: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.merges": ["a b"],
    }
    assert tokenizer_from_gguf(made)["version"] == "1.0"
    with pytest.raises(LoadFailed, match=message):
        tokenizer_from_gguf(made | changes)
