"""How deep a JSON text nests is told before it is parsed, and only brackets count that are no text."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http_body import (
    JSON_COMMAS_MAX,
    JSON_DEPTH_MAX,
    JSON_MARKS_MAX,
    NotJson,
    check_depth,
    parse_json,
    parse_object,
)

texts = st.text(st.sampled_from('a\\"[]{},:\n\u00fc'), max_size=12)
values = st.recursive(
    st.none() | texts, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3)
)


def depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max((depth(inner) for inner in value.values()), default=0)
    if isinstance(value, list):
        return 1 + max((depth(inner) for inner in value), default=0)
    return 0


@given(values, st.integers(0, JSON_DEPTH_MAX), st.booleans())
def test_the_limit_is_where_it_is(value: Any, more: int, ascii_only: bool) -> None:
    for _ in range(more):
        value = [value, "]" * JSON_DEPTH_MAX]
    data = json.dumps(value, ensure_ascii=ascii_only).encode()
    if depth(value) <= JSON_DEPTH_MAX:
        assert parse_json(data) == value
    else:
        with pytest.raises(NotJson, match="nests deeper than 64 levels"):
            parse_json(data)


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"[" * 65 + b"]" * 65,
        b'["\\\\",' * 65 + b"1" + b"]" * 65,
        b"[]" * JSON_MARKS_MAX,
        b"[" + b"1," * (JSON_COMMAS_MAX + 1) + b"1]",
        b'{"a":1}]',
        b"\xff",
        b"",
        b"NaN",
    ],
    ids=len,
)
def test_what_is_refused_never_raises_anything_else(data: bytes) -> None:
    with pytest.raises(NotJson, match="^body: "):
        parse_json(data)


def test_text_does_not_nest() -> None:
    check_depth(json.dumps({"a": '[{"' * 1000, "b": ["\\", '\\"[' * 500]}).encode())


def test_a_body_is_an_object() -> None:
    assert parse_object(b'{"a": [1]}') == {"a": [1]}
    for data in (b"[1]", b"1", b'"a"', b"null"):
        with pytest.raises(NotJson, match="not a JSON object"):
            parse_object(data)
