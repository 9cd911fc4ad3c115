"""Pure. The sampling parameters of a call: their ranges, and what becomes of them in its request.

Rules: a refusal names field and limit; what a call leaves open costs nothing later, because it is not there.
"""

import struct

import orjson

from chassis.errors import Code, Status
from chassis.messages.gateway import GenerateCall
from chassis.messages.sampling import (
    ALLOWED_IDS_LEN_MAX,
    BAD_WORD_BYTES_MAX,
    BAD_WORDS_LEN_MAX,
    GRAMMAR_BYTES_MAX,
    LOGIT_BIAS_LEN_MAX,
    LOGIT_BIAS_MAX,
    NO_SHAPING,
    PENALTY_MAX,
    PROMPT_LOGPROBS_MAX,
    REPETITION_PENALTY_MAX,
    TOP_LOGPROBS_MAX,
    Grammar,
    GrammarKind,
    Sampling,
    Shaping,
    prompt_entries,
)

TEMPERATURE_MAX = 2.0
GREEDY_BELOW = 1e-5
CHOICES_MAX = 16
GRAMMAR_NESTING_MAX = 64
GRAMMAR_CHOICES_MAX = 1024
U32_MAX = 0xFFFFFFFF
U64_MAX = 0xFFFFFFFFFFFFFFFF
BadWords = tuple[tuple[int, ...], ...]


def check_sampling(call: GenerateCall) -> None:
    """What needs no model. Raises Status."""
    _check_range("temperature", call.temperature, 0, TEMPERATURE_MAX)
    _check_range("top_p", call.top_p, 0, 1, above=True)
    if call.top_k is not None and not 0 <= call.top_k <= U32_MAX:
        raise _invalid(f"top_k: {call.top_k}; 0 (off) to {U32_MAX}")
    _check_range("min_p", call.min_p, 0, 1)
    _check_range("typical_p", call.typical_p, 0, 1, above=True)
    _check_range("repetition_penalty", call.repetition_penalty, 0, REPETITION_PENALTY_MAX, above=True)
    _check_range("presence_penalty", call.presence_penalty, -PENALTY_MAX, PENALTY_MAX)
    _check_range("frequency_penalty", call.frequency_penalty, -PENALTY_MAX, PENALTY_MAX)
    if call.seed is not None and not 0 <= call.seed <= U64_MAX:
        raise _invalid(f"seed: {call.seed}; 0 to {U64_MAX}")
    if call.top_logprobs is not None and not 0 <= call.top_logprobs <= TOP_LOGPROBS_MAX:
        raise _invalid(f"top_logprobs: {call.top_logprobs}; 0 to {TOP_LOGPROBS_MAX}")
    if call.prompt_logprobs is not None and not 0 <= call.prompt_logprobs <= TOP_LOGPROBS_MAX:
        raise _invalid(f"prompt_logprobs: {call.prompt_logprobs}; 0 to {TOP_LOGPROBS_MAX}")
    _check_lists(call)
    if call.grammar is not None:
        _check_grammar(call.grammar)
        if call.ignore_eos:
            raise _invalid("ignore_eos: not with a grammar, which may have to end")
    if call.n is not None and not 1 <= call.n <= CHOICES_MAX:
        raise _invalid(f"n: {call.n}; 1 to {CHOICES_MAX}")
    if (call.n or 1) > 1 and temperature_of(call) == 0:
        raise _invalid(f"n: {call.n}; 1 with temperature 0, all choices would be the same")
    least = call.n or 1
    if call.best_of is not None and not least <= call.best_of <= CHOICES_MAX:
        raise _invalid(f"best_of: {call.best_of}; n, {least}, to {CHOICES_MAX}")


def _check_lists(call: GenerateCall) -> None:
    if len(call.logit_bias) > LOGIT_BIAS_LEN_MAX:
        raise _invalid(f"logit_bias: {len(call.logit_bias)} ids; at most {LOGIT_BIAS_LEN_MAX}")
    for token_id, bias in call.logit_bias:
        _check_range(f"logit_bias[{token_id}]", bias, -LOGIT_BIAS_MAX, LOGIT_BIAS_MAX)
    if len(call.allowed_token_ids) > ALLOWED_IDS_LEN_MAX:
        raise _invalid(f"allowed_token_ids: {len(call.allowed_token_ids)}; at most {ALLOWED_IDS_LEN_MAX}")
    if len(call.bad_words) > BAD_WORDS_LEN_MAX:
        raise _invalid(f"bad_words: {len(call.bad_words)} strings; at most {BAD_WORDS_LEN_MAX}")
    for i, word in enumerate(call.bad_words):
        try:
            size = len(word.encode())
        except UnicodeEncodeError:
            raise _invalid(f"bad_words[{i}]: not valid Unicode") from None
        if not word.strip() or size > BAD_WORD_BYTES_MAX:
            raise _invalid(f"bad_words[{i}]: 1 to {BAD_WORD_BYTES_MAX} bytes, and not only space")


