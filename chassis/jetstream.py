"""Pure. JetStream's API as bytes: what is asked, what the answers mean.

Answers are JSON; a refusal carries a code, but two refusals that matter here share one, so the
description decides. Whatever is not known is `BusUnavailable`: it did not happen, try again.
"""

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import orjson

from chassis.bus import Appended, Headers, Lag, Stored
from chassis.errors import (
    BusError,
    BusUnavailable,
    MessageTooLarge,
    StreamFull,
    SubjectTaken,
    WrongSequence,
)
from chassis.ids import AckToken
from chassis.stream_layout import ConsumerLayout, StreamLayout

API = "$JS.API"
MESSAGE_ID = "Nats-Msg-Id"
EXPECTED_SEQ = "Nats-Expected-Last-Subject-Sequence"
OPERATION = "KV-Operation"
ROLLUP = "Nats-Rollup"
DELETED: Headers = {OPERATION: "DEL"}

ACK = b"+ACK"
PROGRESS = b"+WPI"

_TIME = re.compile(r"([^.]+?)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)")
_NO_MESSAGE = 10037
_WRONG_SEQUENCE = (10071, 10164)
_TOO_LARGE = 10054
_STORE_FAILED = 10077  # full, or the subject is taken: the description tells


@dataclass(frozen=True, slots=True)
class Refused:
    """`code` is JetStream's own (`err_code`)."""

    code: int
    description: str


def encode(request: Mapping[str, Any]) -> bytes:
    return orjson.dumps(request)


def decode(data: bytes) -> dict[str, Any] | Refused:
    """An API answer. Raises BusUnavailable on what is none."""
    try:
        answer = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise BusUnavailable("the broker's answer is not JSON") from None
    if not isinstance(answer, dict):
        raise BusUnavailable("the broker's answer is not an object")
    error = answer.get("error")
    if error is None:
        return answer
    return Refused(error.get("err_code", 0), error.get("description", ""))


def refusal(subject: str, refused: Refused) -> BusError:
    text = f"{subject}: {refused.description} ({refused.code})"
    match refused.code:
        case code if code in _WRONG_SEQUENCE:
            return WrongSequence(text)
        case code if code == _STORE_FAILED and "per subject" in refused.description:
            return SubjectTaken(text)
        case code if code == _STORE_FAILED and "maximum" in refused.description:
            return StreamFull(text)
        case code if code == _TOO_LARGE:
            return MessageTooLarge(text)
        case _:
            return BusUnavailable(text)


# streams and consumers


def stream_config(layout: StreamLayout, replicas: int) -> dict[str, Any]:
    return {
        "name": layout.name,
        "subjects": list(layout.subjects),
        "retention": layout.retention.value,
        "discard": layout.discard.value,
        "discard_new_per_subject": layout.discard_new_per_subject,
        "max_msgs": layout.msgs_max or -1,
        "max_bytes": layout.bytes_max or -1,
        "max_age": _ns(layout.age_max_s),
        "max_msgs_per_subject": layout.msgs_per_subject_max or -1,
        "max_msg_size": -1,
        "max_consumers": -1,
        "duplicate_window": _ns(layout.duplicate_window_s),
        "storage": "file",
        "num_replicas": replicas,
        "allow_direct": False,
        "allow_rollup_hdrs": layout.rollup_headers,
        "deny_delete": False,
        "deny_purge": False,
    }


def consumer_config(layout: ConsumerLayout) -> dict[str, Any]:
    return {
        "durable_name": layout.name,
        "filter_subject": layout.filter,
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "ack_wait": _ns(layout.ack_wait_s),
        "max_deliver": -1,
        "max_ack_pending": layout.ack_pending_max,
        "replay_policy": "instant",
    }


def watch_config(name: str, subject_filter: str, deliver_to: str, heartbeat_s: float) -> dict[str, Any]:
    """Of a short-lived consumer that first sends the newest message of every subject, then each new one."""
    return {
        "name": name,
        "filter_subject": subject_filter,
        "deliver_subject": deliver_to,
        "deliver_policy": "last_per_subject",
        "ack_policy": "none",
        "max_deliver": 1,
        "replay_policy": "instant",
        "idle_heartbeat": _ns(heartbeat_s),
        "inactive_threshold": _ns(30.0),
        "mem_storage": True,
        "num_replicas": 1,
    }


