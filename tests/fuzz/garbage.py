"""Messages that nobody of ours would send: any field of a protobuf message or none, and extreme values."""

from typing import Any, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

DEPTH_MAX = 4
REPEATS_MAX = 4
F = FieldDescriptor

U32 = st.sampled_from([0, 1, 2, 7, 16, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]) | st.integers(
    0, 300
)
U64 = U32 | st.sampled_from([1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
I32 = st.sampled_from([-(1 << 31), -1, 0, 1, (1 << 31) - 1])
I64 = I32 | st.sampled_from([-(1 << 63), (1 << 63) - 1])
REALS = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-30, 3e38, float("inf"), float("-inf"), float("nan")])
TEXTS = st.sampled_from(
    ["", "a", "a.b", "*", ">", "a b", "\x00", "..", "\u00e9", "x" * 300, "{}", "-1"]
) | st.text(max_size=8)
DATA = st.sampled_from(
    [b"", b"\0", b"\xff" * 3, b"\0" * 4, b"\0" * 8, b"\0" * 32, b"\1\0\0\0" * 5]
) | st.binary(max_size=40)

PLAIN: dict[int, st.SearchStrategy[Any]] = {
    F.CPPTYPE_UINT32: U32,
    F.CPPTYPE_UINT64: U64,
    F.CPPTYPE_INT32: I32,
    F.CPPTYPE_INT64: I64,
    F.CPPTYPE_BOOL: st.booleans(),
    F.CPPTYPE_FLOAT: REALS,
    F.CPPTYPE_DOUBLE: REALS,
    F.CPPTYPE_ENUM: st.integers(0, 12),
}


@st.composite
def messages(draw: st.DrawFn, kind: type[Message]) -> Message:
    message = kind()
    _fill(draw, message, cast(Descriptor, kind.DESCRIPTOR), DEPTH_MAX)
    return message


def _fill(draw: st.DrawFn, message: Any, descriptor: Descriptor, depth: int) -> None:
    for field in descriptor.fields:
        if not draw(st.booleans()):
            continue
        inner = field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            _fill_map(draw, getattr(message, field.name), inner, depth)
        elif field.is_repeated:
            for _ in range(draw(st.integers(1, REPEATS_MAX))):
                if inner is None:
                    getattr(message, field.name).append(_value(draw, field))
                elif depth:
                    _fill(draw, getattr(message, field.name).add(), inner, depth - 1)
        elif inner is None:
            setattr(message, field.name, _value(draw, field))
        elif depth:
            part = getattr(message, field.name)
            part.SetInParent()
            _fill(draw, part, inner, depth - 1)


def _fill_map(draw: st.DrawFn, into: Any, entry: Descriptor, depth: int) -> None:
    key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
    name = _value(draw, key)
    if value.message_type is None:
        into[name] = _value(draw, value)
    elif depth:
        _fill(draw, into[name], value.message_type, depth - 1)


def _value(draw: st.DrawFn, field: FieldDescriptor) -> Any:
    if field.cpp_type == F.CPPTYPE_STRING:
        return draw(TEXTS if field.type == F.TYPE_STRING else DATA)
    return draw(PLAIN[field.cpp_type])


@st.composite
def spoiled(draw: st.DrawFn, kind: type[Message]) -> bytes:
    """Bytes of a message, some of them others, cut, doubled, or followed by more."""
    data = bytearray(draw(messages(kind)).SerializePartialToString())
    for _ in range(draw(st.integers(0, 3))):
        if data:
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    cut = draw(st.integers(0, len(data)))
    match draw(st.sampled_from(["whole", "cut", "doubled", "more"])):
        case "cut":
            del data[cut:]
        case "doubled":
            data[cut:cut] = data[:cut]
        case "more":
            data += draw(st.binary(max_size=9))
    return bytes(data)
