"""Pure. Jobs and their answers, as JOBS.md tells other NATS clients: JSON as in the lines of OpenAI's batch
files, or protobuf. And the letters of jobs that killed who ran them.
"""

import hashlib
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import orjson

from chassis.bus import Headers
from chassis.messages import BadMessage, check, parse
from chassis.messages.gateway import GenerateCall, GenerateEvent, build_event, parse_generate
from chassis.messages.request import Record, parse_record
from chassis.wire import gateway_pb2
from chassis.wire import jobs_pb2 as pb

CONTENT_TYPE = "Content-Type"
TIMEOUT_MS = "Shoal-Timeout-Ms"  # of a job: from the broker's timestamp on
KEY = "Shoal-Key"  # of a job: the id of the API key whose quotas it counts to
PRIORITY = "Shoal-Priority"  # of a job
TRACEPARENT = "traceparent"
STATUS = "Shoal-Status"  # of an answer: its status code; 0 where there is no response
REQUEST_ID = "Shoal-Request-Id"  # of an answer
BODY_DIGEST = "Shoal-Body-Digest"  # of an answer: the SHA-256 of the body of the job that it answers, in hex

JSON_TYPE = "application/json"
PROTOBUF_TYPE = "application/x-protobuf"
URLS = ("/v1/chat/completions", "/v1/completions")
CUSTOM_ID_BYTES_MAX = 512
TIMEOUT_MS_MAX = 7 * 24 * 3600 * 1000
KEY_LEN_MAX = 32

EXPIRED = "batch_expired"  # codes of answers without a response, OpenAI's words where it has one
CANCELLED = "batch_cancelled"


class Form(Enum):
    JSON = JSON_TYPE
    PROTOBUF = PROTOBUF_TYPE


@dataclass(frozen=True, slots=True)
class Job:
    """Exactly one of `line` and `call` is given; `custom_id` is the JSON form's."""

    form: Form
    custom_id: str = ""
    url: str = ""
    body: dict[str, Any] | None = None
    call: GenerateCall | None = None

    @property
    def model(self) -> str:
        """As far as it can be told; empty: the only one served."""
        if self.call is not None:
            return self.call.model
        name = (self.body or {}).get("model")
        return name if isinstance(name, str) else ""


class BadJob(Exception):
    """What cannot be run, in the form that its answer is to have."""

    def __init__(self, message: str, form: Form, custom_id: str) -> None:
        super().__init__(message)
        self.form = form
        self.custom_id = custom_id


@dataclass(frozen=True, slots=True)
class Terms:
    """What a job's headers say."""

    timeout_ms: int | None = None
    priority: int | None = None
    key: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """`status_code` 0: there is no response, only an error. `body`: of the JSON form, also of errors."""

    id: str
    request_id: str
    status_code: int
    body: dict[str, Any] | None = None
    events: tuple[GenerateEvent, ...] = ()
    error_code: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class AnswerLine:
    """An answer in JSON, read. The message itself is a line of OpenAI's output or error file."""

    custom_id: str
    request_id: str
    status_code: int  # 0: no response
    body: dict[str, Any] | None
    error_code: str = ""
    error: str = ""

    @property
    def ok(self) -> bool:
        return self.status_code == 200


# ---- jobs ------------------------------------------------------------------------------------------


def build_line(custom_id: str, url: str, body: dict[str, Any]) -> bytes:
    return orjson.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def parse_job(data: bytes, headers: Headers) -> Job:
    """Raises BadJob."""
    kind = _header(headers, CONTENT_TYPE).partition(";")[0].strip().lower()
    if kind == PROTOBUF_TYPE:
        try:
            return Job(Form.PROTOBUF, call=parse_generate(data))
        except BadMessage as error:
            raise BadJob(str(error), Form.PROTOBUF, "") from None
    if kind not in ("", JSON_TYPE):
        raise BadJob(f"{CONTENT_TYPE}: {kind[:80]!r}; {JSON_TYPE} or {PROTOBUF_TYPE}", Form.JSON, "")
    return _parse_line(data)


def _parse_line(data: bytes) -> Job:
    try:
        line = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadJob(f"not JSON: {error}", Form.JSON, "") from None
    if not isinstance(line, dict):
        raise BadJob("not a JSON object", Form.JSON, "")
    custom_id = line.get("custom_id", "")
    known = custom_id if isinstance(custom_id, str) and len(custom_id) <= CUSTOM_ID_BYTES_MAX else ""

    def demand(ok: bool, what: str) -> None:
        if not ok:
            raise BadJob(what, Form.JSON, known)

    demand(known == custom_id, f"custom_id: a string of at most {CUSTOM_ID_BYTES_MAX} characters")
    demand(line.get("method", "POST") == "POST", "method: POST")
    url, body = line.get("url"), line.get("body")
    demand(url in URLS, f"url: {' or '.join(URLS)}")
    demand(isinstance(body, dict), "body: an object")
    return Job(Form.JSON, known, str(url), body)


