"""Its part of /openapi.json: endpoints here, bodies from `schema.py` and `replies.py`."""

from typing import Any

from pydantic import BaseModel

from gateway.openai.answer import CHAT, COMPLETIONS
from gateway.openai.replies import CHUNKS, REPLIES, ChatReply, ModelListReply, ModelReply, TextReply
from gateway.openai.schema import ChatRequest, CompletionRequest
from gateway.openapi import LOOKING, REFUSALS, Part, content, in_path, ref, refusals

_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}


def part() -> Part:
    paths = {
        CHAT: {"post": _generation("chat", ChatRequest, ChatReply)},
        COMPLETIONS: {"post": _generation("completions", CompletionRequest, TextReply)},
        "/v1/models": {"get": _reading("models", ModelListReply)},
        "/v1/models/{name}": {"get": _reading("model", ModelReply) | {"parameters": [in_path("name")]}},
    }
    return Part(paths, (ChatRequest, CompletionRequest), (*REPLIES, *CHUNKS))


def _generation(name: str, request: type[BaseModel], reply: type[BaseModel]) -> dict[str, Any]:
    told = content(ref(reply)) | content(_EVENT, "text/event-stream")
    answers = {"200": {"description": "The answer, or a stream of its chunks.", "content": told}}
    return {
        "operationId": name,
        "requestBody": {"required": True, "content": content(ref(request))},
        "responses": answers | refusals(REFUSALS),
    }


def _reading(name: str, reply: type[BaseModel]) -> dict[str, Any]:
    answers = {"200": {"description": "What there is.", "content": content(ref(reply))}}
    return {"operationId": name, "responses": answers | refusals(LOOKING)}
