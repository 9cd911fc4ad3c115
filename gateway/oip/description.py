"""Its part of /openapi.json: what it tells over REST of the server and its models.

Inference is left to the protocol's own description: no schema here checks a request's tensors.
"""

from typing import Any

from pydantic import BaseModel

from gateway.oip.rest_replies import (
    REPLIES,
    IndexEntryReply,
    InferenceErrorReply,
    LiveReply,
    ModelConfigReply,
    ModelMetadataReply,
    ModelReadyReply,
    ReadyReply,
    ServerReply,
    StatisticsReply,
)
from gateway.openapi import REFUSALS, Part, content, in_path, ref

_MODEL = "/v2/models/{name}"


def part() -> Part:
    index: dict[str, Any] = {"type": "array", "items": ref(IndexEntryReply)}
    asked = {"required": False, "content": content({"type": "object"})}
    paths = {
        "/v2": _open("inferenceServer", ServerReply),
        "/v2/health/live": _open("inferenceLive", LiveReply),
        "/v2/health/ready": _open("inferenceReady", ReadyReply, "503"),
        "/v2/models/stats": _guarded("inferenceStatistics", ref(StatisticsReply)),
        "/v2/repository/index": {
            "post": _guarded("inferenceIndex", index, "400", "413")["get"] | {"requestBody": asked}
        },
        _MODEL: _of_model("inferenceModel", ModelMetadataReply),
        f"{_MODEL}/config": _of_model("inferenceModelConfig", ModelConfigReply),
        f"{_MODEL}/stats": _of_model("inferenceModelStatistics", StatisticsReply),
        f"{_MODEL}/ready": _of_model("inferenceModelReady", ModelReadyReply),
    }
    unready = {"anyOf": [ref(ModelReadyReply), ref(InferenceErrorReply)]}
    paths[f"{_MODEL}/ready"]["get"]["responses"]["503"] = _answer("It is not ready.", unready)
    return Part(paths, (), REPLIES)


def _answer(words: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": words, "content": content(schema)}


def _open(name: str, reply: type[BaseModel], *others: str) -> dict[str, Any]:
    """For everybody; the same shape under other statuses."""
    answers = {status: _answer("What there is by now.", ref(reply)) for status in ("200", *others)}
    return {"get": {"operationId": name, "responses": answers | _refusals("405", "500")}}


def _guarded(name: str, schema: dict[str, Any], *more: str) -> dict[str, Any]:
    answers = {"200": _answer("What there is by now.", schema)}
    refused = _refusals("401", "403", "404", "405", "500", "503", *more)
    return {"get": {"operationId": name, "responses": answers | refused}}


def _refusals(*statuses: str) -> dict[str, Any]:
    return {status: _answer(REFUSALS[status], ref(InferenceErrorReply)) for status in statuses}


def _of_model(name: str, reply: type[BaseModel]) -> dict[str, Any]:
    return _guarded(name, ref(reply)) | {"parameters": [in_path("name")]}
