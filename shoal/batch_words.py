"""The words of `shoal batch submit|status|results|cancel`: OpenAI's Batch API of a gateway, over HTTP.

Who waits is told on stderr how far it is and when it may be done; a gateway that dies is waited for.
"""

import argparse
import json
import os
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shoal.client.errors import InvalidArgument, ShoalError, Unavailable
from shoal.http_api import HttpApi
from shoal.launcher import read_state, secure_of
from shoal.secure_folder import context_of

OVER = ("completed", "failed", "expired", "cancelled")
POLL_S = 0.5
BAR_LEN = 30
PATIENCE_S = 60.0  # with a gateway that does not answer
FILE_BYTES_MAX = 200 * 1000 * 1000
Say = Callable[[str], None]


def add_words(words: Any) -> list[argparse.ArgumentParser]:
    """The parsers made; each has `act`."""
    submit = words.add_parser(
        "submit", help="send a file of requests, one JSON line each; print the batch's id"
    )
    submit.add_argument("file", type=Path, metavar="FILE.jsonl")
    submit.add_argument("--wait", action="store_true", help="show how far it is until it is over")
    submit.set_defaults(act=_submit)
    status = words.add_parser("status", help="how far a batch is, or the newest ones")
    status.add_argument("id", nargs="?")
    status.set_defaults(act=_status)
    results = words.add_parser("results", help="the lines of a batch that is over: answers, then errors")
    results.add_argument("id")
    results.add_argument("-o", "--output", type=Path, metavar="FILE", help="instead of stdout")
    results.set_defaults(act=_results)
    cancel = words.add_parser("cancel", help="stop what has not run; what has keeps its answers")
    cancel.add_argument("id")
    cancel.set_defaults(act=_cancel)
    made = [submit, status, results, cancel]
    for word in made:
        word.add_argument("--url", help="http(s)://host:port of a gateway (default: what `shoal up` runs)")
        word.add_argument("--ca", metavar="FILE", help="root certificates of https (or SHOAL_CA)")
        word.add_argument("--certificate", metavar="FILE", help="who you are, where gateways ask")
        word.add_argument("--private-key", metavar="FILE", help="of the certificate")
    return made


def run(arguments: argparse.Namespace, say: Say, tell: Say) -> int:
    """The exit code. `say`: a line of what was asked for; `tell`: of what is beside it. Raises ShoalError,
    LaunchError, OSError."""
    code: int = arguments.act(_api(arguments), arguments, say, tell)
    return code


def _api(arguments: argparse.Namespace) -> HttpApi:
    url, ca = arguments.url, arguments.ca or os.environ.get("SHOAL_CA")
    secure = None
    if not url:
        addresses, secure = read_state(arguments.run_dir)["http_addresses"], secure_of(arguments.run_dir)
        assert isinstance(addresses, list)
        url = f"{'https' if secure else 'http'}://{addresses[0]}"
    if not (ca or arguments.certificate):
        tls = context_of(secure)
    else:
        tls = ssl.create_default_context(cafile=ca or (secure / "ca.pem" if secure else None))
        if arguments.certificate:
            tls.load_cert_chain(arguments.certificate, arguments.private_key)
    return HttpApi(url, os.environ.get("SHOAL_API_KEY", ""), tls)


def _submit(api: HttpApi, arguments: argparse.Namespace, say: Say, tell: Say) -> int:
    file = arguments.file
    size = file.stat().st_size
    if size > FILE_BYTES_MAX:
        raise InvalidArgument("INVALID_ARGUMENT", f"{file}: {size} bytes; at most {FILE_BYTES_MAX}")
    endpoint = _endpoint(file)
    asked = {"endpoint": endpoint, "completion_window": "24h", "input_file_id": api.upload(file)["id"]}
    batch = api.post("/v1/batches", asked)
    say(batch["id"])
    served = {model["id"] for model in api.get("/v1/models")["data"]}
    for model in sorted(_models(file) - served):
        tell(
            f"model {model!r} is not served now: its requests wait for it, and fail when they waited too long"
        )
    return _wait(api, batch["id"], tell) if arguments.wait else 0


