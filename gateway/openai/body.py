"""Pure. Whole answers: what was gathered of each prompt, as the body that a client reads."""

from dataclasses import dataclass
from typing import Any

from chassis.messages.gateway import IdLogprobs
from gateway.openai.call import Asked
from gateway.openai.gathered import Choice, Gathered, Spent, finish_reason
from gateway.openai.logprobs import TextLogprobs, chat_logprobs, prompt_logprobs
from gateway.openai.prompt import Prompt
from gateway.openai.tools import ToolAnswer


@dataclass(frozen=True, slots=True)
class Circumstances:
    """Of an answer. `created_s`: seconds since 1970."""

    model: str
    created_s: int


def chat_body(asked: Asked, where: Circumstances, prompt: Prompt, gathered: Gathered) -> dict[str, Any]:
    """Raises Status for what was cut off."""
    body: dict[str, Any] = {
        "id": f"chatcmpl-{gathered.request_id}",
        "object": "chat.completion",
        "created": where.created_s,
        "model": where.model,
        "choices": [
            _chat_choice(asked, gathered, index, choice) for index, choice in sorted(gathered.choices.items())
        ],
        "usage": gathered.spent.told(),
        "system_fingerprint": None,
    }
    if asked.prompt_logprobs is not None:
        body["prompt_logprobs"] = _prompt_told(asked, gathered)
    if asked.token_ids:
        body["prompt_token_ids"] = prompt.ids
    return body


def _chat_choice(asked: Asked, gathered: Gathered, index: int, choice: Choice) -> dict[str, Any]:
    assert choice.reason is not None, "not over"
    text, word = "".join(choice.text), finish_reason(choice.reason)
    message: dict[str, Any] = {"content": text, "refusal": None}
    if asked.tools is not None:
        read = ToolAnswer(asked.tools)
        message = read.message(text, gathered.request_id, index)
        word = read.word(word)
    one: dict[str, Any] = {
        "index": index,
        "message": {"role": "assistant"} | message,
        "logprobs": chat_logprobs(choice.logprobs) if asked.logprobs is not None else None,
        "finish_reason": word,
    }
    if asked.token_ids:
        one["token_ids"] = choice.ids
    return one


def text_body(
    asked: Asked, where: Circumstances, prompts: list[Prompt], answers: list[Gathered]
) -> dict[str, Any]:
    """Choices of the first prompt, then of the second. Raises Status for what was cut off."""
    spent = Spent()
    choices = []
    for place, (prompt, gathered) in enumerate(zip(prompts, answers, strict=True)):
        spent.prompt += gathered.spent.prompt
        spent.cached += gathered.spent.cached
        spent.output += gathered.spent.output
        for index, choice in sorted(gathered.choices.items()):
            one = _text_choice(asked, prompt, gathered, choice)
            choices.append({"index": place * asked.n + index} | one)
    return {
        "id": f"cmpl-{answers[0].request_id}",
        "object": "text_completion",
        "created": where.created_s,
        "model": where.model,
        "choices": choices,
        "usage": spent.told(asked.drop_output),
        "system_fingerprint": None,
    }


def _text_choice(asked: Asked, prompt: Prompt, gathered: Gathered, choice: Choice) -> dict[str, Any]:
    assert choice.reason is not None, "not over"
    word = finish_reason(choice.reason)
    if asked.drop_output:
        choice, word = Choice(), "length"
    text = "".join(choice.text)
    logprobs = None
    if asked.logprobs is not None:
        entries: list[IdLogprobs | bytes] = list(choice.logprobs)
        if asked.echo:
            entries = [prompt.first, *gathered.prompt_logprobs, *entries]
        logprobs = TextLogprobs(asked.logprobs).lists(entries)
    one: dict[str, Any] = {
        "text": prompt.text + text if asked.echo else text,
        "logprobs": logprobs,
        "finish_reason": word,
    }
    if asked.prompt_logprobs is not None:
        one["prompt_logprobs"] = _prompt_told(asked, gathered)
    if asked.token_ids:
        one["prompt_token_ids"] = prompt.ids
        one["token_ids"] = choice.ids
    return one


def _prompt_told(asked: Asked, gathered: Gathered) -> list[Any]:
    assert asked.prompt_logprobs is not None
    return prompt_logprobs(gathered.prompt_ids, gathered.prompt_logprobs, asked.prompt_logprobs)
