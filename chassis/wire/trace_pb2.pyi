from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Segment(_message.Message):
    __slots__ = ("service", "boot", "spans")
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    service: str
    boot: str
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    def __init__(self, service: _Optional[str] = ..., boot: _Optional[str] = ..., spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("key", "name", "context", "parent", "start_ns", "duration_ns", "attributes", "links", "error")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    START_NS_FIELD_NUMBER: _ClassVar[int]
    DURATION_NS_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    key: str
    name: str
    context: bytes
    parent: bytes
    start_ns: int
    duration_ns: int
    attributes: bytes
    links: _containers.RepeatedScalarFieldContainer[bytes]
    error: str
    def __init__(self, key: _Optional[str] = ..., name: _Optional[str] = ..., context: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., start_ns: _Optional[int] = ..., duration_ns: _Optional[int] = ..., attributes: _Optional[bytes] = ..., links: _Optional[_Iterable[bytes]] = ..., error: _Optional[str] = ...) -> None: ...

class Keep(_message.Message):
    __slots__ = ("requests", "steps")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedScalarFieldContainer[str]
    steps: str
    def __init__(self, requests: _Optional[_Iterable[str]] = ..., steps: _Optional[str] = ...) -> None: ...
