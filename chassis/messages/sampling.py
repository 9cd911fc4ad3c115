"""How a request's tokens are drawn, and the log probabilities that come back with them.

`Sampling` holds what most requests say; `Shaping` what few do, and is None for the others, so that they pay
nothing for it. `Logprobs` are columns over consecutive output ids.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from math import isfinite
from typing import NamedTuple

from chassis.messages import BadMessage, check
from chassis.wire import request_pb2 as pb

PENALTY_MAX = 2.0  # presence and frequency: from -2
REPETITION_PENALTY_MAX = 2.0
LOGIT_BIAS_MAX = 100.0  # from -100
LOGIT_BIAS_LEN_MAX = 1024
ALLOWED_IDS_LEN_MAX = 1 << 14
BAD_WORDS_LEN_MAX = 64  # strings
BAD_WORD_BYTES_MAX = 256
BAD_WORD_FORMS_MAX = 2 * BAD_WORDS_LEN_MAX  # with a leading space, and without
TOP_LOGPROBS_MAX = 20
RECORD_LOGPROBS_MAX = 32_768  # entries kept in a terminal record: of the first ids, those that fit
PROMPT_LOGPROBS_MAX = (
    32_768  # entries a prompt may ask for: one message of the bus holds them beside the output
)

GRAMMAR_BYTES_MAX = 1 << 16
GRAMMAR_ERROR = "grammar: "  # begins what is said of one that can't be followed


class GrammarKind(Enum):
    """What the text of a grammar is."""

    JSON_OBJECT = "json_object"  # none: any JSON object
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"  # a JSON list of strings
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the whole output is."""

    kind: GrammarKind
    text: str = ""


@dataclass(frozen=True, slots=True)
class Shaping:
    min_p: float = 0.0  # 0 = off
    typical_p: float = 1.0  # 1 = off
    repetition_penalty: float = 1.0  # of ids in prompt or output; 1 = off
    presence_penalty: float = 0.0  # of ids in the output; 0 = off
    frequency_penalty: float = 0.0  # times their number in the output; 0 = off
    logit_bias: tuple[tuple[int, float], ...] = ()  # by id, ascending
    allowed_ids: tuple[int, ...] = ()  # none = all
    bad_words: tuple[tuple[int, ...], ...] = ()  # ids; the last is banned where the others precede it

    @property
    def follows(self) -> bool:
        """It is a function of the ids so far."""
        return self.penalises or any(len(word) > 1 for word in self.bad_words)

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


NO_SHAPING = Shaping()


@dataclass(frozen=True, slots=True)
class Sampling:
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # 1 = off
    shaping: Shaping | None = None
    logprobs: int | None = None  # how many of the likeliest to tell beside each output id; None = nothing
    prompt_logprobs: int | None = None  # the same of the prompt's ids after the first
    grammar: Grammar | None = None  # None: any output

    @property
    def follows(self) -> bool:
        """It is a function of the ids so far."""
        return self.grammar is not None or (self.shaping is not None and self.shaping.follows)


class TokenLogprobs(NamedTuple):
    """Of one output id: natural logarithms of what the model itself says, before any parameter acts."""

    logprob: float
    rank: int  # 1 + the number of ids that are likelier
    top_ids: tuple[int, ...] = ()  # likeliest first, the lower id first among equals
    top_logprobs: tuple[float, ...] = ()


UNTOLD = TokenLogprobs(0.0, 0)  # rank 0: nobody who knew is left


class PromptTold(NamedTuple):
    """Of a prompt's ids after the first. Goes with the first output id: who has that has this."""

    ids: tuple[int, ...]
    entries: tuple[TokenLogprobs, ...]  # one an id, given those before it


def prompt_entries(prompt_len: int, top: int) -> int:
    """How many entries a prompt's log probabilities are."""
    return (prompt_len - 1) * (1 + top)


def build_sampling(s: Sampling) -> pb.Sampling:
    m = pb.Sampling(
        temperature=s.temperature,
        top_k=s.top_k,
        top_p=s.top_p,
        logprobs=s.logprobs,
        prompt_logprobs=s.prompt_logprobs,
    )
    if s.shaping is not None:
        m.shaping.CopyFrom(_build_shaping(s.shaping))
    if s.grammar is not None:
        m.grammar.kind, m.grammar.text = s.grammar.kind.value, s.grammar.text
    return m


def parse_sampling(m: pb.Sampling) -> Sampling:
    """Raises BadMessage where a worker could not follow; ranges that users see are the gateway's to check."""
    shaping = _parse_shaping(m.shaping) if m.HasField("shaping") else None
    logprobs = m.logprobs if m.HasField("logprobs") else None
    prompt_logprobs = m.prompt_logprobs if m.HasField("prompt_logprobs") else None
    check(max(logprobs or 0, prompt_logprobs or 0) <= TOP_LOGPROBS_MAX, "sampling: logprobs")
    grammar = _parse_grammar(m.grammar) if m.HasField("grammar") else None
    return Sampling(m.temperature, m.top_k, m.top_p, shaping, logprobs, prompt_logprobs, grammar)


