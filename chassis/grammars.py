"""Grammars, compiled over a model's token bytes: the only file that knows llguidance.

Its automata are built as far as outputs go, under limits of fuel, so that a grammar compiles in milliseconds
and a mask takes tens of microseconds, a few milliseconds at worst; what is too complex says so, here or at
the mask that would have become too dear. No call raises for what a grammar is. Calls let other threads run.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, gbnf_to_lark
from numpy.typing import NDArray

from chassis.messages.card import ModelCard
from chassis.messages.sampling import Grammar, GrammarKind

Bool = NDArray[np.bool_]
JSON_SPACE = r"[ \t\n\r]{1,40}"  # between the parts of JSON: a bound, for small models go on with it forever
ERROR_LEN_MAX = 300
GBNF_CHARS_MAX = 8192
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,  # about 20 ms
    step_lexer_fuel=50_000,  # about 4 ms
    step_max_items=20_000,  # about 1 ms
    max_items_in_row=2_000,
    max_lexer_states=50_000,  # 50 to 100 MB
    max_grammar_size=200_000,
    verbose_errors=False,
)


class Vocabulary:
    """Of one model. Takes a tenth of a second for 50,000 tokens."""

    def __init__(self, card: ModelCard) -> None:
        """Raises ValueError for a model whose outputs nothing ends."""
        if not card.eos_ids:
            raise ValueError(f"model {card.name} has no token that ends an output")
        self.size = card.vocab_size
        self.ends = frozenset(card.eos_ids)
        self.tokenizer = LLTokenizer(
            TokenizerWrapper(_Tokens(card)), n_vocab=card.vocab_size, eos_token=list(card.eos_ids)
        )


class _Tokens:
    """As the library wants them. It forces what a grammar leaves no choice about as one would write it: by
    the model's own tokenizer where that says just these bytes, else by the longest tokens."""

    def __init__(self, card: ModelCard) -> None:
        table = card.token_bytes
        self.eos_token_id = card.eos_ids[0]
        self.bos_token_id = None
        self.tokens = [table[i] for i in range(card.vocab_size)]
        self.special_token_ids = [i for i, token in enumerate(self.tokens) if not token]
        self._ids = {token: i for i, token in reversed(list(enumerate(self.tokens))) if token}
        self._longest = max(map(len, self._ids), default=0)
        self._own = _own_tokenizer(card.tokenizer_json)

    def __call__(self, text: bytes | str) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        return self._written(data) or self._greedy(data)

    def _written(self, data: bytes) -> list[int]:
        """None, if that says anything else."""
        if self._own is None:
            return []
        try:
            ids: list[int] = self._own.encode(data.decode(), add_special_tokens=False).ids
            fine = b"".join([self.tokens[i] for i in ids]) == data
        except (UnicodeDecodeError, IndexError):
            return []
        return ids if fine else []

    def _greedy(self, data: bytes) -> list[int]:
        ids, begin = [], 0
        while begin < len(data):
            for end in range(min(begin + self._longest, len(data)), begin, -1):
                if (token_id := self._ids.get(data[begin:end])) is not None:
                    ids.append(token_id)
                    break
            else:
                end = begin + 1  # a byte that no token has: no mask allows it either
            begin = end
        return ids


def _own_tokenizer(tokenizer_json: bytes) -> Any:
    if not tokenizer_json:
        return None
    try:
        from tokenizers import Tokenizer  # takes 50 ms

        return Tokenizer.from_buffer(tokenizer_json)
    except Exception:  # the library raises plain Exception
        return None


def refusal_of(grammar: Grammar) -> str | None:
    """Why it can't be compiled, whatever the model; None: it can. Blocks for milliseconds."""
    written = _written(grammar)
    if isinstance(written, ValueError):
        return _shortened(str(written))
    error = LLMatcher.validate_grammar(written, None, limits=LIMITS)
    return None if not error or error.startswith("WARNING") else _shortened(error)


