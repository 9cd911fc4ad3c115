"""Pure. Log probabilities in three shapes: chat's, the older completions', vLLM's of prompts."""

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from chassis.messages.gateway import IdLogprobs

FLOOR = -9999.0  # JSON has no infinity; also of ids that nobody told of


def chat_logprobs(entries: Iterable[IdLogprobs]) -> dict[str, Any]:
    return {"content": [_chat_entry(entry) for entry in entries], "refusal": None}


def _chat_entry(entry: IdLogprobs) -> dict[str, Any]:
    value = told(entry)
    top = [_chat_token(t.token, t.logprob) for t in entry.top]
    return _chat_token(entry.token, FLOOR if value is None else value) | {"top_logprobs": top}


def _chat_token(token: bytes, logprob: float) -> dict[str, Any]:
    return {
        "token": token.decode(errors="replace"),
        "logprob": max(logprob, FLOOR),
        "bytes": list(token),
    }


def told(entry: IdLogprobs) -> float | None:
    """None: not known."""
    return max(entry.logprob, FLOOR) if entry.rank else None


def token_text(token: bytes) -> str:
    """A token of whole characters as it is; another by its bytes, so that no two are the same."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


class TextLogprobs:
    """The lists of the older completions. An offset is where a token begins in the text, in characters."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def lists(self, entries: Sequence[IdLogprobs | bytes]) -> dict[str, Any]:
        """Of the tokens that come next. Bytes: a token of which nothing is told (a prompt's first)."""
        tokens: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for entry in entries:
            token = entry if isinstance(entry, bytes) else entry.token
            tokens.append(token_text(token))
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(token))
            value = None if isinstance(entry, bytes) else told(entry)
            logprobs.append(value)
            if isinstance(entry, bytes) or value is None:
                tops.append(None)
                continue
            likeliest: dict[str, float] = {}
            for t in entry.top[: self._top]:
                likeliest.setdefault(token_text(t.token), max(t.logprob, FLOOR))
            likeliest.setdefault(tokens[-1], value)
            tops.append(likeliest)
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def prompt_logprobs(ids: Sequence[int], entries: Sequence[IdLogprobs], top: int) -> list[Any]:
    """Of a prompt's ids after the first; of the first there is nothing to tell."""
    told_of: list[Any] = [None]
    for token_id, entry in zip(ids, entries, strict=True):
        one = {str(token_id): _ranked(entry.logprob, entry.rank, entry.token)}
        for rank, t in enumerate(entry.top[:top], 1):
            one.setdefault(str(t.id), _ranked(t.logprob, rank, t.token))
        told_of.append(one)
    return told_of


def _ranked(logprob: float, rank: int, token: bytes) -> dict[str, Any]:
    return {"logprob": max(logprob, FLOOR), "rank": rank, "decoded_token": token.decode(errors="replace")}
