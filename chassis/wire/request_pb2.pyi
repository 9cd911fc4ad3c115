from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Request(_message.Message):
    __slots__ = ("id", "tenant", "gateway", "model", "prompt_ids", "seed", "sampling", "limits", "timeout_ms", "resume_window_ms", "priority", "body_digest", "keyed", "trace_parent", "stream_interval", "queue_timeout_us", "key", "choice")
    ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    RESUME_WINDOW_MS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    BODY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    KEYED_FIELD_NUMBER: _ClassVar[int]
    TRACE_PARENT_FIELD_NUMBER: _ClassVar[int]
    STREAM_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIMEOUT_US_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    id: str
    tenant: str
    gateway: str
    model: str
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    seed: int
    sampling: Sampling
    limits: Limits
    timeout_ms: int
    resume_window_ms: int
    priority: int
    body_digest: bytes
    keyed: bool
    trace_parent: bytes
    stream_interval: int
    queue_timeout_us: int
    key: str
    choice: int
    def __init__(self, id: _Optional[str] = ..., tenant: _Optional[str] = ..., gateway: _Optional[str] = ..., model: _Optional[str] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., seed: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., timeout_ms: _Optional[int] = ..., resume_window_ms: _Optional[int] = ..., priority: _Optional[int] = ..., body_digest: _Optional[bytes] = ..., keyed: _Optional[bool] = ..., trace_parent: _Optional[bytes] = ..., stream_interval: _Optional[int] = ..., queue_timeout_us: _Optional[int] = ..., key: _Optional[str] = ..., choice: _Optional[int] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "shaping", "logprobs", "prompt_logprobs", "grammar")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SHAPING_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    shaping: Shaping
    logprobs: int
    prompt_logprobs: int
    grammar: Grammar
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., shaping: _Optional[_Union[Shaping, _Mapping]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class Shaping(_message.Message):
    __slots__ = ("min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "bias_ids", "bias", "allowed_ids", "bad_word_ids", "bad_word_lens")
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BIAS_IDS_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORD_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORD_LENS_FIELD_NUMBER: _ClassVar[int]
    min_p: float
    typical_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    bias_ids: _containers.RepeatedScalarFieldContainer[int]
    bias: _containers.RepeatedScalarFieldContainer[float]
    allowed_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_word_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_word_lens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, min_p: _Optional[float] = ..., typical_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., bias_ids: _Optional[_Iterable[int]] = ..., bias: _Optional[_Iterable[float]] = ..., allowed_ids: _Optional[_Iterable[int]] = ..., bad_word_ids: _Optional[_Iterable[int]] = ..., bad_word_lens: _Optional[_Iterable[int]] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("logprobs", "ranks", "top_lens", "top_ids", "top_logprobs")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TOP_LENS_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    top_lens: _containers.RepeatedScalarFieldContainer[int]
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprobs: _Optional[_Iterable[float]] = ..., ranks: _Optional[_Iterable[int]] = ..., top_lens: _Optional[_Iterable[int]] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class PromptTold(_message.Message):
    __slots__ = ("ids", "logprobs")
    IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: Logprobs
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[bytes]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[bytes]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ...) -> None: ...

class Record(_message.Message):
    __slots__ = ("claim", "cancel", "terminal")
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    TERMINAL_FIELD_NUMBER: _ClassVar[int]
    claim: Claim
    cancel: CancelMark
    terminal: Terminal
    def __init__(self, claim: _Optional[_Union[Claim, _Mapping]] = ..., cancel: _Optional[_Union[CancelMark, _Mapping]] = ..., terminal: _Optional[_Union[Terminal, _Mapping]] = ...) -> None: ...

class Claim(_message.Message):
    __slots__ = ("attempt", "boot", "body_digest", "worker_deaths", "batcher_deaths", "left")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    BODY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    WORKER_DEATHS_FIELD_NUMBER: _ClassVar[int]
    BATCHER_DEATHS_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    boot: str
    body_digest: bytes
    worker_deaths: int
    batcher_deaths: int
    left: bool
    def __init__(self, attempt: _Optional[int] = ..., boot: _Optional[str] = ..., body_digest: _Optional[bytes] = ..., worker_deaths: _Optional[int] = ..., batcher_deaths: _Optional[int] = ..., left: _Optional[bool] = ...) -> None: ...

class CancelMark(_message.Message):
    __slots__ = ("attempt", "boot", "reason")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    boot: str
    reason: str
    def __init__(self, attempt: _Optional[int] = ..., boot: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Terminal(_message.Message):
    __slots__ = ("attempt", "boot", "reason", "output_ids", "byte_cut", "usage", "timings", "error", "tenant", "body_digest", "model", "stop", "logprobs", "prompt", "retry_ms", "key", "priority", "choice", "accepted_ms", "worker_deaths", "batcher_deaths")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    BYTE_CUT_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    BODY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    RETRY_MS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_MS_FIELD_NUMBER: _ClassVar[int]
    WORKER_DEATHS_FIELD_NUMBER: _ClassVar[int]
    BATCHER_DEATHS_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    boot: str
    reason: str
    output_ids: _containers.RepeatedScalarFieldContainer[int]
    byte_cut: int
    usage: Usage
    timings: Timings
    error: str
    tenant: str
    body_digest: bytes
    model: str
    stop: _containers.RepeatedScalarFieldContainer[bytes]
    logprobs: Logprobs
    prompt: PromptTold
    retry_ms: int
    key: str
    priority: int
    choice: int
    accepted_ms: int
    worker_deaths: int
    batcher_deaths: int
    def __init__(self, attempt: _Optional[int] = ..., boot: _Optional[str] = ..., reason: _Optional[str] = ..., output_ids: _Optional[_Iterable[int]] = ..., byte_cut: _Optional[int] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., error: _Optional[str] = ..., tenant: _Optional[str] = ..., body_digest: _Optional[bytes] = ..., model: _Optional[str] = ..., stop: _Optional[_Iterable[bytes]] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ..., prompt: _Optional[_Union[PromptTold, _Mapping]] = ..., retry_ms: _Optional[int] = ..., key: _Optional[str] = ..., priority: _Optional[int] = ..., choice: _Optional[int] = ..., accepted_ms: _Optional[int] = ..., worker_deaths: _Optional[int] = ..., batcher_deaths: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "output_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queued_us", "waiting_us", "prefill_us", "decode_us", "interrupted_us", "preemptions", "recomputed_tokens", "stage_compute_us")
    QUEUED_US_FIELD_NUMBER: _ClassVar[int]
    WAITING_US_FIELD_NUMBER: _ClassVar[int]
    PREFILL_US_FIELD_NUMBER: _ClassVar[int]
    DECODE_US_FIELD_NUMBER: _ClassVar[int]
    INTERRUPTED_US_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STAGE_COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    queued_us: int
    waiting_us: int
    prefill_us: int
    decode_us: int
    interrupted_us: int
    preemptions: int
    recomputed_tokens: int
    stage_compute_us: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, queued_us: _Optional[int] = ..., waiting_us: _Optional[int] = ..., prefill_us: _Optional[int] = ..., decode_us: _Optional[int] = ..., interrupted_us: _Optional[int] = ..., preemptions: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., stage_compute_us: _Optional[_Iterable[int]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("boot", "number", "parts", "finishes")
    BOOT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    FINISHES_FIELD_NUMBER: _ClassVar[int]
    boot: str
    number: int
    parts: Parts
    finishes: _containers.RepeatedCompositeFieldContainer[Finish]
    def __init__(self, boot: _Optional[str] = ..., number: _Optional[int] = ..., parts: _Optional[_Union[Parts, _Mapping]] = ..., finishes: _Optional[_Iterable[_Union[Finish, _Mapping]]] = ...) -> None: ...

class Parts(_message.Message):
    __slots__ = ("request_ids", "attempts", "first_indices", "lens", "ids", "digests", "told", "logprobs", "begun", "prompts")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDICES_FIELD_NUMBER: _ClassVar[int]
    LENS_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    TOLD_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    attempts: _containers.RepeatedScalarFieldContainer[int]
    first_indices: _containers.RepeatedScalarFieldContainer[int]
    lens: _containers.RepeatedScalarFieldContainer[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    digests: _containers.RepeatedScalarFieldContainer[int]
    told: _containers.RepeatedScalarFieldContainer[int]
    logprobs: Logprobs
    begun: _containers.RepeatedScalarFieldContainer[int]
    prompts: _containers.RepeatedCompositeFieldContainer[PromptTold]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ..., attempts: _Optional[_Iterable[int]] = ..., first_indices: _Optional[_Iterable[int]] = ..., lens: _Optional[_Iterable[int]] = ..., ids: _Optional[_Iterable[int]] = ..., digests: _Optional[_Iterable[int]] = ..., told: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ..., begun: _Optional[_Iterable[int]] = ..., prompts: _Optional[_Iterable[_Union[PromptTold, _Mapping]]] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("request_id", "attempt", "length", "digest", "reason", "byte_cut", "usage", "timings", "error", "retry_ms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BYTE_CUT_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    RETRY_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    length: int
    digest: int
    reason: str
    byte_cut: int
    usage: Usage
    timings: Timings
    error: str
    retry_ms: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., length: _Optional[int] = ..., digest: _Optional[int] = ..., reason: _Optional[str] = ..., byte_cut: _Optional[int] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., error: _Optional[str] = ..., retry_ms: _Optional[int] = ...) -> None: ...

class TakeoverQuestion(_message.Message):
    __slots__ = ("request_id", "attempt", "boot")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    boot: str
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., boot: _Optional[str] = ...) -> None: ...

class ToBatcher(_message.Message):
    __slots__ = ("owner", "takeover", "attach", "cancel", "detached", "refused", "take")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    TAKEOVER_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    DETACHED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    TAKE_FIELD_NUMBER: _ClassVar[int]
    owner: OwnerQuestion
    takeover: TakeoverAnswer
    attach: Attach
    cancel: CancelAsk
    detached: Detached
    refused: Refused
    take: Take
    def __init__(self, owner: _Optional[_Union[OwnerQuestion, _Mapping]] = ..., takeover: _Optional[_Union[TakeoverAnswer, _Mapping]] = ..., attach: _Optional[_Union[Attach, _Mapping]] = ..., cancel: _Optional[_Union[CancelAsk, _Mapping]] = ..., detached: _Optional[_Union[Detached, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., take: _Optional[_Union[Take, _Mapping]] = ...) -> None: ...

class Take(_message.Message):
    __slots__ = ("request", "ack_token", "age_us")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ACK_TOKEN_FIELD_NUMBER: _ClassVar[int]
    AGE_US_FIELD_NUMBER: _ClassVar[int]
    request: Request
    ack_token: str
    age_us: int
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ..., ack_token: _Optional[str] = ..., age_us: _Optional[int] = ...) -> None: ...

class OwnerQuestion(_message.Message):
    __slots__ = ("request_id", "attempt", "ack_token", "cancelled")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ACK_TOKEN_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    ack_token: str
    cancelled: bool
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., ack_token: _Optional[str] = ..., cancelled: _Optional[bool] = ...) -> None: ...

class OwnerAnswer(_message.Message):
    __slots__ = ("mine",)
    MINE_FIELD_NUMBER: _ClassVar[int]
    mine: bool
    def __init__(self, mine: _Optional[bool] = ...) -> None: ...

class TakeoverAnswer(_message.Message):
    __slots__ = ("request_id", "gateway", "attempt", "yes", "no_minimum")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    YES_FIELD_NUMBER: _ClassVar[int]
    NO_MINIMUM_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    gateway: str
    attempt: int
    yes: Ids
    no_minimum: int
    def __init__(self, request_id: _Optional[str] = ..., gateway: _Optional[str] = ..., attempt: _Optional[int] = ..., yes: _Optional[_Union[Ids, _Mapping]] = ..., no_minimum: _Optional[int] = ...) -> None: ...

class Ids(_message.Message):
    __slots__ = ("ids", "logprobs", "prompt")
    IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: Logprobs
    prompt: PromptTold
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ..., prompt: _Optional[_Union[PromptTold, _Mapping]] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("request_id", "attempt", "gateway", "held")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    gateway: str
    held: Ids
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., gateway: _Optional[str] = ..., held: _Optional[_Union[Ids, _Mapping]] = ...) -> None: ...

class AttachAnswer(_message.Message):
    __slots__ = ("kind",)
    KIND_FIELD_NUMBER: _ClassVar[int]
    kind: str
    def __init__(self, kind: _Optional[str] = ...) -> None: ...

class CancelAsk(_message.Message):
    __slots__ = ("request_id", "reason")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    reason: str
    def __init__(self, request_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Detached(_message.Message):
    __slots__ = ("request_id", "gateway")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    gateway: str
    def __init__(self, request_id: _Optional[str] = ..., gateway: _Optional[str] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("request_id", "gateway", "attempt", "old_minimum", "differs", "unknown")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    OLD_MINIMUM_FIELD_NUMBER: _ClassVar[int]
    DIFFERS_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    gateway: str
    attempt: int
    old_minimum: int
    differs: Ids
    unknown: bool
    def __init__(self, request_id: _Optional[str] = ..., gateway: _Optional[str] = ..., attempt: _Optional[int] = ..., old_minimum: _Optional[int] = ..., differs: _Optional[_Union[Ids, _Mapping]] = ..., unknown: _Optional[bool] = ...) -> None: ...
