"""The card of a model: its tokenizer, chat template and token bytes, for those who don't have its files.

A Hugging Face directory brings a tokenizer.json of its own; for GGUF one is built from the metadata that
encodes and decodes alike. What can't be rebuilt faithfully is refused.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import orjson

from chassis.messages.card import (
    ModelCard,
    build_card,
    parse_tokenizer,
    strips_leading_space,
    token_bytes_of,
)
from shard_worker.executor import LoadFailed
from shard_worker.gguf_file import GgufCheckpoint
from shard_worker.gguf_tokenizer import CONTROL, adds_bos, list_of, tokenizer_from_gguf
from shard_worker.hf_dir import HfCheckpoint, read_json
from shard_worker.model.hf_config import eos_ids_from_hf

TOKENIZER_BYTES_MAX = 64 << 20
# Special tokens that end an answer under whatever name the file gives its own (as llama.cpp has it).
ENDS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "</s>")


def card_of(checkpoint: GgufCheckpoint | HfCheckpoint, name: str, model_digest: str) -> bytes:
    """A serialized ModelCard. Raises LoadFailed."""
    try:
        match checkpoint:
            case GgufCheckpoint():
                card = _gguf_card(checkpoint, name, model_digest)
            case HfCheckpoint():
                card = _hf_card(checkpoint, name, model_digest)
    except LoadFailed as error:
        raise LoadFailed(f"{checkpoint.path}: {error}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise LoadFailed(f"{checkpoint.path}: the tokenizer can't be read: {error!r}") from None
    return build_card(card)


# ---- GGUF -------------------------------------------------------------------------------------------


def _gguf_card(checkpoint: GgufCheckpoint, name: str, model_digest: str) -> ModelCard:
    metadata, config = checkpoint.metadata, checkpoint.config
    tokens = list_of(metadata, "tokenizer.ggml.tokens", str)
    if len(tokens) != config.vocab_size:
        raise LoadFailed(f"{len(tokens)} tokens for an embedding of {config.vocab_size} rows")
    tokenizer = tokenizer_from_gguf(metadata)
    bos, eos = metadata.get("tokenizer.ggml.bos_token_id"), metadata.get("tokenizer.ggml.eos_token_id")
    template = metadata.get("tokenizer.chat_template", "")
    kept_keys = ("general.", f"{metadata['general.architecture']}.")
    kept = {
        key: value
        for key, value in metadata.items()
        if key.startswith(kept_keys) and not isinstance(value, list)
    }
    return ModelCard(
        name=name,
        model_digest=model_digest,
        config_json=json.dumps(kept, sort_keys=True),
        vocab_size=config.vocab_size,
        num_layers=config.num_layers,
        context_len_max=config.context_len_max,
        eos_ids=_gguf_eos_ids(metadata, tokens),
        tokenizer_json=orjson.dumps(tokenizer),
        chat_template=template if isinstance(template, str) else "",
        bos_token=_token(tokens, bos),
        eos_token=_token(tokens, eos),
        token_bytes=token_bytes_of(tokenizer, config.vocab_size),
        strip_leading_space=strips_leading_space(tokenizer),
        add_bos=adds_bos(metadata),
    )


def _gguf_eos_ids(metadata: Mapping[str, object], tokens: list[str]) -> tuple[int, ...]:
    found: list[int] = []
    for key in ("eos_token_id", "eot_token_id", "eom_token_id"):
        value = metadata.get(f"tokenizer.ggml.{key}")
        if isinstance(value, int) and 0 <= value < len(tokens):
            found.append(value)
    types = metadata.get("tokenizer.ggml.token_type")
    if isinstance(types, list):
        found += [i for i, kind in enumerate(types) if kind == CONTROL and tokens[i] in ENDS]
    return tuple(dict.fromkeys(found))


def _token(tokens: list[str], index: object) -> str:
    return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else ""


# ---- Hugging Face -----------------------------------------------------------------------------------


def _hf_card(checkpoint: HfCheckpoint, name: str, model_digest: str) -> ModelCard:
    path, config = checkpoint.path, checkpoint.config
    tokenizer_json = _read_tokenizer(path / "tokenizer.json")
    tokenizer = parse_tokenizer(tokenizer_json)
    settings = read_json(path / "tokenizer_config.json")
    generation = read_json(path / "generation_config.json")
    eos_ids = eos_ids_from_hf(generation, checkpoint.raw_config)
    return ModelCard(
        name=name,
        model_digest=model_digest,
        config_json=json.dumps(checkpoint.raw_config, sort_keys=True),
        vocab_size=config.vocab_size,
        num_layers=config.num_layers,
        context_len_max=config.context_len_max,
        eos_ids=tuple(i for i in eos_ids if 0 <= i < config.vocab_size),
        tokenizer_json=tokenizer_json,
        chat_template=_chat_template(path, settings),
        bos_token=_token_text(settings.get("bos_token")),
        eos_token=_token_text(settings.get("eos_token")),
        token_bytes=token_bytes_of(tokenizer, config.vocab_size),
        strip_leading_space=strips_leading_space(tokenizer),
        add_bos=settings.get("add_bos_token", False) is True,
    )


def _read_tokenizer(path: Path) -> bytes:
    try:
        if path.stat().st_size > TOKENIZER_BYTES_MAX:
            raise LoadFailed(f"tokenizer.json is larger than {TOKENIZER_BYTES_MAX} bytes")
        return path.read_bytes()
    except OSError as error:
        raise LoadFailed(f"tokenizer.json can't be read: {error.strerror}") from None


def _chat_template(path: Path, settings: Mapping[str, object]) -> str:
    """New directories keep it in a file of its own, old ones in tokenizer_config.json, alone or by name."""
    file = path / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text("utf-8")
        except (OSError, ValueError) as error:
            raise LoadFailed(f"chat_template.jinja can't be read: {error}") from None
    match settings.get("chat_template"):
        case str(template):
            return template
        case list(named):
            for entry in named:
                if isinstance(entry, Mapping) and entry.get("name") == "default":
                    return str(entry.get("template") or "")
    return ""


def _token_text(token: object) -> str:
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else ""