def scan_config(name: str, subject_filter: str, since_ns: int) -> dict[str, Any]:
    """Of a short-lived consumer that is asked for what is there, from a time on."""
    config: dict[str, Any] = {
        "name": name,
        "filter_subject": subject_filter,
        "deliver_policy": "all",
        "ack_policy": "none",
        "replay_policy": "instant",
        "inactive_threshold": _ns(30.0),
        "mem_storage": True,
        "num_replicas": 1,
    }
    if since_ns > 0:
        seconds, ns = divmod(since_ns, 1_000_000_000)
        at = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        config |= {"deliver_policy": "by_start_time", "opt_start_time": f"{at}.{ns:09d}Z"}
    return config


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Fields in which a configuration is not as wanted; a field left out is false, zero or empty."""
    return [
        f"{name} is {found.get(name)!r}, not {value!r}"
        for name, value in wanted.items()
        if (found.get(name) or None) != (value or None)
    ]


# messages


def append_headers(headers: Headers | None, expected_seq: int | None, message_id: str | None) -> Headers:
    all_headers = dict(headers or {})
    if expected_seq is not None:
        all_headers[EXPECTED_SEQ] = str(expected_seq)
    if message_id is not None:
        all_headers[MESSAGE_ID] = message_id
    return all_headers


def parse_append(subject: str, data: bytes) -> Appended:
    """Raises WrongSequence, SubjectTaken, StreamFull, MessageTooLarge, BusUnavailable."""
    answer = decode(data)
    if isinstance(answer, Refused):
        raise refusal(subject, answer)
    seq = answer.get("seq")
    if not isinstance(seq, int):
        raise BusUnavailable(f"{subject}: no stream answered")
    return Appended(seq, bool(answer.get("duplicate")))


def parse_stored(subject: str, data: bytes) -> Stored | None:
    """Of `$JS.API.STREAM.MSG.GET`; None when there is no such message. Raises BusUnavailable."""
    answer = decode(data)
    if isinstance(answer, Refused):
        if answer.code == _NO_MESSAGE:
            return None
        raise refusal(subject, answer)
    try:
        message = answer["message"]
        return Stored(
            subject=message["subject"],
            data=base64.b64decode(message.get("data", "")),
            seq=message["seq"],
            stored_at_ns=parse_time_ns(message["time"]),
            headers=parse_headers(base64.b64decode(message.get("hdrs", ""))),
        )
    except (KeyError, TypeError, ValueError, binascii.Error):
        raise BusUnavailable(f"{subject}: the broker's answer is no message") from None


def parse_lag(answer: Mapping[str, Any]) -> Lag:
    """Of `$JS.API.CONSUMER.INFO`. Raises BusUnavailable."""
    waiting, given = answer.get("num_pending"), answer.get("num_ack_pending")
    if not isinstance(waiting, int) or not isinstance(given, int):
        raise BusUnavailable("the broker's answer is no consumer")
    return Lag(waiting, given)


def parse_bytes(stream: str, answer: Mapping[str, Any]) -> int:
    """Of `$JS.API.STREAM.INFO`. Raises BusUnavailable."""
    state = answer.get("state")
    found = state.get("bytes") if isinstance(state, dict) else None
    if not isinstance(found, int):
        raise BusUnavailable(f"{stream}: the broker's answer has no size")
    return found


def parse_headers(block: bytes) -> Headers:
    """A NATS header block: a version line, then `Name: value` lines."""
    headers: dict[str, str] = {}
    for line in block.split(b"\r\n")[1:]:
        name, colon, value = line.partition(b":")
        if colon:
            headers[name.strip().decode("ascii", "replace")] = value.strip().decode("utf-8", "replace")
    return headers


def parse_time_ns(text: str) -> int:
    """RFC 3339 with up to nine digits of a second. Raises ValueError."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"not a time: {text[:40]!r}")
    whole, digits, zone = match.groups(default="")
    seconds = int(datetime.fromisoformat(whole + ("+00:00" if zone == "Z" else zone)).timestamp())
    return seconds * 1_000_000_000 + int(digits.ljust(9, "0"))


@dataclass(frozen=True, slots=True)
class TokenParts:
    """What the reply subject of a delivery says."""

    stream: str
    consumer: str
    count: int
    seq: int
    serial: int  # of the consumer's deliveries
    stored_at_ns: int
    pending: int  # messages behind it


def parse_token(token: AckToken | str) -> TokenParts | None:
    """`$JS.ACK.[<domain>.<account>.]<stream>.<consumer>.<count>.<seq>.<serial>.<time>.<pending>[.<any>]`."""
    parts = token.split(".")
    if parts[:2] != ["$JS", "ACK"]:
        return None
    first = 2 if len(parts) == 9 else 4
    try:
        count, seq, serial, at_ns, pending = (int(part) for part in parts[first + 2 : first + 7])
    except ValueError:
        return None
    return TokenParts(parts[first], parts[first + 1], count, seq, serial, at_ns, pending)


def nak(delay_s: float) -> bytes:
    return b"-NAK" if delay_s <= 0 else b"-NAK " + orjson.dumps({"delay": _ns(delay_s)})


def _ns(seconds: float) -> int:
    return round(seconds * 1_000_000_000)
