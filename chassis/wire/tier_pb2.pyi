from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TierMessage(_message.Message):
    __slots__ = ("stage", "save", "load", "content", "done")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    stage: TierStage
    save: SaveBlocks
    load: LoadBlocks
    content: TierContent
    done: TierDone
    def __init__(self, stage: _Optional[_Union[TierStage, _Mapping]] = ..., save: _Optional[_Union[SaveBlocks, _Mapping]] = ..., load: _Optional[_Union[LoadBlocks, _Mapping]] = ..., content: _Optional[_Union[TierContent, _Mapping]] = ..., done: _Optional[_Union[TierDone, _Mapping]] = ...) -> None: ...

class TierStage(_message.Message):
    __slots__ = ("epoch", "first_layer", "end_layer", "layout", "page_bytes")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    END_LAYER_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    first_layer: int
    end_layer: int
    layout: str
    page_bytes: int
    def __init__(self, epoch: _Optional[int] = ..., first_layer: _Optional[int] = ..., end_layer: _Optional[int] = ..., layout: _Optional[str] = ..., page_bytes: _Optional[int] = ...) -> None: ...

class SaveBlocks(_message.Message):
    __slots__ = ("epoch", "attachment", "call", "blocks", "contents")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CONTENTS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    attachment: int
    call: int
    blocks: bytes
    contents: bytes
    def __init__(self, epoch: _Optional[int] = ..., attachment: _Optional[int] = ..., call: _Optional[int] = ..., blocks: _Optional[bytes] = ..., contents: _Optional[bytes] = ...) -> None: ...

class LoadBlocks(_message.Message):
    __slots__ = ("epoch", "attachment", "call", "blocks", "contents")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CONTENTS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    attachment: int
    call: int
    blocks: bytes
    contents: bytes
    def __init__(self, epoch: _Optional[int] = ..., attachment: _Optional[int] = ..., call: _Optional[int] = ..., blocks: _Optional[bytes] = ..., contents: _Optional[bytes] = ...) -> None: ...

class TierContent(_message.Message):
    __slots__ = ("call", "index", "first_layer", "checksums", "stamp")
    CALL_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    STAMP_FIELD_NUMBER: _ClassVar[int]
    call: int
    index: int
    first_layer: int
    checksums: bytes
    stamp: bytes
    def __init__(self, call: _Optional[int] = ..., index: _Optional[int] = ..., first_layer: _Optional[int] = ..., checksums: _Optional[bytes] = ..., stamp: _Optional[bytes] = ...) -> None: ...

class TierDone(_message.Message):
    __slots__ = ("call", "error", "refused")
    CALL_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    call: int
    error: str
    refused: bytes
    def __init__(self, call: _Optional[int] = ..., error: _Optional[str] = ..., refused: _Optional[bytes] = ...) -> None: ...