def _parse_grammar(m: pb.Grammar) -> Grammar:
    check(len(m.text) <= GRAMMAR_BYTES_MAX, "grammar: too long")
    try:
        return Grammar(GrammarKind(m.kind), m.text)
    except ValueError:
        raise BadMessage(f"grammar: kind {m.kind!r} is unknown") from None


def _build_shaping(s: Shaping) -> pb.Shaping:
    return pb.Shaping(
        min_p=s.min_p,
        typical_p=s.typical_p,
        repetition_penalty=s.repetition_penalty,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        bias_ids=[token_id for token_id, _ in s.logit_bias],
        bias=[bias for _, bias in s.logit_bias],
        allowed_ids=s.allowed_ids,
        bad_word_ids=list(chain.from_iterable(s.bad_words)),
        bad_word_lens=list(map(len, s.bad_words)),
    )


def _parse_shaping(m: pb.Shaping) -> Shaping:
    finite = all(map(isfinite, (m.presence_penalty, m.frequency_penalty, *m.bias)))
    check(finite and 0 <= m.min_p <= 1 and 0 < m.typical_p <= 1, "shaping: out of range")
    check(isfinite(m.repetition_penalty) and m.repetition_penalty > 0, "shaping: repetition_penalty")
    check(len(m.bias_ids) == len(m.bias) <= LOGIT_BIAS_LEN_MAX, "shaping: logit_bias")
    check(all(a < b for a, b in zip(m.bias_ids, m.bias_ids[1:], strict=False)), "shaping: logit_bias order")
    check(len(m.allowed_ids) <= ALLOWED_IDS_LEN_MAX, "shaping: allowed_ids")
    check(all(m.bad_word_lens) and len(m.bad_word_lens) <= BAD_WORD_FORMS_MAX, "shaping: bad_words")
    check(sum(m.bad_word_lens) == len(m.bad_word_ids), "shaping: bad_words do not add up")
    return Shaping(
        min_p=m.min_p,
        typical_p=m.typical_p,
        repetition_penalty=m.repetition_penalty,
        presence_penalty=m.presence_penalty,
        frequency_penalty=m.frequency_penalty,
        logit_bias=tuple(zip(m.bias_ids, m.bias, strict=True)),
        allowed_ids=tuple(m.allowed_ids),
        bad_words=tuple(_split(tuple(m.bad_word_ids), m.bad_word_lens)),
    )


def _split(ids: tuple[int, ...], lens: Iterable[int]) -> Iterator[tuple[int, ...]]:
    end = 0
    for length in lens:
        begin, end = end, end + length
        yield ids[begin:end]


def build_logprobs(entries: Sequence[TokenLogprobs]) -> pb.Logprobs | None:
    """None for no entries: then nothing is said of them."""
    if not entries:
        return None
    logprobs, ranks, top_ids, top_logprobs = zip(*entries, strict=True)
    return pb.Logprobs(
        logprobs=logprobs,
        ranks=ranks,
        top_lens=list(map(len, top_ids)),
        top_ids=list(chain.from_iterable(top_ids)),
        top_logprobs=list(chain.from_iterable(top_logprobs)),
    )


def parse_logprobs(m: pb.Logprobs) -> tuple[TokenLogprobs, ...]:
    n, lens = len(m.logprobs), m.top_lens
    check(n == len(m.ranks) == len(lens), "logprobs: columns do not add up")
    check(sum(lens) == len(m.top_ids) == len(m.top_logprobs), "logprobs: entries do not add up")
    entries: list[TokenLogprobs] = []
    end = 0
    for logprob, rank, length in zip(m.logprobs, m.ranks, lens, strict=True):
        begin, end = end, end + length
        tops = tuple(m.top_ids[begin:end]), tuple(m.top_logprobs[begin:end])
        entries.append(TokenLogprobs(logprob, rank, *tops))
    return tuple(entries)


def build_prompt_told(told: PromptTold) -> pb.PromptTold:
    return pb.PromptTold(ids=told.ids, logprobs=build_logprobs(told.entries))


def parse_prompt_told(m: pb.PromptTold) -> PromptTold:
    ids, entries = tuple(m.ids), parse_logprobs(m.logprobs)
    check(len(ids) == len(entries), "prompt: logprobs do not add up")
    return PromptTold(ids, entries)


def recorded(entries: Sequence[TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    """Those of the first ids, as many as a record keeps."""
    left = RECORD_LOGPROBS_MAX
    for i, entry in enumerate(entries):
        left -= 1 + len(entry.top_ids)
        if left < 0:
            return tuple(entries[:i])
    return tuple(entries)
