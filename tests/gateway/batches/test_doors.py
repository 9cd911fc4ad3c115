"""Files and batches through gateways over the in-memory bus; answers are stored by the test."""

import asyncio
import json
from typing import Any, get_args

import pytest

from chassis import subjects
from chassis.batch_layout import BATCHES, DRIVES, FILES
from chassis.batch_subjects import job_name
from chassis.job_subjects import answer, job
from chassis.messages.jobs import URLS, Answer, Form, build_answer
from gateway.batches import files as files_module
from gateway.batches import routes as routes_module
from gateway.batches import source as source_module
from gateway.batches import upload as upload_module
from gateway.batches.asked import BatchRequest
from gateway.batches.replies import BatchListReply, BatchReply, FileListReply, FileReply
from gateway.service import Gateway
from tests.gateway import http_client
from tests.gateway.http_client import HttpAnswer
from tests.gateway.rig import Rig, run

URL = "/v1/completions"
SETTINGS: dict[str, Any] = {"http_address": "127.0.0.1:0", "jobs_at_once_max": 0}


def line(custom_id: str, prompt: str = "x") -> bytes:
    body = {"model": "bytes", "prompt": prompt}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": URL, "body": body}).encode()


def form(data: bytes, purpose: str = "batch", name: str = "a.jsonl") -> bytes:
    return (
        f'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n--x\r\n'
        f'content-disposition: form-data; name="file"; filename="{name}"\r\n\r\n'.encode()
        + data
        + b"\r\n--x--\r\n"
    )


PURPOSE = form(b"").partition(b'--x\r\ncontent-disposition: form-data; name="file"')[0]


async def ask(
    gateway: Gateway, method: str, path: str, body: Any = None, kind: str = "application/json"
) -> HttpAnswer:
    headers = {"content-type": kind} if body is not None else {}
    return await http_client.ask(gateway.http_address, method, f"/v1/{path}", body, headers)


async def send(gateway: Gateway, data: bytes) -> str:
    answer = await ask(gateway, "POST", "files", form(data), "multipart/form-data; boundary=x")
    assert answer.status == 200, answer.body
    return str(answer.json()["id"])


async def begin(gateway: Gateway, data: bytes) -> str:
    asked = {"input_file_id": await send(gateway, data), "endpoint": URL, "completion_window": "24h"}
    answer = await ask(gateway, "POST", "batches", asked)
    assert answer.status == 200, answer.body
    return str(answer.json()["id"])


async def until_status(gateway: Gateway, batch_id: str, *wanted: str) -> dict[str, Any]:
    async with asyncio.timeout(10):
        while True:
            answer = await ask(gateway, "GET", f"batches/{batch_id}")
            BatchReply.model_validate_json(answer.body)
            batch: dict[str, Any] = answer.json()
            if batch["status"] in wanted:
                return batch
            await asyncio.sleep(0.02)


async def read(gateway: Gateway, file_id: str | None) -> dict[str, Any]:
    if file_id is None:
        return {}
    text = (await ask(gateway, "GET", f"files/{file_id}/content")).body
    told = [json.loads(one) for one in text.splitlines()]
    assert len({one["custom_id"] for one in told}) == len(told)
    return {one["custom_id"]: one for one in told}


def said(status: int, custom_id: str) -> bytes:
    body = {"usage": {"prompt_tokens": 1, "completion_tokens": 2}}
    return build_answer(Answer("a", "r", status, body), Form.JSON, custom_id)


