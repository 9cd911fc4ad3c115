"""What the description at /openapi.json is put together from: a part for each protocol."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

VERSION = "3.1.0"
WHAT = "OpenAI's API, and what the Open Inference Protocol tells, as Shoal speaks them."
REFUSALS = {
    "400": "What was asked for cannot be; the field is named.",
    "401": "No key, or none of ours.",
    "403": "The key may not do this.",
    "404": "There is none of that name, or it is another's.",
    "405": "No such method here.",
    "409": "The same key with another body, an answer that was cancelled, or what is still in use.",
    "413": "The body is too large.",
    "415": "The body is no JSON by its type.",
    "429": "The key's quota is used up; Retry-After says for how long.",
    "500": "A failure of ours.",
    "503": "No capacity now; Retry-After says when to come again.",
    "504": "The deadline passed.",
}
LOOKING = ("401", "403", "404", "405", "500", "503")  # what may be said to who only looks


@dataclass(frozen=True, slots=True)
class Part:
    """Of one protocol: its endpoints by path, and the shapes they name."""

    paths: dict[str, Any]
    requests: tuple[type[BaseModel], ...]
    replies: tuple[type[BaseModel], ...]


def description(*parts: Part) -> dict[str, Any]:
    wanted: list[tuple[type[BaseModel], Any]] = []
    paths: dict[str, Any] = {}
    for part in parts:
        assert not part.paths.keys() & paths.keys(), "a path belongs to one protocol"
        paths |= part.paths
        wanted += [(model, "validation") for model in part.requests]
        wanted += [(model, "serialization") for model in part.replies]
    _, schemas = models_json_schema(wanted, ref_template="#/components/schemas/{model}")
    return {
        "openapi": VERSION,
        "info": {"title": "Shoal", "version": "1", "description": WHAT},
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def content(schema: dict[str, Any], kind: str = "application/json") -> dict[str, Any]:
    return {kind: {"schema": schema}}


def in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def refusals(statuses: Iterable[str]) -> dict[str, Any]:
    """In OpenAI's shape."""
    error = {"$ref": "#/components/schemas/ErrorReply"}
    return {status: {"description": REFUSALS[status], "content": content(error)} for status in statuses}