def _endpoint(file: Path) -> str:
    """Of its first request; whether the others are alike is the gateway's to say. Raises InvalidArgument."""
    with file.open("rb") as source:
        first = next((line for line in source if line.strip()), b"")
    if not first:
        raise InvalidArgument("INVALID_ARGUMENT", f"{file}: has no line; each is a request")
    try:
        return str(json.loads(first)["url"])
    except (ValueError, KeyError, TypeError):
        raise InvalidArgument(
            "INVALID_ARGUMENT", f"{file}: its first line is no request with a url"
        ) from None


def _models(file: Path) -> set[str]:
    """That its requests name, as far as they can be read."""
    found = set()
    with file.open("rb") as source:
        for line in source:
            try:
                model = json.loads(line)["body"]["model"]
            except (ValueError, LookupError, TypeError):
                continue
            if isinstance(model, str) and model:
                found.add(model[:200])
    return found


def _wait(api: HttpApi, batch_id: str, tell: Say) -> int:
    began = time.monotonic()
    for batch in _states(api, batch_id):
        tell(progress(batch, time.monotonic() - began))
        if batch["status"] in OVER:
            for line in _problems(batch):
                tell(line)
            return 0 if batch["status"] == "completed" else 1
    raise AssertionError("states go on until it is over")


def _states(api: HttpApi, batch_id: str) -> Iterator[dict[str, Any]]:
    silent_at = None
    while True:
        try:
            yield api.get(f"/v1/batches/{batch_id}")
            silent_at = None
        except Unavailable:
            silent_at = silent_at or time.monotonic()
            if time.monotonic() > silent_at + PATIENCE_S:
                raise
        time.sleep(POLL_S)


def progress(batch: dict[str, Any], waited_s: float) -> str:
    """One line: a bar, counts, and how long it may still take by what was done while it was watched."""
    counts = batch["request_counts"]
    done, total = counts["completed"] + counts["failed"], counts["total"]
    filled = BAR_LEN * done // total if total else 0
    text = f"[{'#' * filled}{'.' * (BAR_LEN - filled)}] {done}/{total} {batch['status']}"
    if counts["failed"]:
        text += f", {counts['failed']} failed"
    if batch["status"] == "in_progress" and 0 < done < total:
        text += f", about {_span(waited_s / done * (total - done))} left"
    return text


def _span(seconds: float) -> str:
    whole = round(seconds)
    minutes, hours = whole // 60, whole // 3600
    return (
        f"{hours} h {minutes % 60} min"
        if hours
        else f"{minutes} min {whole % 60} s"
        if minutes
        else f"{whole} s"
    )


def _problems(batch: dict[str, Any]) -> list[str]:
    found = (batch.get("errors") or {}).get("data", [])
    return [
        ": ".join(
            str(part) for part in (f"line {p['line']}" if p["line"] else "", p["param"], p["message"]) if part
        )
        for p in found
    ]


def _status(api: HttpApi, arguments: argparse.Namespace, say: Say, tell: Say) -> int:
    if arguments.id:
        batches = [api.get(f"/v1/batches/{arguments.id}")]
    else:
        batches = api.get("/v1/batches?limit=20")["data"]
    for batch in batches:
        counts = batch["request_counts"]
        done = f"{counts['completed']} completed, {counts['failed']} failed of {counts['total']}"
        say(f"{batch['id']}  {batch['status']}  {done}")
        for line in _problems(batch) if arguments.id else []:
            say(f"    {line}")
    if not batches:
        tell("no batch")
    return 0


def _results(api: HttpApi, arguments: argparse.Namespace, say: Say, tell: Say) -> int:
    batch = api.get(f"/v1/batches/{arguments.id}")
    if batch["status"] not in OVER:
        raise ShoalError("FAILED_PRECONDITION", f"{arguments.id} is {batch['status']}")
    files = [batch[name] for name in ("output_file_id", "error_file_id") if batch[name]]
    if arguments.output is None:
        for file_id in files:
            for piece in api.content(file_id):
                sys.stdout.buffer.write(piece)
        sys.stdout.flush()
        return 0
    beside = arguments.output.with_name(arguments.output.name + ".part")
    try:
        with beside.open("wb") as target:
            for file_id in files:
                for piece in api.content(file_id):
                    target.write(piece)
        beside.replace(arguments.output)
    finally:
        beside.unlink(missing_ok=True)
    tell(f"{batch['request_counts']['total']} lines in {arguments.output}")
    return 0


def _cancel(api: HttpApi, arguments: argparse.Namespace, say: Say, tell: Say) -> int:
    say(api.post(f"/v1/batches/{arguments.id}/cancel")["status"])
    return 0
