from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Receipt(_message.Message):
    __slots__ = ("request_id", "call_id", "choice", "tenant", "key", "model", "priority", "reason", "accepted_ms", "ended_ms", "prompt_tokens", "cached_tokens", "output_tokens", "recomputed_tokens", "queued_us", "waiting_us", "prefill_us", "decode_us", "interrupted_us", "stage_compute_us", "attempts", "worker_deaths", "batcher_deaths", "preemptions")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_MS_FIELD_NUMBER: _ClassVar[int]
    ENDED_MS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_US_FIELD_NUMBER: _ClassVar[int]
    WAITING_US_FIELD_NUMBER: _ClassVar[int]
    PREFILL_US_FIELD_NUMBER: _ClassVar[int]
    DECODE_US_FIELD_NUMBER: _ClassVar[int]
    INTERRUPTED_US_FIELD_NUMBER: _ClassVar[int]
    STAGE_COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    WORKER_DEATHS_FIELD_NUMBER: _ClassVar[int]
    BATCHER_DEATHS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    call_id: str
    choice: int
    tenant: str
    key: str
    model: str
    priority: int
    reason: str
    accepted_ms: int
    ended_ms: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    recomputed_tokens: int
    queued_us: int
    waiting_us: int
    prefill_us: int
    decode_us: int
    interrupted_us: int
    stage_compute_us: _containers.RepeatedScalarFieldContainer[int]
    attempts: int
    worker_deaths: int
    batcher_deaths: int
    preemptions: int
    def __init__(self, request_id: _Optional[str] = ..., call_id: _Optional[str] = ..., choice: _Optional[int] = ..., tenant: _Optional[str] = ..., key: _Optional[str] = ..., model: _Optional[str] = ..., priority: _Optional[int] = ..., reason: _Optional[str] = ..., accepted_ms: _Optional[int] = ..., ended_ms: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., queued_us: _Optional[int] = ..., waiting_us: _Optional[int] = ..., prefill_us: _Optional[int] = ..., decode_us: _Optional[int] = ..., interrupted_us: _Optional[int] = ..., stage_compute_us: _Optional[_Iterable[int]] = ..., attempts: _Optional[int] = ..., worker_deaths: _Optional[int] = ..., batcher_deaths: _Optional[int] = ..., preemptions: _Optional[int] = ...) -> None: ...
