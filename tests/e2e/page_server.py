"""The chat page before a stand-in of OpenAI's API that says what the test wrote down, at its pace."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from gateway.page import routes
from shoal.nats_server import free_port


@dataclass
class Script:
    """What the stand-in does, and what it was asked."""

    pieces: list[str | dict[str, Any]] = field(
        default_factory=list
    )  # of the next answers; a dict is an event
    pace_s: float = 0.0
    endless: bool = False
    refuse: tuple[int, str, dict[str, str]] | None = None
    models: list[str] = field(default_factory=lambda: ["first", "second"])
    key: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)

    def models_of(self, request: Request) -> Response:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return self._refusal(401, "authorization: not a key of ours", {})
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "shoal"} for name in self.models]
        return JSONResponse({"object": "list", "data": data})

    async def chat(self, request: Request) -> Response:
        self.asked.append(json.loads(await request.body()))
        self.keys.append(request.headers.get("authorization", ""))
        if self.refuse is not None:
            return self._refusal(*self.refuse)
        return StreamingResponse(
            self._stream(), media_type="text/event-stream", headers={"x-request-id": f"req{len(self.asked)}"}
        )

    def _refusal(self, status: int, message: str, headers: dict[str, str]) -> Response:
        body = {"error": {"message": message, "type": "t", "param": None, "code": None}}
        return JSONResponse(body, status, headers)

    async def _stream(self) -> AsyncIterator[bytes]:
        try:
            yield _event(delta={"role": "assistant", "content": ""})
            sent = 0
            while sent < len(self.pieces) or self.endless:
                piece = self.pieces[sent] if sent < len(self.pieces) else f"word{sent} "
                sent += 1
                await asyncio.sleep(self.pace_s)
                if isinstance(piece, dict):
                    yield f"data: {json.dumps(piece)}\n\n".encode()
                    return
                for part in _halves(_event(delta={"content": piece})):  # events come cut anywhere
                    yield part
            yield _event(finish="stop")
            usage = {"prompt_tokens": 9, "completion_tokens": sent, "total_tokens": 9 + sent}
            usage["prompt_tokens_details"] = {"cached_tokens": 4}  # type: ignore[assignment]
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode()
        finally:
            self.left.set()


def _event(delta: dict[str, str] | None = None, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta or {}, "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice], 'usage': None}, ensure_ascii=False)}\n\n".encode()


def _halves(data: bytes) -> Iterator[bytes]:
    yield data[: len(data) // 2]
    yield data[len(data) // 2 :]


@contextmanager
def served(script: Script) -> Iterator[str]:
    """Its address, as a URL."""
    doors = [
        *routes(),
        Route("/v1/models", script.models_of),
        Route("/v1/chat/completions", script.chat, methods=["POST"]),
    ]
    port = free_port()
    server = uvicorn.Server(
        uvicorn.Config(Starlette(routes=doors), port=port, log_config=None, ws="none", lifespan="off")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)
