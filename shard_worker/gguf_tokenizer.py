"""Pure. Builds a tokenizer of the `tokenizers` library from GGUF metadata that encodes and decodes alike.

Two kinds are known, under llama.cpp's names: gpt2, byte-level BPE with its merges; llama, SentencePiece's
BPE, whose merges follow from the scores of its pieces. What can't be rebuilt faithfully is refused.
"""

from typing import TypeVar

from shard_worker.executor import LoadFailed
from shard_worker.model.settings import Settings

T = TypeVar("T")
Json = dict[str, object]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # token types of GGUF
SPACE = "\u2581"  # what SentencePiece writes for a space

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def tokenizer_from_gguf(metadata: Settings) -> Json:
    """A tokenizer.json, as a value. Raises LoadFailed."""
    tokens = list_of(metadata, "tokenizer.ggml.tokens", str)
    types = (
        list_of(metadata, "tokenizer.ggml.token_type", int)
        if "tokenizer.ggml.token_type" in metadata
        else [NORMAL] * len(tokens)
    )
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens) or len(types) != len(tokens):
        raise LoadFailed("the tokenizer's tokens and types do not fit together")
    match metadata.get("tokenizer.ggml.model"):
        case "gpt2":
            parts = _byte_level(metadata, vocab)
        case "llama":
            parts = _sentencepiece(metadata, tokens, vocab, types)
        case other:
            raise LoadFailed(f"tokenizer.ggml.model {other!r} is not one of gpt2, llama")
    added = [_added(i, tokens[i], kind) for i, kind in enumerate(types) if kind in (CONTROL, USER_DEFINED)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "post_processor": None,
    } | parts


def adds_bos(metadata: Settings) -> bool:
    """Whether a prompt begins with the begin token; SentencePiece's do unless the file says otherwise."""
    value = metadata.get("tokenizer.ggml.add_bos_token")
    return value is True if value is not None else metadata.get("tokenizer.ggml.model") == "llama"


def list_of(metadata: Settings, key: str, kind: type[T]) -> list[T]:
    """Raises LoadFailed."""
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(v, kind) for v in value):
        raise LoadFailed(f"GGUF: {key} is not a list of {kind.__name__}")
    return value


def _added(token_id: int, content: str, kind: int) -> Json:
    return {
        "id": token_id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        # Runs of spaces are found in the text as SentencePiece writes it.
        "normalized": kind == USER_DEFINED and SPACE in content,
        "special": kind == CONTROL,
    }


def _model(vocab: dict[str, int], merges: list[list[str]], **changes: object) -> Json:
    return (
        {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
        }
        | changes
        | {"vocab": vocab, "merges": merges}
    )


# ---- byte-level BPE ---------------------------------------------------------------------------------


def _byte_level(metadata: Settings, vocab: dict[str, int]) -> Json:
    merges = [merge.split(" ", 1) for merge in list_of(metadata, "tokenizer.ggml.merges", str)]
    if not all(len(m) == 2 and m[0] in vocab and m[1] in vocab and m[0] + m[1] in vocab for m in merges):
        raise LoadFailed("the tokenizer's tokens and merges do not fit together")
    pre = metadata.get("tokenizer.ggml.pre")
    return {
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": _pre_tokenizer(metadata),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _model(vocab, merges, ignore_merges=pre == "llama-bpe"),
    }


def _pre_tokenizer(metadata: Settings) -> Json:
    """How text is cut before merging, by the name that llama.cpp knows it under."""

    def byte_level(use_regex: bool) -> Json:
        return {
            "type": "ByteLevel",
            "add_prefix_space": metadata.get("tokenizer.ggml.add_space_prefix", False) is True,
            "trim_offsets": True,
            "use_regex": use_regex,
        }

    def sequence(first: Json, use_regex: bool) -> Json:
        return {"type": "Sequence", "pretokenizers": [first, byte_level(use_regex)]}

    def split(pattern: str) -> Json:
        cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        return sequence(cut, False)

    match metadata.get("tokenizer.ggml.pre"):
        case "gpt-2":
            return byte_level(True)
        case "smollm":
            return sequence({"type": "Digits", "individual_digits": True}, True)
        case "llama-bpe":
            return split(LLAMA3_SPLIT)
        case "qwen2":
            return split(QWEN2_SPLIT)
        case other:
            raise LoadFailed(f"tokenizer.ggml.pre {other!r} is not one of gpt-2, smollm, llama-bpe, qwen2")


# ---- SentencePiece ----------------------------------------------------------------------------------


def _sentencepiece(metadata: Settings, tokens: list[str], vocab: dict[str, int], types: list[int]) -> Json:
    scores = list_of(metadata, "tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise LoadFailed("the tokenizer's tokens and scores do not fit together")
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if not isinstance(unknown, int) or not 0 <= unknown < len(tokens):
        raise LoadFailed(f"GGUF: tokenizer.ggml.unknown_token_id is {unknown!r}")
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", True) is True
    spaces: list[Json] = [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
    back: list[Json] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefixed:
        spaces.insert(0, {"type": "Prepend", "prepend": SPACE})
        back.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": spaces},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": back},
        "model": _model(
            vocab,
            _merges(tokens, vocab, types, scores),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=BYTE in types,
        ),
    }


def _merges(
    tokens: list[str], vocab: dict[str, int], types: list[int], scores: list[float]
) -> list[list[str]]:
    """Every way to put a piece together from two others, best score first: SentencePiece's own order."""
    normal = {token: i for token, i in vocab.items() if types[i] == NORMAL}
    found: list[tuple[float, int, int, int]] = []  # less score, id, id of the left part, where it is cut
    for piece, i in normal.items():
        for cut in range(1, len(piece)):
            left = normal.get(piece[:cut])
            if left is not None and piece[cut:] in normal:
                found.append((-scores[i], i, left, cut))
    found.sort()
    return [[tokens[left], tokens[i][cut:]] for _, i, left, cut in found]
