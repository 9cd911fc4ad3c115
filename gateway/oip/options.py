"""Pure. What requests may ask beside their prompt, under the names of the common conventions.

TRT-LLM's names are tensors, the vLLM backend's are keys of the JSON in `sampling_parameters`, Dynamo's are
request parameters; each is taken in each place, and numbers may come as text, as some clients send them. A
refusal names it. What has no effect here may say only what would have none.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import orjson

from chassis.messages.sampling import Grammar, GrammarKind
from gateway.admission import invalid
from gateway.sampling import U32_MAX, U64_MAX

LIST_LEN_MAX = 1 << 16
Read = Callable[[str, Any], Any]


def read_int(name: str, value: Any, highest: int = U32_MAX, lowest: int = 0) -> int:
    """Raises Status."""
    if isinstance(value, str) and len(value) <= 24:
        try:
            value = int(value)
        except ValueError:
            value = read_float(name, value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid(f"{name}: {_shown(value)}; a whole number")
    if not lowest <= value <= highest:
        raise invalid(f"{name}: {value if abs(value) < 1 << 70 else 'beyond 64 bits'}; {lowest} to {highest}")
    return value


def read_float(name: str, value: Any) -> float:
    """Raises Status."""
    try:
        if not isinstance(value, bool) and isinstance(value, int | float | str):
            number = float(value)
            if isfinite(number):
                return number
    except (ValueError, OverflowError):
        pass
    raise invalid(f"{name}: {_shown(value)}; a number")


def read_bool(name: str, value: Any) -> bool:
    """Raises Status."""
    if isinstance(value, str) and value.lower() in ("true", "false", "1", "0"):
        return value.lower() in ("true", "1")
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    raise invalid(f"{name}: {_shown(value)}; true or false")


def read_text(name: str, value: Any) -> str:
    """Raises Status."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise invalid(f"{name}: not UTF-8 at byte {error.start}") from None
    if not isinstance(value, str):
        raise invalid(f"{name}: {_shown(value)}; text")
    return value


def _list(name: str, value: Any) -> list[Any]:
    found = list(value) if isinstance(value, list | tuple) else [value]
    if len(found) > LIST_LEN_MAX:
        raise invalid(f"{name}: {len(found)} elements; at most {LIST_LEN_MAX}")
    return found


def _texts(name: str, value: Any) -> tuple[str, ...]:
    """Empty ones are what clients send that have none."""
    return tuple(text for one in _list(name, value) if (text := read_text(name, one)))


def read_ids(name: str, values: Sequence[Any]) -> tuple[int, ...]:
    """Of a million, one by one, everybody's streams would wait half a second. Raises Status."""
    if set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= U32_MAX:
        return tuple(values)
    return tuple([read_int(name, value) for value in values])


def _ids(name: str, value: Any) -> tuple[int, ...]:
    return read_ids(name, _list(name, value))


def _seed(name: str, value: Any) -> int:
    return read_int(name, value, U64_MAX)


def _top_k(name: str, value: Any) -> int:
    return max(0, read_int(name, value, lowest=-1))  # -1 is off, too


def _logprobs(name: str, value: Any) -> int | None:
    """How many of the likeliest; true is none of them."""
    if isinstance(value, bool) or (isinstance(value, str) and value.lower() in ("true", "false")):
        return 0 if read_bool(name, value) else None
    return read_int(name, value)


def _bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise invalid(f"{name}: {_shown(value)}; numbers by token id")
    pairs = {read_int(f"{name} id", key): read_float(f"{name}[{key}]", bias) for key, bias in value.items()}
    return tuple(sorted(pairs.items()))


def _grammar(kind: GrammarKind) -> Read:
    def read(name: str, value: Any) -> Grammar:
        try:
            return Grammar(kind, value if isinstance(value, str) else orjson.dumps(value).decode())
        except orjson.JSONEncodeError as error:
            raise invalid(f"{name}: {error}") from None

    return read


def only(*fine: Any) -> Read:
    """For what can't be had here."""

    def read(name: str, value: Any) -> None:
        if value not in fine and str(value).lower() not in [str(one).lower() for one in fine]:
            raise invalid(f"{name}: {_shown(value)}; only {' or '.join(map(str, fine))}")

    return read


def _any(name: str, value: Any) -> None:
    """It changes nothing here, whatever it says."""


def _shown(value: Any) -> str:
    return repr(value)[:100]


@dataclass(frozen=True, slots=True)
class Option:
    """`field` of a GenerateCall; empty: it becomes nothing. `many`: a row of it is a list."""

    field: str
    read: Read
    datatype: str = ""  # of its tensor; empty: it can't be one
    many: bool = False


OPTIONS: Mapping[str, Option] = {
    "max_tokens": Option("max_tokens", read_int, "INT32"),
    "request_output_len": Option("max_tokens", read_int, "INT32"),
    "min_tokens": Option("min_tokens", read_int, "INT32"),
    "min_length": Option("min_tokens", read_int, "INT32"),
    "temperature": Option("temperature", read_float, "FP32"),
    "top_k": Option("top_k", _top_k, "INT32"),
    "top_p": Option("top_p", read_float, "FP32"),
    "min_p": Option("min_p", read_float, "FP32"),
    "typical_p": Option("typical_p", read_float, "FP32"),
    "repetition_penalty": Option("repetition_penalty", read_float, "FP32"),
    "presence_penalty": Option("presence_penalty", read_float, "FP32"),
    "frequency_penalty": Option("frequency_penalty", read_float, "FP32"),
    "seed": Option("seed", _seed, "UINT64"),
    "random_seed": Option("seed", _seed, "UINT64"),
    "stop": Option("stop", _texts, "BYTES", many=True),
    "stop_words": Option("stop", _texts, "BYTES", many=True),
    "bad_words": Option("bad_words", _texts, "BYTES", many=True),
    "stop_token_ids": Option("stop_token_ids", _ids, "INT32", many=True),
    "end_id": Option("stop_token_ids", _ids, "INT32"),
    "ignore_eos": Option("ignore_eos", read_bool, "BOOL"),
    "n": Option("n", read_int, "INT32"),
    "num_return_sequences": Option("n", read_int, "INT32"),
    "best_of": Option("best_of", read_int, "INT32"),
    "logprobs": Option("top_logprobs", _logprobs),
    "return_log_probs": Option("top_logprobs", _logprobs, "BOOL"),
    "return_cumulative_logprob": Option("top_logprobs", _logprobs, "BOOL"),
    "logit_bias": Option("logit_bias", _bias),
    "allowed_token_ids": Option("allowed_token_ids", _ids, "INT32", many=True),
    "guided_json": Option("grammar", _grammar(GrammarKind.JSON_SCHEMA)),
    "guided_regex": Option("grammar", _grammar(GrammarKind.REGEX)),
    "guided_choice": Option("grammar", _grammar(GrammarKind.CHOICE)),
    "guided_grammar": Option("grammar", _grammar(GrammarKind.LARK)),
    # what only ever says what is so
    "beam_width": Option("", only(1), "INT32"),
    "use_beam_search": Option("", only(False)),
    "length_penalty": Option("", _any, "FP32"),
    "pad_id": Option("", _any, "INT32"),
    "skip_special_tokens": Option("", only(True)),
    "spaces_between_special_tokens": Option("", only(True)),
    "include_stop_str_in_output": Option("", only(False)),
    "detokenize": Option("", only(True)),
    "return_context_logits": Option("", only(False), "BOOL"),
    "return_generation_logits": Option("", only(False), "BOOL"),
    "lora_name": Option("", only("")),
}
