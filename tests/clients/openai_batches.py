"""Files and batches with the openai package: `python openai_batches.py BASE_URL`. Ends with 0 if so."""

import io
import json
import sys
import time

from openai import BadRequestError, NotFoundError, OpenAI

URL = "/v1/completions"


def lines(count: int, **body: object) -> bytes:
    asked = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0, **body}
    return b"".join(
        json.dumps({"custom_id": f"n{i}", "method": "POST", "url": URL, "body": asked}).encode() + b"\n"
        for i in range(count)
    )


def upload(client: OpenAI, data: bytes, **more: object) -> str:
    file = client.files.create(file=("input.jsonl", io.BytesIO(data)), purpose="batch", **more)
    assert file.bytes == len(data) and file.filename == "input.jsonl" and file.purpose == "batch"
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == data
    return file.id


def ended(client: OpenAI, batch_id: str):
    while True:
        batch = client.batches.retrieve(batch_id)
        if batch.status in ("completed", "failed", "expired", "cancelled"):
            return batch
        time.sleep(0.1)


def read(client: OpenAI, file_id: str | None) -> list[dict]:
    if file_id is None:
        return []
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def completes(client: OpenAI) -> None:
    bad = json.dumps({"custom_id": "bad", "method": "POST", "url": URL, "body": {"model": "fake", "n": -1}})
    file_id = upload(
        client, lines(40) + bad.encode(), expires_after={"anchor": "created_at", "seconds": 3600}
    )
    made = client.batches.create(
        input_file_id=file_id,
        endpoint=URL,
        completion_window="24h",
        metadata={"who": "test"},
        output_expires_after={"anchor": "created_at", "seconds": 7200},
    )
    assert made.status == "validating" and made.expires_at == made.created_at + 86400
    batch = ended(client, made.id)
    assert batch.status == "completed" and batch.metadata == {"who": "test"} and batch.errors is None
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (41, 40, 1)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    assert batch.usage.output_tokens == 160 and batch.usage.input_tokens == 120
    output, errors = read(client, batch.output_file_id), read(client, batch.error_file_id)
    assert sorted(line["custom_id"] for line in output) == sorted(f"n{i}" for i in range(40))
    assert len({line["response"]["body"]["choices"][0]["text"] for line in output}) == 1
    assert all(line["response"]["status_code"] == 200 and line["error"] is None for line in output)
    (error,) = errors
    assert error["custom_id"] == "bad" and error["response"]["status_code"] == 400
    assert error["response"]["body"]["error"]["param"] == "n"
    file = client.files.retrieve(batch.output_file_id)
    assert file.purpose == "batch_output" and file.expires_at == file.created_at + 7200
    assert client.files.delete(file_id).deleted
    try:
        client.files.content(file_id)
    except NotFoundError:
        pass
    else:
        raise AssertionError("a deleted file")


def fails(client: OpenAI) -> None:
    data = lines(2) + b"{\n" + lines(1)
    made = client.batches.create(input_file_id=upload(client, data), endpoint=URL, completion_window="24h")
    batch = ended(client, made.id)
    assert batch.status == "failed" and batch.output_file_id is None
    found = [(e.line, e.code) for e in batch.errors.data]
    assert found == [(3, "invalid_json_line"), (4, "duplicate_custom_id")], found


def is_cancelled(client: OpenAI) -> None:
    data = lines(200, max_tokens=200, ignore_eos=True)
    made = client.batches.create(input_file_id=upload(client, data), endpoint=URL, completion_window="24h")
    while client.batches.retrieve(made.id).status != "in_progress":
        time.sleep(0.05)
    cancelling = client.batches.cancel(made.id)
    assert cancelling.status == "cancelling" and cancelling.cancelling_at
    batch = ended(client, made.id)
    assert batch.status == "cancelled" and batch.request_counts.total == 200
    told = read(client, batch.output_file_id) + read(client, batch.error_file_id)
    assert sorted(line["custom_id"] for line in told) == sorted(f"n{i}" for i in range(200))
    cancelled = [line for line in told if line["error"]]
    assert cancelled and {line["error"]["code"] for line in cancelled} == {"batch_cancelled"}
    try:
        client.batches.cancel(made.id)
    except BadRequestError:
        pass
    else:
        raise AssertionError("cancelled twice")


def pages(client: OpenAI) -> None:
    every = [batch.id for batch in client.batches.list(limit=2)]  # turns pages by itself
    assert len(every) == len(set(every)) >= 3
    page = client.batches.list(limit=2)
    assert [batch.id for batch in page.data] == every[:2] and page.has_more
    files = [file.id for file in client.files.list(limit=2, purpose="batch")]
    assert len(files) == len(set(files)) >= 2


def refusals(client: OpenAI) -> None:
    for wrong in (
        {"input_file_id": "file-none", "endpoint": URL, "completion_window": "24h"},
        {"input_file_id": "file none", "endpoint": URL, "completion_window": "24h"},
        {"input_file_id": "x", "endpoint": "/v1/none", "completion_window": "24h"},
        {"input_file_id": "x", "endpoint": URL, "completion_window": "1h"},
        {"input_file_id": "x", "endpoint": URL, "completion_window": "24h", "metadata": {"a": "x" * 600}},
    ):
        try:
            client.batches.create(**wrong)
        except BadRequestError as error:
            assert error.param in wrong or error.param.startswith("metadata"), error.param
        else:
            raise AssertionError(wrong)
    for act in (
        lambda: client.files.create(file=("x.jsonl", b"x"), purpose="fine-tune"),
        lambda: client.files.create(file=("x.jsonl", b""), purpose="batch"),
        lambda: client.files.create(
            file=("x.jsonl", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 1}
        ),
        lambda: client.batches.list(limit=1000),
        lambda: client.batches.list(after="batch_none"),
    ):
        try:
            act()
        except BadRequestError:
            pass
        else:
            raise AssertionError("not refused")
    for gone in (client.files.retrieve, client.files.delete, client.batches.retrieve, client.batches.cancel):
        try:
            gone("file-none")
        except NotFoundError:
            pass
        else:
            raise AssertionError("not there")


if __name__ == "__main__":
    one = OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=30)
    completes(one)
    fails(one)
    is_cancelled(one)
    pages(one)
    refusals(one)
