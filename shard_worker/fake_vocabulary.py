"""The fake model's vocabulary: ids 0-255 are the bytes, 256 ends a sequence, the rest are pairs of bytes, so
that code points arrive split.
"""

import json
from functools import cache

import numpy as np
from numpy.typing import NDArray

VOCAB_SIZE = 512
EOS_ID = 256
EOS_TOKEN = "<|im_end|>"
_CHOICES = 4096  # tokens are drawn from a table of this many entries
_EOS_CHOICES = 24
_ANY_CHOICES = 512


def _pairs() -> list[bytes]:
    """255 byte pairs: letters with a space, whole two-byte code points, and halves of longer ones."""
    letters = b"abcdefghijklmnopqrstuvwxyz"
    pairs = [b" " + bytes([c]) for c in letters]
    pairs += [bytes([c, d]) for c in b"aeiou" for d in b"nrstlmdckp"]
    pairs += [chr(c).encode() for c in range(0xC0, 0x180)][: 255 - len(pairs) - 24]
    pairs += [chr(c).encode()[:2] for c in range(0x2000, 0x2400, 0x40)]  # two bytes of three
    pairs += [chr(c).encode()[2:] for c in range(0x1F600, 0x1F608)]  # the tails of emoji
    return pairs[: VOCAB_SIZE - EOS_ID - 1]


TOKEN_BYTES: tuple[bytes, ...] = (*(bytes([b]) for b in range(256)), b"", *_pairs())
assert len(TOKEN_BYTES) == VOCAB_SIZE and len(set(TOKEN_BYTES)) == VOCAB_SIZE


def _choices() -> NDArray[np.uint32]:
    """Mostly readable tokens, some of any kind, and now and then the end."""
    readable = [*range(0x61, 0x7B), 0x20, 0x2C, 0x2E, *range(EOS_ID + 1, VOCAB_SIZE - 24)]
    table = np.empty(_CHOICES, np.uint32)
    table[:] = [readable[i % len(readable)] for i in range(_CHOICES)]
    table[:_ANY_CHOICES] = np.arange(_ANY_CHOICES) % VOCAB_SIZE
    table[EOS_ID] = 0x20
    table[-_EOS_CHOICES:] = EOS_ID
    return table


CHOICES = _choices()


def choices_of(mask: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """What is drawn from where a grammar says what may come: the same entries, as far as they may."""
    found = CHOICES[mask[CHOICES]]
    return found if len(found) else mask.nonzero()[0].astype(np.uint32)


def _printable(byte: int) -> str:
    """The character that stands for a byte in byte-level BPE vocabularies (GPT-2's table)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in plain:
        return chr(byte)
    return chr(256 + [b for b in range(256) if b not in plain].index(byte))


@cache
def tokenizer_json() -> bytes:
    """A byte-level BPE tokenizer of this vocabulary, as the `tokenizers` library reads it."""
    names = [_printable(b) for b in range(256)]
    pairs = [(names[t[0]], names[t[1]]) for t in TOKEN_BYTES[EOS_ID + 1 :]]
    vocab = {name: i for i, name in enumerate(names)}
    vocab |= {EOS_TOKEN: EOS_ID} | {a + b: EOS_ID + 1 + i for i, (a, b) in enumerate(pairs)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    special = {
        "id": EOS_ID,
        "content": EOS_TOKEN,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [special],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": vocab,
                "merges": [f"{a} {b}" for a, b in pairs],
            },
        },
        sort_keys=True,
    ).encode()