def parse_terms(headers: Headers) -> Terms:
    """Raises BadMessage."""
    timeout_ms = _number(headers, TIMEOUT_MS, 1, TIMEOUT_MS_MAX)
    key = _header(headers, KEY).strip()
    check(not key or (key.isascii() and key.isalnum() and len(key) <= KEY_LEN_MAX), f"{KEY}: no key's id")
    return Terms(timeout_ms, _number(headers, PRIORITY, 0, 9), key)


def _number(headers: Headers, name: str, least: int, most: int) -> int | None:
    text = _header(headers, name).strip()
    if not text:
        return None
    fine = text.isascii() and text.isdigit() and len(text) <= 12 and least <= int(text) <= most
    check(fine, f"{name}: {text[:20]!r}; {least} to {most}")
    return int(text)


def _header(headers: Headers, name: str) -> str:
    """NATS keeps the case that was sent; people write it in several."""
    found = headers.get(name)
    if found is None:
        lower = name.lower()
        found = next((value for key, value in headers.items() if key.lower() == lower), "")
    return found


# ---- answers ---------------------------------------------------------------------------------------


def answer_id(request_id: str) -> str:
    return f"batch_req_{request_id}"


def error_body(status_code: int, message: str, code: str | None = None) -> dict[str, Any]:
    """OpenAI's shape."""
    kind = "invalid_request_error" if 400 <= status_code < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def build_answer(answer: Answer, form: Form, custom_id: str) -> bytes:
    if form is Form.PROTOBUF:
        return pb.Answer(
            id=answer.id,
            request_id=answer.request_id,
            status_code=answer.status_code,
            error=answer.error,
            error_code=answer.error_code,
            events=[gateway_pb2.GenerateEvent.FromString(build_event(e)) for e in answer.events],
        ).SerializeToString()
    response = error = None
    if answer.status_code:
        body = answer.body if answer.body is not None else error_body(answer.status_code, answer.error)
        response = {"status_code": answer.status_code, "request_id": answer.request_id, "body": body}
    else:
        error = {"code": answer.error_code, "message": answer.error}
    return orjson.dumps({"id": answer.id, "custom_id": custom_id, "response": response, "error": error})


def answer_headers(answer: Answer, form: Form, job_body: bytes) -> dict[str, str]:
    return {
        CONTENT_TYPE: form.value,
        STATUS: str(answer.status_code),
        REQUEST_ID: answer.request_id,
        BODY_DIGEST: hashlib.sha256(job_body).hexdigest(),
    }


def cancelled(request_id: str, form: Form, custom_id: str) -> bytes:
    """Stored in place of an answer by whoever cancels: then the job is not run, or for nobody."""
    answer = Answer(
        answer_id(request_id), request_id, 0, error_code=CANCELLED, error="The job was cancelled."
    )
    return build_answer(answer, form, custom_id)


def parse_answer_line(data: bytes) -> AnswerLine:
    """Of the JSON form. Raises BadMessage."""
    try:
        line = orjson.loads(data)
        response, error = line["response"] or {}, line["error"] or {}
        return AnswerLine(
            custom_id=line["custom_id"],
            request_id=response.get("request_id", ""),
            status_code=response.get("status_code", 0),
            body=response.get("body"),
            error_code=error.get("code") or "",
            error=error.get("message") or "",
        )
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise BadMessage(f"not an answer: {error}") from None


# ---- letters ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead job. `log`: its request's records, and when each was stored (Unix time in milliseconds)."""

    subject: str
    body: bytes
    request_id: str
    error: str
    died_at_ms: int
    headers: Headers = field(default_factory=dict)
    log: tuple[tuple[int, bytes], ...] = ()

    @property
    def records(self) -> list[tuple[int, Record]]:
        """Raises BadMessage."""
        return [(at_ms, parse_record(data)) for at_ms, data in self.log]


def build_letter(letter: Letter) -> bytes:
    return pb.Letter(
        subject=letter.subject,
        headers=dict(letter.headers),
        body=letter.body,
        request_id=letter.request_id,
        error=letter.error,
        died_at_ms=letter.died_at_ms,
        log=[pb.LogEntry(at_ms=at_ms, record=data) for at_ms, data in letter.log],
    ).SerializeToString()


def parse_letter(data: bytes) -> Letter:
    """Raises BadMessage."""
    m = parse(pb.Letter, data)
    check(bool(m.subject), "letter: no subject")
    log = tuple((entry.at_ms, entry.record) for entry in m.log)
    return Letter(m.subject, m.body, m.request_id, m.error, m.died_at_ms, dict(m.headers), log)
