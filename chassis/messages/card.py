"""Pure. A model's card: everything a gateway or batcher needs of a model whose files it does not have.

It lies in the object store as `card.<SHA-256>`; the registry holds the digest. The table of token bytes
is the one truth about text: stops are matched on it and text is decoded from it. A special token has no
bytes: it never shows.
"""

import hashlib
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import orjson
from google.protobuf.message import DecodeError

from chassis.messages import BadMessage
from chassis.wire import pipeline_pb2 as pb

VOCAB_SIZE_MAX = 1 << 22
CARD_BYTES_MAX = 256 << 20

# Special tokens that are part of an answer, for whoever reads calls of functions in it.
SHOWN = frozenset("[TOOL_CALLS] [ARGS] [CALL_ID] <|python_tag|> <|tool_call|> <|/tool_call|>".split())
SHOWN |= {"<tool_call>", "</tool_call>"}

Tokenizer = Mapping[str, Any]  # a tokenizer.json, parsed


class TokenBytes(Sequence[bytes]):
    """The bytes of every token id, stored as one run and the place where each ends."""

    __slots__ = ("_data", "_ends")

    def __init__(self, data: bytes, ends: "array[int]") -> None:
        assert ends.itemsize == 4
        self._data = data
        self._ends = ends

    @classmethod
    def of(cls, pieces: Iterable[bytes]) -> "TokenBytes":
        ends, size = array("I"), 0
        kept = list(pieces)
        for piece in kept:
            size += len(piece)
            ends.append(size)
        return cls(b"".join(kept), ends)

    @classmethod
    def parse(cls, data: bytes, ends: bytes) -> "TokenBytes":
        """`ends`: little-endian u32, one per token. Raises BadMessage."""
        if len(ends) % 4:
            raise BadMessage("token_bytes_end: not whole numbers")
        table = array("I")
        table.frombytes(ends)
        if sys.byteorder == "big":
            table.byteswap()
        last = 0
        for end in table:
            if end < last:
                raise BadMessage("token_bytes_end: falls")
            last = end
        if last != len(data):
            raise BadMessage("token_bytes_end: does not cover token_bytes")
        return cls(data, table)

    def encode_ends(self) -> bytes:
        table = array("I", self._ends)
        if sys.byteorder == "big":
            table.byteswap()
        return table.tobytes()

    @property
    def data(self) -> bytes:
        return self._data

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, token_id: int) -> bytes:  # type: ignore[override]
        """The bytes of one token. Raises IndexError outside 0 to vocabulary size - 1."""
        if token_id < 0:
            raise IndexError(token_id)
        end = self._ends[token_id]
        return self._data[self._ends[token_id - 1] if token_id else 0 : end]

    def join(self, ids: Iterable[int]) -> bytes:
        """The bytes of a run of tokens; ids outside the vocabulary have none."""
        size = len(self._ends)
        return b"".join([self[i] for i in ids if 0 <= i < size])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenBytes):
            return NotImplemented
        return self._data == other._data and self._ends == other._ends

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, eq=True, weakref_slot=True)
class ModelCard:
    name: str
    model_digest: str
    config_json: str
    vocab_size: int
    num_layers: int
    context_len_max: int  # tokens, prompt and output together
    eos_ids: tuple[int, ...]
    tokenizer_json: bytes  # of the `tokenizers` library
    chat_template: str  # Jinja; empty = none
    bos_token: str
    eos_token: str
    token_bytes: TokenBytes
    strip_leading_space: bool = False  # of a whole output, as SentencePiece does
    add_bos: bool = False

    __hash__ = None  # type: ignore[assignment]


def build_card(card: ModelCard) -> bytes:
    """The same card always yields the same bytes, so its digest is its name."""
    assert len(card.token_bytes) == card.vocab_size
    return pb.ModelCard(
        name=card.name,
        model_digest=card.model_digest,
        config_json=card.config_json,
        vocab_size=card.vocab_size,
        num_layers=card.num_layers,
        context_len_max=card.context_len_max,
        eos_ids=card.eos_ids,
        tokenizer_json=card.tokenizer_json,
        chat_template=card.chat_template,
        bos_token=card.bos_token,
        eos_token=card.eos_token,
        token_bytes=card.token_bytes.data,
        token_bytes_end=card.token_bytes.encode_ends(),
        strip_leading_space=card.strip_leading_space,
        add_bos=card.add_bos,
    ).SerializeToString(deterministic=True)


# Services of one process have the same card: megabytes that one parses and the others share.
_alive: WeakValueDictionary[str, ModelCard] = WeakValueDictionary()