def test_answers_of_any_kind_give_a_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines lie across pieces; one answer is garbage, one has another's custom_id, one is a second try's."""
    for module in (files_module, source_module, routes_module):
        monkeypatch.setattr(module, "PIECE_BYTES", 100)

    async def main() -> None:
        rig = Rig()
        async with rig.gateway(**SETTINGS) as gateway:
            names = [f"é{i}" for i in range(6)]
            batch_id = await begin(gateway, b"\n\n".join(line(n, "y" * 70) for n in names) + b"\n")
            await until_status(gateway, batch_id, "in_progress")
            bus = rig.bus("test")
            stream = rig.broker.streams[subjects.JOBS]
            async with asyncio.timeout(5):
                while len(list(stream.messages())) < 6:  # noqa: ASYNC110 - a test watches from outside
                    await asyncio.sleep(0.01)
            for i, name in enumerate(names):
                (held,) = [m for m in stream.messages() if m.subject == job(job_name("", batch_id, i))]
                assert held.data == line(name, "y" * 70)
                data = [
                    said(200, name),
                    b"\xff",
                    said(200, "other"),
                    said(400, name),
                    b"[]",
                    said(200, name),
                ][i]
                if i == 5:
                    await bus.append(answer(job_name("", batch_id, i).next), data)
                await bus.append(answer(job_name("", batch_id, i)), data)
            batch = await until_status(gateway, batch_id, "completed")
            assert batch["request_counts"] == {"total": 6, "completed": 3, "failed": 3}
            assert batch["usage"]["output_tokens"] == 6
            output = await read(gateway, batch["output_file_id"])
            errors = await read(gateway, batch["error_file_id"])
            assert sorted(output) == ["é0", "é2", "é5"] and sorted(errors) == ["é1", "é3", "é4"]
            assert errors["é1"]["error"]["code"] == "invalid_answer" and errors["é1"]["response"] is None
            assert not list(rig.broker.streams[DRIVES].messages())

    run(main())


def test_a_cancel_and_what_is_still_read() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.gateway(**SETTINGS) as gateway:
            batch_id = await begin(gateway, b"\n".join(line(f"n{i}") for i in range(300)))
            batch = await until_status(gateway, batch_id, "in_progress")
            await rig.bus("test").append(answer(job_name("", batch_id, 3)), said(200, "n3"))
            assert (await ask(gateway, "DELETE", f"files/{batch['input_file_id']}")).status == 409
            assert (await ask(gateway, "POST", f"batches/{batch_id}/cancel")).json()["status"] == "cancelling"
            batch = await until_status(gateway, batch_id, "cancelled")
            output = await read(gateway, batch["output_file_id"])
            errors = await read(gateway, batch["error_file_id"])
            assert list(output) == ["n3"] and len(errors) == 299 and not output.keys() & errors.keys()
            assert {one["error"]["code"] for one in errors.values()} == {"batch_cancelled"}
            assert (await ask(gateway, "DELETE", f"files/{batch['input_file_id']}")).json()["deleted"]
            pieces = [m for m in rig.broker.streams[FILES].messages() if m.subject.startswith("shoal.piece")]
            assert len(pieces) == 2, "those of both files"

    run(main())


def test_what_is_told_is_as_described() -> None:
    """Also of what cannot be driven; a page cut in the middle; what is asked for wrongly is named."""
    assert get_args(BatchRequest.model_fields["endpoint"].annotation) == URLS

    async def main() -> None:
        rig = Rig()
        async with rig.gateway(**SETTINGS) as gateway:
            file_id = await send(gateway, b"garbage")
            FileReply.model_validate_json((await ask(gateway, "GET", f"files/{file_id}")).body)
            for _ in range(2):
                batch = await until_status(gateway, await begin(gateway, b"garbage"), "failed")
                assert batch["errors"]["data"][0]["line"] == 1
            page = await ask(gateway, "GET", "batches?limit=1&order=asc")
            told = BatchListReply.model_validate_json(page.body)
            assert told.has_more and len(told.data) == 1
            page = await ask(gateway, "GET", f"batches?after={told.last_id}&order=asc")
            assert [one["id"] for one in page.json()["data"]] == [batch["id"]]
            page = await ask(gateway, "GET", "files?purpose=batch_output")
            assert FileListReply.model_validate_json(page.body).data == []
            for path, param in (
                ("batches?limit=101", "limit"),
                ("batches?limit=", "limit"),
                ("batches?limit=1e1", "limit"),
                ("files?order=up", "order"),
                ("files?after=none", "after"),
            ):
                answer = await ask(gateway, "GET", path)
                assert (answer.status, answer.json()["error"]["param"]) == (400, param)
            good = {"input_file_id": file_id, "endpoint": URL, "completion_window": "24h"}
            for wrong, param in (
                ({"input_file_id": 3}, "input_file_id"),
                ({"endpoint": "/v1/embeddings"}, "endpoint"),
                ({"completion_window": "1h"}, "completion_window"),
                ({"metadata": {"k": 1}}, "metadata.k"),
                ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
                (
                    {"output_expires_after": {"anchor": "created_at", "seconds": 3599}},
                    "output_expires_after.seconds",
                ),
                ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "output_expires_after.anchor"),
            ):
                answer = await ask(gateway, "POST", "batches", good | wrong)
                assert (answer.status, answer.json()["error"]["param"]) == (400, param)
            half = form(b"x").replace(
                b"--x\r\n",
                b"--x\r\ncontent-disposition: form-data; "
                b'name="expires_after[seconds]"\r\n\r\n3600\r\n--x\r\n',
                1,
            )
            answer = await ask(gateway, "POST", "files", half, "multipart/form-data; boundary=x")
            assert (answer.status, answer.json()["error"]["param"]) == (400, "expires_after")
            for path, methods in (
                ("files", {"GET", "HEAD", "POST"}),
                (f"files/{file_id}", {"GET", "HEAD", "DELETE"}),
            ):
                answer = await ask(gateway, "PATCH", path)
                assert answer.status == 405 and set(answer.headers["allow"].split(", ")) == methods

    run(main())


def test_tenants_are_apart() -> None:
    async def main() -> None:
        rig = Rig()
        async with (
            rig.gateway("gw1", tenant="a", **SETTINGS) as a,
            rig.gateway("gw2", tenant="b", **SETTINGS) as b,
        ):
            file_id = await send(a, line("n"))
            batch_id = await begin(a, line("n"))
            for path in (f"files/{file_id}", f"files/{file_id}/content", f"batches/{batch_id}"):
                assert (await ask(a, "GET", path)).status == 200
                assert (await ask(b, "GET", path)).status == 404
            assert (await ask(b, "DELETE", f"files/{file_id}")).status == 404
            assert (await ask(b, "POST", f"batches/{batch_id}/cancel")).status == 404
            asked = {"input_file_id": file_id, "endpoint": URL, "completion_window": "24h"}
            assert (await ask(b, "POST", "batches", asked)).json()["error"]["param"] == "input_file_id"
            for path in ("files", "batches"):
                assert (await ask(a, "GET", path)).json()["data"]
                assert (await ask(b, "GET", path)).json()["data"] == []

    run(main())


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"", "multipart/form-data; boundary=x", 400),
        (b"garbage", "multipart/form-data; boundary=x", 400),
        (form(b"x"), "multipart/form-data", 400),
        (form(b"x"), "multipart/form-data; boundary=y", 400),
        (form(b"x")[:-20], "multipart/form-data; boundary=x", 400),
        (form(b"x"), "application/json", 400),
        (form(b"x"), "multipart/form-data; boundary=x; charset=undefined", 400),
        (form(b"x"), 'multipart/form-data; boundary=x; Charset = "punycode"', 400),
        (form(b"x"), "multipart/form-data; boundary=x; charset=UTF-8", 200),
        (form(b"x", "answers"), "multipart/form-data; boundary=x", 400),
        (form(b"x", name=""), "multipart/form-data; boundary=x", 400),
        (form(b"x", name="n" * 300), "multipart/form-data; boundary=x", 400),
        (form(b"x") + form(b"x"), "multipart/form-data; boundary=x", 200),
        (form(b"x")[:-7] + b"\r\n" + form(b"x"), "multipart/form-data; boundary=x", 400),
        (PURPOSE + form(b"x"), "multipart/form-data; boundary=x", 400),
        (form(b"x").replace(b"content-disposition", b"content\xc3"), "multipart/form-data; boundary=x", 400),
        (form(b"x" * 3000), "multipart/form-data; boundary=x", 413),
        (form(b"x" * 100_000), "multipart/form-data; boundary=x", 413),
    ],
)
def test_uploads_that_cannot_be(
    body: bytes,
    kind: str,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(upload_module, "FILE_BYTES_MAX", 2000)

    async def main() -> None:
        rig = Rig()
        async with rig.gateway(**SETTINGS) as gateway:
            told = await ask(gateway, "POST", "files", body, kind)
            assert told.status == status, told.body
            assert status == 200 or told.json()["error"]["message"]
            assert bool(list(rig.broker.streams[FILES].messages())) == (status == 200)
            assert (await ask(gateway, "GET", "files/..%2f..%00")).status == 404
            assert (await ask(gateway, "GET", "batches/*")).status == 404
            assert (await ask(gateway, "POST", "batches", b"[1]")).status == 400
            assert not list(rig.broker.streams[BATCHES].messages())
            assert not caplog.records, "garbage fills no log"

    run(main())


def test_a_full_stream_of_batches_refuses_new_ones_while_those_that_run_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.gateway(**SETTINGS) as gateway:
            batch_id = await begin(gateway, line("a"))
            await until_status(gateway, batch_id, "in_progress")
            held = rig.broker.streams[BATCHES].num_bytes
            monkeypatch.setattr(routes_module, "NEW_BATCHES_BYTES_MAX", held)
            asked = {
                "input_file_id": await send(gateway, line("b")),
                "endpoint": URL,
                "completion_window": "24h",
            }
            refused = await ask(gateway, "POST", "batches", asked)
            assert refused.status == 429 and "batches: BATCHES holds" in refused.json()["error"]["message"]
            assert len(list(rig.broker.streams[DRIVES].messages())) == 1
            await rig.bus("test").append(answer(job_name("", batch_id, 0)), said(200, "a"))
            await until_status(gateway, batch_id, "completed")

    run(main())
