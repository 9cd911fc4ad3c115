"""Pure. Which text of a message is not UTF-8: protobuf says only that one is.

The same message with bytes where it has text takes anything; its fields are then looked at one by one. Text
in maps is left as it is, because bytes are no key: what is wrong there is not told apart.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass


def bad_text(kind: type[Message], data: bytes) -> tuple[str, int] | None:
    """(path of the field, offset of the first bad byte in it); None when something else is wrong."""
    descriptor = cast(Descriptor, kind.DESCRIPTOR)
    try:
        message = _with_bytes(descriptor).FromString(data)
    except DecodeError:
        return None
    return next(_bad_texts(message, descriptor, ""), None)


def _bad_texts(message: Message, kind: Descriptor, path: str) -> Iterator[tuple[str, int]]:
    for field, value in message.ListFields():
        original = kind.fields_by_name[field.name]
        values = value if original.is_repeated else [value]
        for i, one in enumerate(values):
            name = f"{path}{field.name}[{i}]" if original.is_repeated else f"{path}{field.name}"
            if original.type == FieldDescriptor.TYPE_STRING:
                try:
                    one.decode()
                except UnicodeDecodeError as error:
                    yield name, error.start
            elif original.message_type is not None and not original.message_type.GetOptions().map_entry:
                yield from _bad_texts(one, original.message_type, f"{name}.")


@cache
def _with_bytes(descriptor: Descriptor) -> type[Message]:
    pool = DescriptorPool()
    _add(pool, descriptor.file)
    return GetMessageClass(pool.FindMessageTypeByName(descriptor.full_name))


def _add(pool: DescriptorPool, file: FileDescriptor) -> None:
    for needed in file.dependencies:
        _add(pool, needed)
    described = FileDescriptorProto()
    file.CopyToProto(described)
    _replace(described.message_type)
    pool.Add(described)


def _replace(messages: Iterable[DescriptorProto]) -> None:
    for message in messages:
        if message.options.map_entry:
            continue
        for field in message.field:
            if field.type == FieldDescriptorProto.TYPE_STRING:
                field.type = FieldDescriptorProto.TYPE_BYTES
        _replace(message.nested_type)
