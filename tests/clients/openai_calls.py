"""What the openai package makes of a server: `python openai_calls.py BASE_URL`.

Ends with 0 when all of it is as its users know it; prints the id of a request that was left in the middle.
"""

import asyncio
import json
import sys

import httpx
from openai import (
    APIStatusError,
    AsyncOpenAI,
    BadRequestError,
    ConflictError,
    InternalServerError,
    LengthFinishReasonError,
    NotFoundError,
    OpenAI,
)

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]


def models(client: OpenAI) -> str:
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id) == model and model.object == "model"
    try:
        client.models.retrieve("nobody")
    except NotFoundError as error:
        assert error.code == "model_not_found" and error.param == "model"
    else:
        raise AssertionError("a model that is not there")
    return model.id


def chat(client: OpenAI, model: str) -> None:
    asked = {"model": model, "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 12}
    raw = client.chat.completions.with_raw_response.create(**asked)
    whole = raw.parse()
    assert whole.id == "chatcmpl-" + raw.headers["x-request-id"] == "chatcmpl-" + (whole._request_id or "")
    (choice,) = whole.choices
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert whole.usage.prompt_tokens_details.cached_tokens >= 0

    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == choice.message.content
    assert [c.choices[0].finish_reason for c in chunks[-2:-1]] == [choice.finish_reason]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(c.usage is None for c in chunks[:-1])

    with client.chat.completions.stream(**asked) as stream:  # the package's own gathering of chunks
        try:
            final = stream.get_final_completion()
        except LengthFinishReasonError as error:  # what it says of any answer that is cut at its length
            final = error.completion
    assert final.choices[0].message.content == choice.message.content

    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    joined = client.chat.completions.create(
        **asked | {"messages": [MESSAGES[0], {"role": "user", "content": parts}]}
    )
    assert joined.choices[0].message.content == choice.message.content


def log_probabilities(client: OpenAI, model: str) -> None:
    asked = {"model": model, "messages": MESSAGES, "temperature": 0, "max_tokens": 8}
    asked |= {"logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**asked).choices[0]
    told = whole.logprobs.content
    assert len(told) >= 1
    for token in told:
        assert len(token.top_logprobs) == 3 and token.logprob <= 0
        assert max(t.logprob for t in token.top_logprobs) == token.logprob  # greedy
    assert (
        bytes(b for token in told for b in token.bytes)
        .decode(errors="replace")
        .startswith(whole.message.content)
    )
    streamed = [
        token
        for chunk in client.chat.completions.create(**asked, stream=True)
        if chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content
    ]
    assert streamed == told


def completions(client: OpenAI, model: str) -> None:
    asked = {"model": model, "prompt": "Once upon", "temperature": 0, "max_tokens": 6}
    whole = client.completions.create(**asked, logprobs=2)
    (choice,) = whole.choices
    lists = choice.logprobs
    assert (
        len(lists.tokens)
        == len(lists.token_logprobs)
        == len(lists.text_offset)
        == whole.usage.completion_tokens
    )
    assert all(len(top) == 2 for top in lists.top_logprobs)
    echoed = client.completions.create(**asked, logprobs=0, echo=True).choices[0]
    assert echoed.text == "Once upon" + choice.text
    assert echoed.logprobs.token_logprobs[0] is None and None not in echoed.logprobs.token_logprobs[1:]
    streamed = list(client.completions.create(**asked, logprobs=0, echo=True, stream=True))
    assert "".join(c.choices[0].text for c in streamed) == echoed.text
    lists = [c.choices[0].logprobs for c in streamed if c.choices[0].logprobs]
    assert [t for one in lists for t in one.tokens] == echoed.logprobs.tokens
    assert [t for one in lists for t in one.text_offset] == echoed.logprobs.text_offset
    assert [t for one in lists for t in one.token_logprobs] == echoed.logprobs.token_logprobs

    told = client.completions.create(**asked, extra_body={"return_token_ids": True, "prompt_logprobs": 1})
    one = told.choices[0].model_extra
    by_ids = client.completions.create(**asked | {"prompt": one["prompt_token_ids"]})
    assert by_ids.choices[0].text == choice.text
    assert len(one["prompt_logprobs"]) == len(one["prompt_token_ids"])
    both = client.completions.create(**asked | {"prompt": ["Once upon", "Twice"]})
    assert [c.index for c in both.choices] == [0, 1] and both.choices[0].text == choice.text
    nothing = client.completions.create(**asked | {"max_tokens": 0, "echo": True})
    assert (nothing.choices[0].text, nothing.usage.completion_tokens) == ("Once upon", 0)

    stop = choice.text[2:4]
    cut = client.completions.create(**asked, stop=[stop])
    assert cut.choices[0].text == choice.text[: choice.text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    several = client.completions.create(**asked | {"temperature": 1, "n": 3, "seed": 7})
    assert [c.index for c in several.choices] == [0, 1, 2]
    assert len({c.text for c in several.choices}) > 1
    again = client.completions.create(**asked | {"temperature": 1, "n": 3, "seed": 7})
    assert [c.text for c in again.choices] == [c.text for c in several.choices]
    best = client.completions.create(**asked | {"temperature": 1, "best_of": 3, "seed": 7})
    assert best.choices[0].text in {c.text for c in several.choices}
    assert best.usage.completion_tokens == several.usage.completion_tokens
    banned = client.completions.create(
        **asked, logit_bias={"1": -100}, presence_penalty=0.5, top_p=0.9, user="u"
    )
    assert banned.choices


def errors(client: OpenAI, model: str) -> None:
    asked = {"model": model, "messages": MESSAGES, "max_tokens": 4}
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    wrong = (
        ({"temperature": 9}, "temperature"),
        ({"n": 99}, "n"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": image}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": "x" * 600_000}]}, "messages"),
    )
    for change, param in wrong:
        for stream in (False, True):
            try:
                client.chat.completions.create(**asked | change, stream=stream)
            except BadRequestError as error:
                assert error.param == param and error.type == "invalid_request_error", error
                assert param in error.message
            else:
                raise AssertionError(f"{change} was taken")
    try:
        client.chat.completions.create(**asked | {"model": "nobody"}, stream=True)
    except NotFoundError as error:
        assert error.param == "model"
    else:
        raise AssertionError("a model that is not there")
    try:
        client.chat.completions.create(
            **asked | {"max_tokens": 400}, extra_headers={"x-shoal-timeout-ms": "60"}
        )
    except InternalServerError as error:
        assert error.status_code == 504, error
    else:
        raise AssertionError("a deadline that has passed")
    try:
        client.post("/nowhere", cast_to=object)
    except APIStatusError as error:
        assert error.status_code == 404
    key = {"Idempotency-Key": "one"}
    first = client.chat.completions.create(**asked, extra_headers=key)
    assert client.chat.completions.create(**asked, extra_headers=key).id == first.id
    try:
        client.chat.completions.create(**asked | {"max_tokens": 5}, extra_headers=key)
    except ConflictError as error:
        assert error.status_code == 409
    else:
        raise AssertionError("the same key with another body")