def _check_grammar(grammar: Grammar) -> None:
    """Its size and form; whether it can be followed is for `gateway/grammar.py` to see."""
    kind, text = grammar.kind, grammar.text
    field = f"grammar.{kind.value}"
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise _invalid(f"{field}: not valid Unicode") from None
    if kind is GrammarKind.JSON_OBJECT:
        return
    if not 0 < size <= GRAMMAR_BYTES_MAX:
        raise _invalid(f"{field}: {size} bytes; 1 to {GRAMMAR_BYTES_MAX}")
    if kind in (GrammarKind.REGEX, GrammarKind.LARK):
        nesting = _brackets_of(text)
    else:
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise _invalid(f"{field}: not JSON: {error}") from None
        nesting = nesting_of(value)
        if kind is GrammarKind.CHOICE:
            _check_choices(value, field)
        elif not isinstance(value, dict):
            raise _invalid(f"{field}: not a JSON object")
    if nesting > GRAMMAR_NESTING_MAX:
        raise _invalid(f"{field}: nested {nesting} deep; at most {GRAMMAR_NESTING_MAX}")


def _check_choices(choices: object, field: str) -> None:
    if not isinstance(choices, list) or not all(isinstance(c, str) and c for c in choices):
        raise _invalid(f"{field}: strings, none empty")
    if not 0 < len(choices) <= GRAMMAR_CHOICES_MAX:
        raise _invalid(f"{field}: {len(choices)}; 1 to {GRAMMAR_CHOICES_MAX}")


def nesting_of(value: object) -> int:
    """How deep the lists and objects of a JSON value lie in each other."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
    return depth


def _brackets_of(text: str) -> int:
    """How deep its brackets go, whatever they mean: whoever reads it recurses no deeper."""
    deepest = depth = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth = max(0, depth - 1)
    return deepest


def _check_range(field: str, value: float | None, least: float, most: float, above: bool = False) -> None:
    """`above`: `least` itself is not in it, nor what messages cannot tell from it. NaN is in none."""
    if value is not None and not (
        value <= most and least < _float32(value) if above else least <= value <= most
    ):
        says = f"above {least:g}, up to {most:g}" if above else f"{least:g} to {most:g}"
        raise _invalid(f"{field}: {value:g}; {says}")


def _float32(value: float) -> float:
    """As messages carry it."""
    carried: float = struct.unpack("<f", struct.pack("<f", value))[0] if abs(value) < 1e38 else value
    return carried


def candidates_of(call: GenerateCall) -> int:
    """How many are generated."""
    return call.best_of or call.n or 1


def picks(call: GenerateCall) -> bool:
    """Whether only the best of what is generated is told."""
    return candidates_of(call) > (call.n or 1)


def check_ids(call: GenerateCall, model: str, vocab_size: int) -> None:
    """Against the model's vocabulary. Raises Status."""
    biased = tuple(token_id for token_id, _ in call.logit_bias)
    named = (
        ("token_ids", call.token_ids or ()),
        ("stop_token_ids", call.stop_token_ids),
        ("logit_bias", biased),
        ("allowed_token_ids", call.allowed_token_ids),
    )
    for name, ids in named:
        if (outside := next((i for i in ids if not 0 <= i < vocab_size), None)) is not None:
            raise _invalid(f"{name}: {outside}; below {vocab_size}, the vocabulary of {model}")


def check_prompt_logprobs(call: GenerateCall, prompt_len: int) -> None:
    """Whether messages can hold what is asked for. Raises Status."""
    top = call.prompt_logprobs
    if top is not None and (entries := prompt_entries(prompt_len, top)) > PROMPT_LOGPROBS_MAX:
        asked = f"{prompt_len - 1} ids, and {top} of the likeliest for each, are {entries}"
        raise _invalid(f"prompt_logprobs: {asked}; at most {PROMPT_LOGPROBS_MAX}")


def temperature_of(call: GenerateCall) -> float:
    temperature = 1.0 if call.temperature is None else call.temperature
    return temperature if temperature >= GREEDY_BELOW else 0.0


def sampling_of(call: GenerateCall, bad_words: BadWords = ()) -> Sampling:
    """`bad_words`: in ids, all their forms."""
    shaping = Shaping(
        min_p=call.min_p or 0.0,
        typical_p=1.0 if call.typical_p is None else call.typical_p,
        repetition_penalty=1.0 if call.repetition_penalty is None else call.repetition_penalty,
        presence_penalty=call.presence_penalty or 0.0,
        frequency_penalty=call.frequency_penalty or 0.0,
        logit_bias=tuple(sorted((token_id, bias) for token_id, bias in call.logit_bias if bias)),
        allowed_ids=tuple(sorted(dict.fromkeys(call.allowed_token_ids))),
        bad_words=bad_words,
    )
    return Sampling(
        temperature=temperature_of(call),
        top_k=call.top_k or 0,
        top_p=1.0 if call.top_p is None else call.top_p,
        shaping=shaping if shaping != NO_SHAPING else None,
        logprobs=0 if call.top_logprobs is None and picks(call) else call.top_logprobs,
        prompt_logprobs=call.prompt_logprobs,
        grammar=call.grammar,
    )


def forms_of(bad_words: tuple[str, ...]) -> tuple[str, ...]:
    """Each with and without a space before it: many vocabularies have both."""
    return tuple(dict.fromkeys(form for word in bad_words for form in (word, " " + word.lstrip())))


def _invalid(message: str) -> Status:
    return Status(Code.INVALID_ARGUMENT, message)
