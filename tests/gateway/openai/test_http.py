"""OpenAI's endpoints over HTTP before a real gateway with a model of bytes: what clients read."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from chassis.messages.ownership import CancelAsk, Detached
from chassis.messages.request import Reason
from chassis.messages.sampling import TokenLogprobs
from gateway.access.caller import Caller
from gateway.openai.answer import answer
from gateway.openai.replies import ChatChunk, ChatReply, ErrorReply, ModelListReply, TextChunk, TextReply
from gateway.service import Gateway
from tests.gateway.http_client import HttpAnswer, ask, stream
from tests.gateway.openai.bot import answer_all
from tests.gateway.rig import Job, Rig, ScriptedBatcher, run, until

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


@asynccontextmanager
async def standing(**settings: Any) -> AsyncIterator[tuple[Gateway, ScriptedBatcher, str]]:
    given = {"http_address": "127.0.0.1:0", "tenant": "t"} | settings
    async with Rig().standing(**given) as (gateway, batcher):
        yield gateway, batcher, gateway.http_address


async def say(batcher: ScriptedBatcher, text: str, reason: Reason = Reason.STOP, **how: Any) -> Job:
    """Answers the next request."""
    job = await batcher.take(how.pop("priority", 5))
    batcher.send(job, *text.encode(), told=how.pop("told", ()))
    await batcher.end(job, reason, **how)
    return job


def messages(text: str = "hi") -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def events_in(data: bytes) -> list[Any]:
    parts = data.decode().split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") for part in parts)
    return [part[6:] if part == "data: [DONE]" else json.loads(part[6:]) for part in parts]


def refused(answer: HttpAnswer, status: int, param: str | None = None) -> str:
    """What it says."""
    assert answer.status == status, answer.body
    error = ErrorReply.model_validate_json(answer.body).error
    assert error.param == param, error
    return error.message


def test_a_chat_is_answered() -> None:
    async def life() -> None:
        async with standing() as (_, batcher, address), asyncio.TaskGroup() as group:
            asking = group.create_task(ask(address, "POST", CHAT, {"model": "bytes", "messages": messages()}))
            job = await say(batcher, "Grüße")
            answer = await asking
            assert answer.status == 200 and answer.headers["content-type"] == "application/json"
            assert answer.headers["x-request-id"] == job.request.id
            reply = ChatReply.model_validate_json(answer.body)
            assert reply.id == f"chatcmpl-{job.request.id}" and reply.model == "bytes"
            assert reply.choices[0].message.content == "Grüße"
            assert reply.choices[0].finish_reason == "stop" and reply.choices[0].logprobs is None
            prompt = "<|im_start|>user\nhi\n<|im_start|>assistant\n"  # the end of a turn is one token
            assert bytes(i for i in job.request.prompt_ids if i < 256).decode() == prompt
            assert reply.usage.prompt_tokens == len(job.request.prompt_ids)
            assert reply.usage.completion_tokens == 7
            assert job.request.tenant == "t"

    run(life())


def test_a_stream_has_a_role_then_text_then_its_end() -> None:
    async def life() -> None:
        body = {"messages": messages(), "stream": True, "stream_options": {"include_usage": True}}
        async with standing() as (_, batcher, address):
            async with asyncio.TaskGroup() as group:
                serving = group.create_task(say(batcher, "ab"))
                async with stream(address, "POST", CHAT, body, {"Idempotency-Key": "k"}) as answer:
                    data = await answer.body()
                job = await serving
        assert job.request.keyed
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-request-id"] == job.request.id
        *chunks, done = events_in(data)
        assert done == "[DONE]"
        told = [ChatChunk.model_validate(chunk) for chunk in chunks]
        assert [c.choices[0].delta.role for c in told[:-1]] == ["assistant"] + [None] * (len(told) - 2)
        assert "".join(c.choices[0].delta.content or "" for c in told[:-1]) == "ab"
        assert [c.choices[0].finish_reason for c in told[:-1]] == [None] * (len(told) - 2) + ["stop"]
        assert all("usage" in chunk for chunk in chunks)
        assert told[-1].choices == [] and told[-1].usage is not None and told[-1].usage.completion_tokens == 2
        assert len({c.id for c in told}) == 1

    run(life())


def test_chunks_come_as_tokens_do_one_write_each() -> None:
    async def life() -> None:
        body = {"prompt": "x", "stream": True}
        async with standing() as (_, batcher, address), asyncio.TaskGroup() as group:

            async def serve() -> Job:
                job = await batcher.take()
                batcher.send(job, *b"a")
                return job

            serving = group.create_task(serve())
            async with stream(address, "POST", TEXT, body) as answer:
                assert [c["choices"][0]["text"] for c in events_in(await answer.chunk())] == ["a"]
                job = await serving
                for text in (b"b", "ü".encode()):
                    batcher.send(job, *text)
                    (chunk,) = events_in(await answer.chunk())
                    assert TextChunk.model_validate(chunk).choices[0].text == text.decode()
                await batcher.end(job, Reason.LENGTH)
                (last,) = events_in(await answer.chunk())
                assert last["choices"][0]["finish_reason"] == "length" and "usage" not in last
                assert events_in(await answer.chunk()) == ["[DONE]"]
                assert await answer.chunk() == b""

    run(life())


def test_an_early_failure_has_its_own_status_and_a_late_one_its_event() -> None:
    async def life() -> None:
        body = {"messages": messages(), "stream": True}
        async with standing() as (_, batcher, address), asyncio.TaskGroup() as group:

            async def fail_early() -> None:
                job = await batcher.take()
                await batcher.end(job, Reason.FAILED, error="the worker died")

            group.create_task(fail_early())
            refused(await ask(address, "POST", CHAT, body), 500)

            async def fail_late() -> None:
                job = await batcher.take()
                batcher.send(job, *b"ab")
                await until(lambda: seen)
                await batcher.end(job, Reason.FAILED, error="the worker died")

            seen: list[Any] = []
            group.create_task(fail_late())
            async with stream(address, "POST", CHAT, body) as answer:
                seen += events_in(await answer.chunk())
                (error,) = events_in(await answer.chunk())
                assert await answer.chunk() == b""
            assert ErrorReply.model_validate(error).error.type == "server_error"

    run(life())


@pytest.mark.parametrize("streaming", [False, True])
def test_who_leaves_is_not_answered_any_more(streaming: bool) -> None:
    async def life() -> None:
        async with standing() as (gateway, batcher, address):
            body = {"messages": messages(), "stream": streaming}
            asking = asyncio.ensure_future(ask(address, "POST", CHAT, body))
            job = await batcher.take()
            batcher.send(job, *b"a")
            await until(lambda: gateway.counts is not None and len(gateway._streams.clients) == 1)
            asking.cancel()
            await until(lambda: not gateway._streams.clients)
            await until(lambda: any(isinstance(said, CancelAsk | Detached) for said in batcher.heard))

    run(life())


def test_choices_have_their_places() -> None:
    async def life() -> None:
        async with standing() as (_, batcher, address), asyncio.TaskGroup() as group:
            body = {"prompt": ["x", "y"], "n": 2, "max_tokens": 5}
            asking = group.create_task(ask(address, "POST", TEXT, body))
            jobs = [await batcher.take() for _ in range(2)]
            jobs += [await batcher.take() for _ in range(2)]
            for job in jobs:
                name = bytes(job.request.prompt_ids).decode() + (
                    "1" if job.request.id.endswith("c1") else "0"
                )
                batcher.send(job, *name.encode())
                await batcher.end(job)
            reply = TextReply.model_validate_json((await asking).body)
            assert [(c.index, c.text) for c in reply.choices] == [(0, "x0"), (1, "x1"), (2, "y0"), (3, "y1")]
            assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (2, 8)

    run(life())


def test_log_probabilities_in_both_shapes() -> None:
    told = (
        TokenLogprobs(-0.5, 1, (97, 98), (-0.5, -1.5)),
        TokenLogprobs(-2.0, 3, (98, 99), (-0.25, -1.0)),
    )

    async def life() -> None:
        async with standing() as (_, batcher, address), asyncio.TaskGroup() as group:
            body: dict[str, Any] = {"messages": messages(), "logprobs": True, "top_logprobs": 2}
            asking = group.create_task(ask(address, "POST", CHAT, body))
            job = await say(batcher, "aa", told=told)
            assert job.request.sampling.logprobs == 2
            logprobs = ChatReply.model_validate_json((await asking).body).choices[0].logprobs
            assert logprobs is not None and logprobs.content is not None
            assert [(t.token, t.logprob, t.bytes) for t in logprobs.content] == [
                ("a", -0.5, [97]),
                ("a", -2.0, [97]),
            ]
            assert [t.token for t in logprobs.content[1].top_logprobs] == ["b", "c"]

            asking = group.create_task(ask(address, "POST", TEXT, {"prompt": "x", "logprobs": 1}))
            await say(batcher, "aa", told=told)
            lists = TextReply.model_validate_json((await asking).body).choices[0].logprobs
            assert lists is not None
            assert (lists.tokens, lists.token_logprobs) == (["a", "a"], [-0.5, -2.0])
            assert lists.top_logprobs == [{"a": -0.5}, {"b": -0.25, "a": -2.0}]
            assert lists.text_offset == [0, 1]

    run(life())


BAD: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    (CHAT, {"messages": messages(), "temperature": 3}, "temperature"),
    (CHAT, {"messages": messages(), "temperature": "1"}, "temperature"),
    (CHAT, {"messages": messages(), "max_tokens": 0}, "max_tokens"),
    (CHAT, {"messages": messages(), "max_tokens": True}, "max_tokens"),
    (CHAT, {"messages": messages(), "max_tokens": 1.5}, "max_tokens"),
    (CHAT, {"messages": messages(), "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"messages": messages(), "stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {"messages": messages(), "logit_bias": {"x": 1}}, "logit_bias.x"),
    (CHAT, {"messages": messages(), "logit_bias": {"9999": 1}}, "logit_bias"),
    (CHAT, {"messages": messages(), "logit_bias": {f"x{i}": 1 for i in range(1025)}}, "logit_bias"),
    (CHAT, {"messages": messages(), "n": 2, "temperature": 0}, "n"),
    (CHAT, {"messages": messages(), "stop": ["a", ""]}, "stop[1]"),
    (CHAT, {"messages": messages(), "priority": 10}, "priority"),
    (CHAT, {"messages": messages("x" * 5000)}, "messages"),
    (CHAT, {"messages": messages(), "response_format": {"type": "nonsense"}}, "response_format.type"),
    (CHAT, {"messages": messages(), "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (TEXT, {}, "prompt"),
    (TEXT, {"prompt": ""}, "prompt"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": [1, -2]}, "prompt[1]"),
    (TEXT, {"prompt": [[1], []]}, "prompt[1]"),
    (TEXT, {"prompt": [300]}, "prompt"),
    (TEXT, {"prompt": [300], "echo": True}, "prompt"),
    (TEXT, {"prompt": "x", "best_of": 2, "n": 3}, "best_of"),
    (TEXT, {"prompt": "x", "logprobs": 21}, "logprobs"),
    (TEXT, {"prompt": "x", "suffix": "y"}, "suffix"),
    (TEXT, {"prompt": "x", "echo": True, "stream": True, "logprobs": 1, "n": 2}, "echo"),
]


def test_what_cannot_be_is_refused_by_its_name() -> None:
    async def life() -> None:
        async with standing(prompt_bytes_max=100_000) as (_, _, address):
            for path, body, param in BAD:
                for streaming in ({}, {"stream": True}):
                    if "stream_options" in body and streaming:
                        continue
                    message = refused(await ask(address, "POST", path, {**body, **streaming}), 400, param)
                    assert message.startswith(param), message

    run(life())


def test_statuses_of_their_own() -> None:
    async def life() -> None:
        deep = b'{"messages":' + b"[" * 100 + b"]" * 100 + b"}"
        async with standing(http_body_bytes_max=2000, streams_len_max=0) as (_, _, address):
            good = {"messages": messages()}
            refused(await ask(address, "POST", CHAT, b"x" * 3000), 413, "body")
            refused(await ask(address, "POST", CHAT, b"{"), 400, "body")
            refused(await ask(address, "POST", CHAT, b"[]"), 400, "body")
            refused(await ask(address, "POST", CHAT, b"\xff\xfe"), 400, "body")
            refused(await ask(address, "POST", CHAT, deep), 400, "body")
            refused(await ask(address, "POST", CHAT, good, {"content-type": "text/plain"}), 415)
            refused(
                await ask(address, "POST", CHAT, good, {"Idempotency-Key": "k" * 300}), 400, "Idempotency-Key"
            )
            for wrong in ("0", "-1", "soon", "9" * 30):
                answer = await ask(address, "POST", CHAT, good, {"x-shoal-timeout-ms": wrong})
                refused(answer, 400, "x-shoal-timeout-ms")
            full = await ask(address, "POST", CHAT, good)
            refused(full, 503)
            assert int(full.headers["retry-after"]) >= 1
        async with standing() as (_, _, address):
            unknown = await ask(address, "POST", CHAT, {"model": "other", **good})
            refused(unknown, 404, "model")
            assert unknown.json()["error"]["code"] == "model_not_found"
            long = await ask(address, "POST", TEXT, {"prompt": "x" * 5000})
            refused(long, 400, "prompt")
            assert long.json()["error"]["code"] == "context_length_exceeded"

    run(life())


def test_models_are_listed() -> None:
    async def life() -> None:
        async with standing() as (_, _, address):
            reply = ModelListReply.model_validate_json((await ask(address, "GET", "/v1/models")).body)
            assert [(m.id, m.max_model_len) for m in reply.data] == [("bytes", 4096)]
            assert (await ask(address, "GET", "/v1/models/bytes")).json()["id"] == "bytes"
            refused(await ask(address, "GET", "/v1/models/a/b"), 404, "model")

    run(life())


def test_a_deadline_is_told() -> None:
    async def life() -> None:
        async with standing() as (_, batcher, address), asyncio.TaskGroup() as group:
            headers = {"x-shoal-timeout-ms": "1500"}
            asking = group.create_task(ask(address, "POST", CHAT, {"messages": messages()}, headers))
            job = await say(batcher, "a", Reason.DEADLINE)
            assert job.request.timeout_ms == 1500
            refused(await asking, 504)

    run(life())


def test_answers_without_http_are_the_same() -> None:
    bodies: list[tuple[str, dict[str, Any], int]] = [
        (CHAT, {"messages": messages(), "seed": 1}, 200),
        (TEXT, {"prompt": "x", "echo": True}, 200),
        (CHAT, {"messages": []}, 400),
        (TEXT, {"prompt": "x", "model": "other"}, 404),
    ]

    async def life() -> None:
        async with standing() as (gateway, batcher, address), asyncio.TaskGroup() as group:
            bots = answer_all(group, batcher)
            for url, body, status in bodies:
                over_http = await ask(address, "POST", url, body)
                told = await answer(gateway, Caller("t"), url, body, 7)
                assert (over_http.status, told[0]) == (status, status)
                differ = {"id", "created"} if status == 200 else set()
                same = over_http.json()
                assert {k: v for k, v in told[1].items() if k not in differ} == {
                    k: v for k, v in same.items() if k not in differ
                }
            assert (await answer(gateway, Caller("t"), CHAT, {"messages": messages(), "stream": True}, 7))[
                0
            ] == 400
            assert (await answer(gateway, Caller("t"), "/v1/embeddings", {}, 7))[0] == 400
            for bot in bots:
                bot.cancel()

    run(life())


def test_draining_ends_streams_with_an_event() -> None:
    async def life() -> None:
        async with standing(drain_wait_s=0.0) as (gateway, batcher, address), asyncio.TaskGroup() as group:
            body = {"messages": messages(), "stream": True}

            async def begin() -> None:
                batcher.send(await batcher.take(), *b"a")

            group.create_task(begin())
            async with stream(address, "POST", CHAT, body) as answer:
                assert events_in(await answer.chunk())[0]["choices"][0]["delta"]["role"] == "assistant"
                group.create_task(gateway.drain())
                while data := await answer.chunk():
                    (last,) = events_in(data)
                assert last["error"]["type"] == "service_unavailable_error"
            with pytest.raises(OSError):
                while True:
                    await ask(address, "GET", "/health")
                    await asyncio.sleep(0.01)

    run(life())


def test_one_prompt_that_fails_ends_the_others() -> None:
    async def life() -> None:
        async with standing() as (gateway, batcher, address), asyncio.TaskGroup() as group:
            asking = group.create_task(ask(address, "POST", TEXT, {"prompt": ["x", "y"]}))
            first, second = await batcher.take(), await batcher.take()
            batcher.send(second, *b"a")
            await batcher.end(first, Reason.FAILED, error="the worker died")
            refused(await asking, 500)
            await until(lambda: not gateway._streams.clients)

    run(life())
