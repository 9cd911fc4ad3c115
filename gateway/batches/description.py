"""Its part of /openapi.json: endpoints here, bodies from `asked.py`, `upload.py` and `replies.py`."""

from typing import Any

from pydantic import BaseModel

from gateway.batches.asked import BatchesQuery, BatchRequest, FilesQuery
from gateway.batches.replies import (
    REPLIES,
    BatchListReply,
    BatchReply,
    FileDeletedReply,
    FileListReply,
    FileReply,
)
from gateway.batches.upload import UploadForm
from gateway.openapi import LOOKING, REFUSALS, Part, content, in_path, ref, refusals

_LINES = {"type": "string", "description": "One JSON object a line."}
_CHANGING = tuple(status for status in REFUSALS if status != "504")


def part() -> Part:
    file, batch = "/v1/files/{id}", "/v1/batches/{id}"
    of_file = _links("$response.body#/id", "file", "fileContent")
    of_batch = _links("$response.body#/id", "batch", "cancelBatch")
    of_upload = of_file | {
        "createBatch": {
            "operationId": "createBatch",
            "requestBody": {
                "input_file_id": "$response.body#/id",
                "endpoint": "/v1/completions",
                "completion_window": "24h",
            },
        }
    }
    paths = {
        "/v1/files": {
            "post": _operation("createFile", FileReply, _CHANGING, of_upload)
            | _body(UploadForm, "multipart/form-data"),
            "get": _operation("files", FileListReply, ("400", *LOOKING)) | _query(FilesQuery),
        },
        file: {
            "parameters": [in_path("id")],
            "get": _operation("file", FileReply, LOOKING),
            "delete": _operation("deleteFile", FileDeletedReply, ("409", *LOOKING)),
        },
        f"{file}/content": {
            "parameters": [in_path("id")],
            "get": {
                "operationId": "fileContent",
                "responses": {
                    "200": {"description": "The file.", "content": content(_LINES, "application/jsonl")}
                }
                | refusals(LOOKING),
            },
        },
        "/v1/batches": {
            "post": _operation("createBatch", BatchReply, _CHANGING, of_batch) | _body(BatchRequest),
            "get": _operation("batches", BatchListReply, ("400", *LOOKING)) | _query(BatchesQuery),
        },
        batch: {
            "parameters": [in_path("id")],
            "get": _operation("batch", BatchReply, LOOKING),
        },
        f"{batch}/cancel": {
            "parameters": [in_path("id")],
            "post": _operation("cancelBatch", BatchReply, ("400", *LOOKING)),
        },
    }
    return Part(paths, (BatchRequest, UploadForm), REPLIES)


def _operation(
    name: str, reply: type[BaseModel], refused: tuple[str, ...], links: dict[str, Any] | None = None
) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": "What there is by now.", "content": content(ref(reply))}
    if links:
        answer["links"] = links
    return {"operationId": name, "responses": {"200": answer} | refusals(refused)}


def _body(request: type[BaseModel], kind: str = "application/json") -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": content(ref(request), kind)}}


def _query(query: type[BaseModel]) -> dict[str, Any]:
    schemas = query.model_json_schema()["properties"]
    return {"parameters": [{"name": name, "in": "query", "schema": s} for name, s in schemas.items()]}


def _links(place: str, *operations: str) -> dict[str, Any]:
    """To what can be asked of the thing whose id the answer tells."""
    return {name: {"operationId": name, "parameters": {"id": place}} for name in operations}
