"""Keys at the gateway: who comes in, what they may, and what a changed file changes."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chassis.api_keys import ApiKey, digest_of, make_token
from chassis.api_keys_file import write_keys
from chassis.config import ConfigError
from chassis.errors import Code, Status
from chassis.ids import BootId
from gateway.access.access import Access
from gateway.access.caller import Caller
from gateway.config import Config
from gateway.service import Gateway
from tests.gateway.rig import Reader, Rig, byte_card, call, run, until

TOKEN = make_token("abc", "s" * 43)


def key(token: str = TOKEN, **terms: Any) -> ApiKey:
    return ApiKey(digest_of(token), **({"tenant": "acme"} | terms))


def access_of(**settings: Any) -> Access:
    return Access(Config(**settings), replace(Rig().ports("g"), wall_ns=lambda: 0), BootId("g"))


def refused(do: Callable[[], object]) -> Status:
    with pytest.raises(Status) as status:
        do()
    return status.value


async def refused_later(work: Awaitable[object]) -> Status:
    with pytest.raises(Status) as status:
        await work
    return status.value


def test_without_keys_everybody_is_the_configured_tenant() -> None:
    access = access_of(tenant="t")
    assert access.open and access.who(None) == access.who("anything") == Caller("t")


def test_who_has_a_key_is_its_tenant_and_nobody_learns_why_another_is_refused() -> None:
    keys = {
        "abc": key(),
        "old": key("shoal_old_x", expires="1969-01-01"),
        "off": key("shoal_off_x", disabled=True),
    }
    access = access_of(keys=keys)
    assert access.who(TOKEN) == Caller("acme", "abc")
    words = set()
    for token in (TOKEN + "x", "shoal_old_x", "shoal_off_x", "shoal_new_x", "?"):
        status = refused(lambda token=token: access.who(token))  # type: ignore[misc]
        assert status.code is Code.UNAUTHENTICATED and token not in status.message
        words.add(status.message)
    assert len(words) == 1
    for none in (None, ""):
        assert "Bearer" in refused(lambda none=none: access.who(none)).message  # type: ignore[misc]


def test_a_changed_file_is_taken_and_a_broken_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    with pytest.raises(ConfigError):
        access_of(keys_file=str(path))
    path.write_text("")
    access = access_of(keys_file=str(path))
    assert not access.open, "an empty file lets nobody in"
    refused(lambda: access.who(TOKEN))
    write_keys(path, {"abc": key()})
    asyncio.run(access.look())
    assert access.who(TOKEN).tenant == "acme"
    for harm in (lambda: path.write_text("[keys"), lambda: path.unlink(), lambda: os.mkdir(path)):
        harm()
        asyncio.run(access.look())
        assert access.who(TOKEN).tenant == "acme"
    path.rmdir()
    write_keys(path, {"abc": key(disabled=True)})
    asyncio.run(access.look())
    refused(lambda: access.who(TOKEN))


def test_a_key_may_what_it_says() -> None:
    async def main() -> None:
        rig = Rig()
        await rig.serve_model(byte_card("hidden"))
        keys = {"abc": key(models=("bytes",), priority_best=3, priority_worst=4)}
        async with rig.standing(keys=keys, default_priority=5) as (gateway, batcher):
            await until(lambda: len(gateway.list_models()) == 2)
            who = gateway.authenticate(TOKEN)
            assert [m.name for m in gateway.list_models(who)] == ["bytes"]
            mine = {"tenant": who.tenant, "key": who.key}
            for asked, field in (
                ({"model": "hidden"}, "model"),
                ({"model": "unheard-of"}, "model"),  # nobody learns which there are
                ({"model": "bytes", "priority": 0}, "priority"),
                ({"model": "bytes", "priority": 5}, "priority"),
            ):
                for ask in (first, tokens):
                    status = await refused_later(ask(gateway, **mine, **asked))
                    assert status.code is Code.PERMISSION_DENIED and status.message.startswith(field)
            reader = Reader(gateway.generate(call(model="bytes", **mine)))
            job = await batcher.take(priority=4)
            assert (job.request.tenant, job.request.priority) == ("acme", 4)
            request_id = await reader.accepted()
            for tenant in ("", "t"):
                status = await refused_later(gateway.cancel(request_id, tenant))
                assert status.code is Code.NOT_FOUND
                other = Reader(gateway.resume(request_id, (), tenant))
                assert (await refused_later(other.accepted())).code is Code.NOT_FOUND
            await batcher.end(job)
            await reader.done()
            # ours (jobs) come without a key
            assert len(await gateway.tokenize(call(model="hidden"))) == 2

    run(main())


async def first(gateway: Gateway, **asked: Any) -> object:
    stream = gateway.generate(call(**asked))
    try:
        return await anext(stream)
    finally:
        await stream.aclose()


async def tokens(gateway: Gateway, **asked: Any) -> object:
    return await gateway.tokenize(call(**asked))


def test_a_key_taken_away_ends_at_the_next_call(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "keys.toml"
        write_keys(path, {"abc": key()})
        rig = Rig()
        async with rig.standing(keys_file=str(path)) as (gateway, _):
            who = gateway.authenticate(TOKEN)
            write_keys(path, {})
            await until(lambda: not gateway._access.rights.may_use("abc", "bytes"))
            status = await refused_later(first(gateway, tenant=who.tenant, key=who.key))
            assert status.code is Code.UNAUTHENTICATED

    run(main())


def test_a_gateway_without_its_file_does_not_start() -> None:
    with pytest.raises(ConfigError, match="no-such"):
        Gateway(Config(grpc_address="", keys_file="/no-such/keys.toml"), Rig().ports("g"))
