from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class QuotaMeter(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    QUOTA_METER_UNSPECIFIED: _ClassVar[QuotaMeter]
    QUOTA_METER_REQUESTS_PER_MINUTE: _ClassVar[QuotaMeter]
    QUOTA_METER_TOKENS_PER_MINUTE: _ClassVar[QuotaMeter]
    QUOTA_METER_TOKENS_PER_DAY: _ClassVar[QuotaMeter]
QUOTA_METER_UNSPECIFIED: QuotaMeter
QUOTA_METER_REQUESTS_PER_MINUTE: QuotaMeter
QUOTA_METER_TOKENS_PER_MINUTE: QuotaMeter
QUOTA_METER_TOKENS_PER_DAY: QuotaMeter

class QuotaLedger(_message.Message):
    __slots__ = ("windows", "shares")
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    windows: _containers.RepeatedCompositeFieldContainer[QuotaWindow]
    shares: _containers.RepeatedCompositeFieldContainer[QuotaShare]
    def __init__(self, windows: _Optional[_Iterable[_Union[QuotaWindow, _Mapping]]] = ..., shares: _Optional[_Iterable[_Union[QuotaShare, _Mapping]]] = ...) -> None: ...

class QuotaWindow(_message.Message):
    __slots__ = ("meter", "number", "granted")
    METER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    meter: QuotaMeter
    number: int
    granted: int
    def __init__(self, meter: _Optional[_Union[QuotaMeter, str]] = ..., number: _Optional[int] = ..., granted: _Optional[int] = ...) -> None: ...

class QuotaShare(_message.Message):
    __slots__ = ("boot", "slots", "until_ms")
    BOOT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    UNTIL_MS_FIELD_NUMBER: _ClassVar[int]
    boot: str
    slots: int
    until_ms: int
    def __init__(self, boot: _Optional[str] = ..., slots: _Optional[int] = ..., until_ms: _Optional[int] = ...) -> None: ...
