"""A plain HTTP/1.1 client for tests: sees every byte and every chunk as it comes."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class HttpAnswer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(slots=True)
class HttpStream:
    """An answer whose body is read chunk by chunk."""

    status: int
    headers: dict[str, str]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def chunk(self) -> bytes:
        """The next write of the server; empty at the end."""
        assert self.headers.get("transfer-encoding") == "chunked", self.headers
        size = int(await self.reader.readline(), 16)
        data = await self.reader.readexactly(size)
        await self.reader.readexactly(2)
        return data

    async def chunks(self) -> AsyncIterator[bytes]:
        while data := await self.chunk():
            yield data

    async def body(self) -> bytes:
        if self.status in (204, 304):
            return b""
        if "content-length" in self.headers:
            return await self.reader.readexactly(int(self.headers["content-length"]))
        return b"".join([data async for data in self.chunks()])


def head(method: str, path: str, headers: dict[str, str], body: bytes) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", *(f"{k}: {v}" for k, v in headers.items())]
    if body or method == "POST":
        lines.append(f"content-length: {len(body)}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


@asynccontextmanager
async def stream(
    address: str, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> AsyncIterator[HttpStream]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    try:
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        given = {} if body is None else {"content-type": "application/json"}
        writer.write(head(method, path, given | (headers or {}), data))
        status = int((await reader.readline()).split()[1])
        got: dict[str, str] = {}
        while line := (await reader.readline()).strip():
            name, _, value = line.decode().partition(":")
            got[name.lower()] = value.strip()
        yield HttpStream(status, got, reader, writer)
    finally:
        writer.close()


async def ask(
    address: str, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> HttpAnswer:
    async with stream(address, method, path, body, headers) as answer:
        return HttpAnswer(answer.status, answer.headers, await answer.body())


async def raw(address: str, sent: bytes, wait: bool = True) -> bytes:
    """What comes back until the server closes; without `wait`, by the next turn."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    try:
        writer.write(sent)
        if wait:
            return await reader.read()
        try:
            async with asyncio.timeout(0.05):
                return await reader.read()
        except TimeoutError:
            return b""
    except ConnectionResetError:
        return b""
    finally:
        writer.close()