def parse_card(data: bytes) -> ModelCard:
    """Raises BadMessage."""
    digest = card_digest(data)
    if (card := _alive.get(digest)) is None:
        card = _alive[digest] = _parsed(data)
    return card


def _parsed(data: bytes) -> ModelCard:
    try:
        m = pb.ModelCard.FromString(data)
    except (DecodeError, ValueError) as error:
        raise BadMessage(f"not a ModelCard: {error}") from None
    if not m.name or not 0 < m.vocab_size <= VOCAB_SIZE_MAX or m.context_len_max < 2:
        raise BadMessage("card: name, vocab_size and context_len_max are needed")
    table = TokenBytes.parse(m.token_bytes, m.token_bytes_end)
    if len(table) != m.vocab_size:
        raise BadMessage("card: token_bytes_end has not vocab_size entries")
    if any(i >= m.vocab_size for i in m.eos_ids):
        raise BadMessage("card: eos_ids outside the vocabulary")
    return ModelCard(
        name=m.name,
        model_digest=m.model_digest,
        config_json=m.config_json,
        vocab_size=m.vocab_size,
        num_layers=m.num_layers,
        context_len_max=m.context_len_max,
        eos_ids=tuple(m.eos_ids),
        tokenizer_json=m.tokenizer_json,
        chat_template=m.chat_template,
        bos_token=m.bos_token,
        eos_token=m.eos_token,
        token_bytes=table,
        strip_leading_space=m.strip_leading_space,
        add_bos=m.add_bos,
    )


def card_digest(data: bytes) -> str:
    """Names a built card: 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def card_object_name(digest: str) -> str:
    return f"card.{digest}"


# ---- from a tokenizer to the table -----------------------------------------------------------------


@cache
def _byte_of_char() -> dict[str, int]:
    """GPT-2's byte-level alphabet: printable bytes stand for themselves, the others from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


def byte_level_bytes(piece: str) -> bytes:
    """Bytes of a byte-level BPE piece; a piece with a foreign character is taken as plain text."""
    table = _byte_of_char()
    try:
        return bytes([table[c] for c in piece])
    except KeyError:
        return piece.encode("utf-8", "surrogatepass")


def sentencepiece_bytes(piece: str) -> bytes:
    """Bytes of a SentencePiece piece: `<0xNN>` is a byte, U+2581 a space."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)])
        except ValueError:
            pass
    return piece.replace("\u2581", " ").encode("utf-8", "surrogatepass")


def _decoders(tokenizer: Tokenizer) -> list[dict[str, object]]:
    decoder = tokenizer.get("decoder")
    if not isinstance(decoder, dict):
        return []
    inner = decoder.get("decoders")
    return list(inner) if isinstance(inner, list) else [decoder]


def parse_tokenizer(tokenizer_json: bytes) -> Tokenizer:
    """Raises ValueError."""
    tokenizer = orjson.loads(tokenizer_json)
    if not isinstance(tokenizer, dict):
        raise ValueError("tokenizer: not a JSON object")
    return tokenizer


def token_bytes_of(tokenizer: Tokenizer, vocab_size: int) -> TokenBytes:
    """The table for a tokenizer of the `tokenizers` library; ids it does not know have no bytes.

    Byte-level BPE and SentencePiece-like vocabularies; raises ValueError for others.
    """
    kinds = {d.get("type") for d in _decoders(tokenizer)}
    if "ByteLevel" in kinds:
        convert = byte_level_bytes
    elif kinds & {"ByteFallback", "Metaspace", "Replace"}:
        convert = sentencepiece_bytes
    else:
        raise ValueError(f"tokenizer: decoder {sorted(map(str, kinds))} has no table of token bytes")
    vocab = tokenizer["model"]["vocab"]
    pieces = [b""] * vocab_size
    pairs = vocab.items() if isinstance(vocab, dict) else ((p[0], i) for i, p in enumerate(vocab))
    for piece, token_id in pairs:
        if token_id < vocab_size:
            pieces[token_id] = convert(piece)
    for added in tokenizer.get("added_tokens") or []:
        if added["id"] < vocab_size:
            content = added["content"]
            shown = convert(content) if convert is sentencepiece_bytes else content.encode()
            hidden = added.get("special") and content not in SHOWN
            pieces[added["id"]] = b"" if hidden else shown
    return TokenBytes.of(pieces)


def strips_leading_space(tokenizer: Tokenizer) -> bool:
    """Whether a whole output loses the space that the vocabulary puts before its first word."""
    for decoder in _decoders(tokenizer):
        if decoder.get("type") == "Strip" and decoder.get("content") == " " and decoder.get("start"):
            return True
        if decoder.get("type") == "Metaspace" and decoder.get("prepend_scheme", "always") != "never":
            return True
    return False
