"""Requests behind one that is being answered, on the same connection, and who leaves amid them."""

import asyncio
import json

import pytest

from gateway.openai.answer import CHAT
from tests.gateway.http_client import head
from tests.gateway.openai.test_http import messages, standing
from tests.gateway.rig import run, until


def test_who_leaves_with_another_request_behind_is_not_answered_any_more() -> None:
    async def life() -> None:
        async with standing() as (gateway, batcher, address):
            body = json.dumps({"messages": messages(), "stream": True}).encode()
            asked = head("POST", CHAT, {"content-type": "application/json"}, body)
            host, port = address.split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(asked)
            job = await batcher.take(5)
            writer.write(asked)  # waits for the first one's end
            batcher.send(job, *b"a")
            await reader.readuntil(b'"a"')
            writer.close()
            await until(lambda: not gateway._streams.clients)

    run(life())


@pytest.mark.parametrize("behind", [b"\x00garbage\r\n\r\n", b"GET /health HTTP/1.1\r\n\r\n" * 20])
def test_what_comes_behind_a_request_is_no_part_of_its_answer(behind: bytes) -> None:
    async def life() -> None:
        async with standing() as (gateway, batcher, address):
            body = json.dumps({"messages": messages(), "stream": True}).encode()
            host, port = address.split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(head("POST", CHAT, {"content-type": "application/json"}, body))
            batcher.send(await batcher.take(5), *b"a")
            told = await reader.readuntil(b'"a"')
            writer.write(behind)
            told += await reader.read()
            assert told.count(b"HTTP/1.1 ") == 1
            writer.close()
            await until(lambda: not gateway._streams.clients)

    run(life())
