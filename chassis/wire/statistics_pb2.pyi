from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ModelStatistics(_message.Message):
    __slots__ = ("boot", "model", "last_inference_ms", "inference_count", "execution_count", "inference_stats", "batch_stats", "ends", "input_tokens", "cached_tokens", "output_tokens", "stages", "active_ns")
    class EndsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    BOOT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAST_INFERENCE_MS_FIELD_NUMBER: _ClassVar[int]
    INFERENCE_COUNT_FIELD_NUMBER: _ClassVar[int]
    EXECUTION_COUNT_FIELD_NUMBER: _ClassVar[int]
    INFERENCE_STATS_FIELD_NUMBER: _ClassVar[int]
    BATCH_STATS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_NS_FIELD_NUMBER: _ClassVar[int]
    boot: str
    model: str
    last_inference_ms: int
    inference_count: int
    execution_count: int
    inference_stats: InferStatistics
    batch_stats: _containers.RepeatedCompositeFieldContainer[BatchStatistics]
    ends: _containers.ScalarMap[str, int]
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    stages: _containers.RepeatedCompositeFieldContainer[StageStatistics]
    active_ns: int
    def __init__(self, boot: _Optional[str] = ..., model: _Optional[str] = ..., last_inference_ms: _Optional[int] = ..., inference_count: _Optional[int] = ..., execution_count: _Optional[int] = ..., inference_stats: _Optional[_Union[InferStatistics, _Mapping]] = ..., batch_stats: _Optional[_Iterable[_Union[BatchStatistics, _Mapping]]] = ..., ends: _Optional[_Mapping[str, int]] = ..., input_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., stages: _Optional[_Iterable[_Union[StageStatistics, _Mapping]]] = ..., active_ns: _Optional[int] = ...) -> None: ...

class StageStatistics(_message.Message):
    __slots__ = ("busy_ns", "queued_ns", "idle_ns")
    BUSY_NS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_NS_FIELD_NUMBER: _ClassVar[int]
    IDLE_NS_FIELD_NUMBER: _ClassVar[int]
    busy_ns: int
    queued_ns: int
    idle_ns: int
    def __init__(self, busy_ns: _Optional[int] = ..., queued_ns: _Optional[int] = ..., idle_ns: _Optional[int] = ...) -> None: ...

class Duration(_message.Message):
    __slots__ = ("count", "ns")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    NS_FIELD_NUMBER: _ClassVar[int]
    count: int
    ns: int
    def __init__(self, count: _Optional[int] = ..., ns: _Optional[int] = ...) -> None: ...

class InferStatistics(_message.Message):
    __slots__ = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    FAIL_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_INPUT_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_INFER_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    success: Duration
    fail: Duration
    queue: Duration
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration
    def __init__(self, success: _Optional[_Union[Duration, _Mapping]] = ..., fail: _Optional[_Union[Duration, _Mapping]] = ..., queue: _Optional[_Union[Duration, _Mapping]] = ..., compute_input: _Optional[_Union[Duration, _Mapping]] = ..., compute_infer: _Optional[_Union[Duration, _Mapping]] = ..., compute_output: _Optional[_Union[Duration, _Mapping]] = ...) -> None: ...

class BatchStatistics(_message.Message):
    __slots__ = ("batch_size", "compute_input", "compute_infer", "compute_output")
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_INPUT_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_INFER_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    batch_size: int
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration
    def __init__(self, batch_size: _Optional[int] = ..., compute_input: _Optional[_Union[Duration, _Mapping]] = ..., compute_infer: _Optional[_Union[Duration, _Mapping]] = ..., compute_output: _Optional[_Union[Duration, _Mapping]] = ...) -> None: ...
