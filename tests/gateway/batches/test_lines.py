"""What is said of an input file, line by line."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.batches import lines
from gateway.batches.lines import LINE_BYTES_MAX, Cutter, Looked

URL = "/v1/completions"


def request(custom_id: Any = "a", **changes: Any) -> bytes:
    one = {"custom_id": custom_id, "method": "POST", "url": URL, "body": {"model": "m", "prompt": "x"}}
    return json.dumps(one | changes).encode()


def looked(*texts: bytes, may_use: frozenset[str] | None = None) -> Looked:
    found, offset = Looked(URL, None if may_use is None else may_use.__contains__), 0
    for text in texts:
        found.take(offset, text)
        offset += len(text) + 1
    found.end()
    return found


@given(st.binary(max_size=200).map(lambda data: data.replace(b"x", b"\n")), st.lists(st.integers(0, 200)))
def test_cut_anywhere_the_lines_are_the_same(data: bytes, marks: list[int]) -> None:
    cutter, found, start = Cutter(), [], 0
    for mark in [*sorted(marks), len(data)]:
        found += list(cutter.cut(data[start:mark]))
        start = max(start, min(mark, len(data)))
    found.append(cutter.rest())
    assert [text for _, text in found] == data.split(b"\n")
    assert all(data[offset : offset + len(text)] == text for offset, text in found)


def test_good_lines() -> None:
    found = looked(request("a"), b"", request("b\u00e9"), b"  ")
    assert found.custom_ids == ["a", "b\u00e9"] and not found.problems and found.model == "m"
    assert found.places[1][0] == len(request("a")) + 2
    assert looked(request("a"), request("b", body={"model": "n"})).model is None


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"\xff\xfe", "invalid_json_line", None),
        (b"[" * 2000, "invalid_json_line", None),
        (b"[1]", "invalid_json_line", None),
        (request(None), "invalid_custom_id", "custom_id"),
        (request(""), "invalid_custom_id", "custom_id"),
        (request("x" * 513), "invalid_custom_id", "custom_id"),
        (request("first"), "duplicate_custom_id", "custom_id"),
        (request(method="GET"), "invalid_method", "method"),
        (request(url="/v1/embeddings"), "mismatched_endpoint", "url"),
        (request(url=[1]), "mismatched_endpoint", "url"),
        (request(body="x"), "invalid_body", "body"),
        (request(body={"model": "m", "stream": True}), "stream_not_supported", "body.stream"),
        (request(body={}), "invalid_model", "body.model"),
        (request(body={"model": "n"}), "model_not_found", "body.model"),
        (request(body={"model": "m", "prompt": "x" * LINE_BYTES_MAX}), "line_too_large", None),
    ],
)
def test_each_problem_names_its_line(line: bytes, code: str, param: str | None) -> None:
    found = looked(request("first"), b"", line, may_use=frozenset({"m"}))
    (problem,) = found.problems
    assert (problem.code, problem.line, problem.param) == (code, 3, param)


def test_too_many_and_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "REQUESTS_MAX", 2)
    (problem,) = looked(*(request(str(i)) for i in range(5))).problems
    assert problem.code == "too_many_requests" and problem.line is None
    assert looked(b"", b" ").problems[0].code == "empty_file"
    assert len(looked(*[b"{"] * 500).problems) == lines.PROBLEMS_MAX
