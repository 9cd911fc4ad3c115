"""Pure. What a caller may say: prompts, parameters, which models there are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Messages = Sequence[tuple[str, str]]  # (role, content)
Prompt = str | Messages | Sequence[int]  # raw text, a chat, or token ids


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the whole output is; one of these."""

    json_object: bool = False  # any
    json_schema: str = ""
    regex: str = ""
    choice: tuple[str, ...] = ()
    lark: str = ""  # in the variant of llguidance


@dataclass(frozen=True, slots=True)
class Params:
    """How to generate; None and 0 leave the choice to the gateway, as in `gateway.proto`."""

    model: str = ""
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    priority: int | None = None
    timeout_ms: int = 0
    resume_window_s: int = 0
    client_key: str = ""
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None  # the same of the prompt; of several choices the first is told
    n: int | None = None  # choices: the events of all come in one stream
    stream_interval: int = 0  # output ids of a delta at least, but of the first and the last
    queue_timeout_ms: int = 0  # how long it may wait for its place, where the queue policy allows
    best_of: int | None = None  # so many are generated; the n best are told, best first, when all have ended
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    digest: str
    context_len_max: int
    vocab_size: int
    chat: bool
