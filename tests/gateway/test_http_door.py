"""The HTTP listener before any protocol: bounds, garbage, what has no route, start and stop."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.config import Config
from gateway.http_door import listen, serve
from tests.gateway.fake_front import FakeFront
from tests.gateway.http_client import ask, raw
from tests.gateway.rig import Rig, run


@asynccontextmanager
async def door(front: FakeFront | None = None, **settings: Any) -> AsyncIterator[str]:
    config = Config(**({"grpc_address": "", "http_address": "127.0.0.1:0"} | settings))
    async with serve(front or FakeFront(), config, lambda: 1_700_000_000_000_000_000) as address:
        yield address


def test_alive_and_ready_are_two_things() -> None:
    async def life() -> None:
        front = FakeFront()
        async with door(front) as address:
            assert (await ask(address, "GET", "/health")).status == 200
            assert (await ask(address, "GET", "/ready")).status == 200
            front.ready = False
            assert (await ask(address, "GET", "/health")).status == 200
            assert (await ask(address, "GET", "/ready")).status == 503

    run(life())


def test_what_is_nobodys_is_said_in_json() -> None:
    async def life() -> None:
        async with door() as address:
            for method, path, status in (("GET", "/nothing", 404), ("POST", "/health", 405)):
                answer = await ask(address, method, path)
                assert answer.status == status
                assert answer.json()["error"]["type"] == "invalid_request_error"

    run(life())


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET \xff\xfe HTTP/1.1\r\n\r\n",
        b"\x00" * 4096,
    ],
)
def test_garbage_is_refused_and_harms_nobody(sent: bytes) -> None:
    async def life() -> None:
        async with door() as address:
            assert (await raw(address, sent)).startswith(b"HTTP/1.1 400 ")
            assert (await ask(address, "GET", "/health")).status == 200

    run(life())


def test_a_head_has_its_size() -> None:
    async def life() -> None:
        async with door(http_head_bytes_max=1000) as address:
            told = await raw(address, b"GET /health HTTP/1.1\r\nx: " + b"a" * 2000 + b"\r\n\r\n")
            assert told.startswith(b"HTTP/1.1 431 ")
            assert (await raw(address, b"GET /" + b"a" * 2000 + b" HTTP/1.1\r\n\r\n")).startswith(
                b"HTTP/1.1 431 "
            )

    run(life())


def test_who_says_nothing_or_drips_is_sent_away() -> None:
    async def life() -> None:
        async with door(http_keepalive_s=0, http_head_timeout_s=0.0) as address:
            assert await raw(address, b"") == b""
            assert await raw(address, b"GET / HT") == b""

    run(life())


@pytest.mark.parametrize(
    "sent", [b"", b"GET /health HTTP/1.1\r\n\r\n", b"POST /health HTTP/1.1\r\ncontent-length: 9\r\n\r\n"]
)
def test_what_begins_no_request_holds_no_connection(sent: bytes) -> None:
    async def life() -> None:
        async with door(http_keepalive_s=1) as address:
            host, port = address.split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            if sent:
                await reader.readuntil(b"}")
            writer.write(b"\r\n")
            await reader.read()  # to the end that the server makes
            writer.close()

    run(life())


def test_a_request_may_come_in_parts_and_behind_empty_lines() -> None:
    async def life() -> None:
        async with door() as address:
            host, port = address.split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            for part in (b"\r\n", b"GET /hea", b"lth HTTP/1.1\r\n\r\n", b"GET /health HTTP/1.0\r\n\r\n"):
                writer.write(part)
                await asyncio.sleep(0.01)
            assert (await reader.read()).count(b"HTTP/1.1 200 ") == 2
            writer.close()

    run(life())


def test_zeros_before_a_length_say_nothing() -> None:
    async def life() -> None:
        async with door() as address:
            for length, status in ((b"2", b"400"), (b"99999999", b"413")):
                head = b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\n"
                head += b"connection: close\r\n"
                told = await raw(address, head + b"content-length: " + b"0" * 5000 + length + b"\r\n\r\n{}")
                assert told.startswith(b"HTTP/1.1 " + status), told

    run(life())


def test_connections_have_their_number() -> None:
    async def life() -> None:
        async with door(http_connections_max=2) as address:
            host, port = address.split(":")
            held = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
            while len(await raw(address, b"", wait=False)) == 0:  # both are known once a third is refused
                pass
            refused = await raw(address, b"GET /health HTTP/1.1\r\n\r\n")
            assert refused.startswith(b"HTTP/1.1 503 ")
            body = refused.partition(b"\r\n\r\n")[2]
            assert json.loads(body)["error"]["code"] == "overloaded"
            for _, writer in held:
                writer.close()
                await writer.wait_closed()
            asked = b"GET /health HTTP/1.0\r\n\r\n"
            while (await raw(address, asked)).startswith(b"HTTP/1.1 503"):
                pass

    run(life())


def test_connections_send_at_once_and_notice_who_is_gone() -> None:
    listener = listen(Config(http_address="127.0.0.1:0", http_write_timeout_s=7))
    with listener, socket.create_connection(listener.getsockname()):
        listener.setblocking(True)
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.proto == socket.IPPROTO_TCP  # what asyncio looks at
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7000


def test_a_taken_port_is_an_error_at_start() -> None:
    async def life() -> None:
        async with door() as address:
            with pytest.raises(OSError, match="cannot listen"):
                async with door(http_address=address):
                    pass
        for wrong in ("nowhere", "127.0.0.1:x", "127.0.0.1:99999"):
            with pytest.raises(OSError, match="cannot listen"):
                async with door(http_address=wrong, insecure=True):
                    pass

    run(life())


def test_the_gateway_opens_it_and_closes_it() -> None:
    async def life() -> None:
        async with Rig().standing(http_address="127.0.0.1:0") as (gateway, _):
            address = gateway.http_address
            assert (await ask(address, "GET", "/ready")).json() == {"ready": True}
        with pytest.raises(OSError):
            await ask(address, "GET", "/ready")

    run(life())
