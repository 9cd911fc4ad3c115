from chassis.wire import gateway_pb2 as _gateway_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Answer(_message.Message):
    __slots__ = ("id", "request_id", "status_code", "error", "error_code", "events")
    ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    request_id: str
    status_code: int
    error: str
    error_code: str
    events: _containers.RepeatedCompositeFieldContainer[_gateway_pb2.GenerateEvent]
    def __init__(self, id: _Optional[str] = ..., request_id: _Optional[str] = ..., status_code: _Optional[int] = ..., error: _Optional[str] = ..., error_code: _Optional[str] = ..., events: _Optional[_Iterable[_Union[_gateway_pb2.GenerateEvent, _Mapping]]] = ...) -> None: ...

class Letter(_message.Message):
    __slots__ = ("subject", "headers", "body", "request_id", "error", "died_at_ms", "log")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DIED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    subject: str
    headers: _containers.ScalarMap[str, str]
    body: bytes
    request_id: str
    error: str
    died_at_ms: int
    log: _containers.RepeatedCompositeFieldContainer[LogEntry]
    def __init__(self, subject: _Optional[str] = ..., headers: _Optional[_Mapping[str, str]] = ..., body: _Optional[bytes] = ..., request_id: _Optional[str] = ..., error: _Optional[str] = ..., died_at_ms: _Optional[int] = ..., log: _Optional[_Iterable[_Union[LogEntry, _Mapping]]] = ...) -> None: ...

class LogEntry(_message.Message):
    __slots__ = ("at_ms", "record")
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    at_ms: int
    record: bytes
    def __init__(self, at_ms: _Optional[int] = ..., record: _Optional[bytes] = ...) -> None: ...
