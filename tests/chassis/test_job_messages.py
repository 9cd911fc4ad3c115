"""Jobs and answers as other clients write and read them."""

import hashlib
import json

import pytest

from chassis.ids import RequestId
from chassis.messages import BadMessage
from chassis.messages.gateway import Accepted, Delta, Finished
from chassis.messages.jobs import (
    CANCELLED,
    Answer,
    BadJob,
    Form,
    Letter,
    Terms,
    answer_headers,
    build_answer,
    build_letter,
    build_line,
    cancelled,
    parse_answer_line,
    parse_job,
    parse_letter,
    parse_terms,
)
from chassis.messages.request import Reason, Terminal, Timings, Usage, build_record
from chassis.wire import gateway_pb2, jobs_pb2

LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "x"}}
PROTOBUF = {"content-type": "Application/X-Protobuf"}


def test_a_line_is_read() -> None:
    job = parse_job(json.dumps(LINE).encode(), {})
    assert (job.form, job.custom_id, job.url, job.model) == (Form.JSON, "a", "/v1/completions", "m")
    assert parse_job(build_line("a", "/v1/completions", {"model": "m", "prompt": "x"}), {}) == job


def test_a_call_is_read() -> None:
    data = gateway_pb2.GenerateRequest(model="m", prompt="x").SerializeToString()
    job = parse_job(data, PROTOBUF)
    assert job.form is Form.PROTOBUF and job.call is not None
    assert (job.model, job.call.prompt) == ("m", "x")


@pytest.mark.parametrize(
    ("data", "headers", "what", "custom_id"),
    [
        (b"", {}, "not JSON", ""),
        (b"\xff", {}, "not JSON", ""),
        (b"[" * 100_000, {}, "not JSON", ""),
        (b"[]", {}, "not a JSON object", ""),
        (json.dumps(LINE | {"custom_id": 7}).encode(), {}, "custom_id", ""),
        (json.dumps(LINE | {"custom_id": "x" * 513}).encode(), {}, "custom_id: .* 512", ""),
        (json.dumps(LINE | {"method": "GET"}).encode(), {}, "method: POST", "a"),
        (json.dumps(LINE | {"url": "/v1/embeddings"}).encode(), {}, "url: /v1/chat", "a"),
        (json.dumps(LINE | {"body": "no"}).encode(), {}, "body: an object", "a"),
        (json.dumps(LINE).encode(), {"Content-Type": "text/plain"}, "Content-Type", ""),
        (b"\xff\xff", PROTOBUF, "not a GenerateRequest", ""),
    ],
)
def test_what_is_no_job(data: bytes, headers: dict[str, str], what: str, custom_id: str) -> None:
    with pytest.raises(BadJob, match=what) as caught:
        parse_job(data, headers)
    assert caught.value.custom_id == custom_id
    assert caught.value.form is (Form.PROTOBUF if headers is PROTOBUF else Form.JSON)


def test_terms() -> None:
    assert parse_terms({}) == Terms()
    assert parse_terms({"shoal-timeout-ms": "1500", "Shoal-Priority": "0"}) == Terms(1500, 0)


@pytest.mark.parametrize(
    "headers",
    [
        {"Shoal-Timeout-Ms": "0"},
        {"Shoal-Timeout-Ms": "604800001"},
        {"Shoal-Timeout-Ms": "1e3"},
        {"Shoal-Timeout-Ms": "9" * 5000},
        {"Shoal-Priority": "10"},
        {"Shoal-Priority": "-1"},
    ],
)
def test_terms_that_cannot_be(headers: dict[str, str]) -> None:
    (name,) = headers
    with pytest.raises(BadMessage, match=name):
        parse_terms(headers)


def test_an_answer_is_a_line_of_openais_output() -> None:
    answer = Answer("batch_req_r", "r", 200, {"object": "text_completion"})
    data = build_answer(answer, Form.JSON, "a")
    assert json.loads(data) == {
        "id": "batch_req_r",
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "r", "body": {"object": "text_completion"}},
        "error": None,
    }
    line = parse_answer_line(data)
    assert line.ok and (line.custom_id, line.request_id) == ("a", "r")
    digest = hashlib.sha256(b"job").hexdigest()
    assert answer_headers(answer, Form.JSON, b"job") == {
        "Content-Type": "application/json",
        "Shoal-Status": "200",
        "Shoal-Request-Id": "r",
        "Shoal-Body-Digest": digest,
    }


def test_errors_have_a_response_and_what_never_ran_has_none() -> None:
    bad = json.loads(build_answer(Answer("i", "r", 400, error="prompt: missing"), Form.JSON, "a"))
    assert bad["error"] is None and bad["response"]["body"]["error"] == {
        "message": "prompt: missing",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }
    stopped = parse_answer_line(cancelled("r", Form.JSON, "a"))
    assert not stopped.ok and stopped.error_code == CANCELLED and stopped.body is None


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"custom_id":"a","response":1,"error":null}'])
def test_what_is_no_answer(data: bytes) -> None:
    with pytest.raises(BadMessage):
        parse_answer_line(data)


def test_a_protobuf_answer_has_the_events() -> None:
    events = (
        Accepted(RequestId("r"), 3, 7),
        Delta("hi", (1, 2), 0),
        Finished(Reason.LENGTH, Usage(3, 0, 2), Timings()),
    )
    m = jobs_pb2.Answer.FromString(build_answer(Answer("i", "r", 200, events=events), Form.PROTOBUF, ""))
    assert m.status_code == 200 and m.request_id == "r"
    assert [e.WhichOneof("event") for e in m.events] == ["accepted", "delta", "finished"]
    assert (m.events[1].delta.text, list(m.events[1].delta.ids)) == ("hi", [1, 2])


def test_a_letter_comes_back() -> None:
    terminal = Terminal(1, "b1", Reason.FAILED, (), error="poison")  # type: ignore[arg-type]
    log = ((5, build_record(terminal)),)
    letter = Letter("shoal.job.t.q.k", b"body", "r", "poison", 9, {"a": "b"}, log)
    assert parse_letter(build_letter(letter)) == letter
    assert [record for _, record in letter.records] == [terminal]
    with pytest.raises(BadMessage):
        parse_letter(b"")