class Compiled:
    """A grammar over a vocabulary; `error`: it could not be compiled."""

    def __init__(self, grammar: Grammar, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        written = _written(grammar)
        self.error: str | None = None
        if isinstance(written, ValueError):
            self.error = _shortened(str(written))
            return
        self._matcher = LLMatcher(vocabulary.tokenizer, written, log_level=0, limits=LIMITS)
        self.error = _error_of(self._matcher)

    def begin(self) -> "Following":
        return Following(self._matcher.deep_copy(), self._vocabulary)


class Following:
    """One output on its way through a grammar."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._vocab_size = vocabulary.size
        self._ends = vocabulary.ends
        self._over = False
        self._bits = np.zeros((vocabulary.size + 31) // 32, np.uint32)

    def take(self, token_ids: Sequence[int]) -> str | None:
        """The output's next ids. Returns why they can't be followed."""
        ids = list(token_ids)
        if not ids:
            return None
        end = next((i for i, token_id in enumerate(ids) if token_id in self._ends), len(ids))
        if self._over or not (end == 0 or self._matcher.consume_tokens(ids[:end])):
            return _error_of(self._matcher) or "the output is not of the grammar"
        if end == len(ids):
            return None
        self._over = True
        return None if self._matcher.is_accepting() and end + 1 == len(ids) else "the output had to go on"

    def allowed(self) -> Bool | str:
        """[vocabulary]: ids that may come next; of those that end the output, where it may end. Or why there
        are none."""
        if self._over:
            return "the output has ended"
        bits = self._bits
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if (error := _error_of(self._matcher)) is not None:
            return error
        unpacked = np.unpackbits(bits.view(np.uint8), count=self._vocab_size, bitorder="little")
        mask: Bool = unpacked.view(np.bool_)
        return mask if mask.any() else "it allows no token of this model here"


def _error_of(matcher: LLMatcher) -> str | None:
    if not matcher.is_error():
        return None
    return _shortened(matcher.get_error() or "it can't be followed")


def _shortened(error: str) -> str:
    """What the library says without the grammar, which it repeats before and behind."""
    text = " ".join(error.replace("<non-verbose/>", "").split())
    if len(text) > ERROR_LEN_MAX and " error: " in text:
        text = text[text.rindex(" error: ") + 8 :]
    return text if len(text) <= ERROR_LEN_MAX else text[:ERROR_LEN_MAX] + "..."


def _written(grammar: Grammar) -> str | ValueError:
    """In the library's own words."""
    try:
        match grammar.kind:
            case GrammarKind.JSON_OBJECT:
                return _of_schema('{"type": "object"}')
            case GrammarKind.JSON_SCHEMA:
                return _of_schema(grammar.text)
            case GrammarKind.REGEX:
                return LLMatcher.grammar_from_regex(grammar.text)
            case GrammarKind.CHOICE:
                choices = " | ".join(map(json.dumps, json.loads(grammar.text)))
                return LLMatcher.grammar_from_lark(f"start: {choices}")
            case GrammarKind.LARK if "::=" in grammar.text:  # llama.cpp's form
                return LLMatcher.grammar_from_lark(_lark_of_gbnf(grammar.text))
            case GrammarKind.LARK:
                return LLMatcher.grammar_from_lark(grammar.text)
    except (ValueError, TypeError, RecursionError) as error:
        return ValueError(str(error))


def _lark_of_gbnf(text: str) -> str:
    """Raises ValueError. The library does this in Python, under the interpreter's lock: hence the bound."""
    if len(text) > GBNF_CHARS_MAX:
        raise ValueError(f"{len(text)} characters of GBNF; at most {GBNF_CHARS_MAX}")
    try:
        return str(gbnf_to_lark.any_to_lark(text))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(str(error)) from None


def _of_schema(text: str) -> str:
    return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": JSON_SPACE})