async def many(base_url: str, model: str) -> None:
    """Streams beside each other."""
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:

        async def one(n: int) -> None:
            messages = [{"role": "user", "content": f"question {n}"}]
            asked = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 10}
            text = ""
            async for chunk in await client.chat.completions.create(**asked, stream=True):
                text += chunk.choices[0].delta.content or ""
            whole = await client.chat.completions.create(**asked)
            assert whole.choices[0].message.content == text

        await asyncio.gather(*(one(n) for n in range(24)))


def leave(client: OpenAI, model: str) -> str:
    """A stream of which only the first tokens are read."""
    asked = {"model": model, "messages": MESSAGES, "max_tokens": 3000, "extra_body": {"ignore_eos": True}}
    with client.chat.completions.create(**asked, stream=True) as stream:
        for chunk in stream:
            if chunk.choices[0].delta.content:
                break
    return chunk.id.removeprefix("chatcmpl-")


def leave_unanswered(base_url: str, model: str) -> None:
    """A whole answer that nobody waits for."""
    body = {"model": model, "messages": MESSAGES, "max_tokens": 3000, "ignore_eos": True}
    try:
        httpx.post(f"{base_url}/chat/completions", json=body, timeout=0.3)
    except httpx.ReadTimeout:
        return
    raise AssertionError("answered at once")


def main(base_url: str) -> None:
    with OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        model = models(client)
        chat(client, model)
        log_probabilities(client, model)
        completions(client, model)
        errors(client, model)
        asyncio.run(many(base_url, model))
        leave_unanswered(base_url, model)
        sys.stdout.write(json.dumps({"left": leave(client, model)}))


if __name__ == "__main__":
    main(sys.argv[1])
