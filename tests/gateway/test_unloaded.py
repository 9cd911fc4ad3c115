"""Models that were unloaded: all gateways refuse them, until one is told to load."""

import asyncio

import pytest

from chassis import subjects
from chassis.api_keys import ApiKey
from chassis.errors import Code, Status
from gateway.access.caller import Caller
from gateway.unloaded import Unloaded
from tests.gateway.rig import Reader, Rig, call, run, until


def test_all_gateways_refuse_and_serve_again() -> None:
    async def main() -> None:
        rig = Rig()
        async with rig.standing() as (one, batcher), rig.gateway("gw2") as two:
            await until(lambda: two.ready)
            running = Reader(one.generate(call()))
            job = await batcher.take()
            await one._control.unload("bytes", Caller("t"))
            await until(lambda: not two.ready and not one.ready)
            for gateway in (one, two):
                assert gateway.list_models() == []
                assert [present.loaded for present in gateway._control.models(Caller("t"))] == [False]
                with pytest.raises(Status) as refused:
                    await Reader(gateway.generate(call())).done()
                assert refused.value.code is Code.UNAVAILABLE and "unloaded" in refused.value.message
            batcher.send(job, *b"on")
            await batcher.end(job)
            await running.done()
            assert running.text == "on"
            await two._control.load("bytes", Caller("t"))
            await until(lambda: one.ready and two.ready)
            with pytest.raises(Status) as unknown:
                await one._control.unload("nonsense", Caller("t"))
            assert unknown.value.code is Code.NOT_FOUND

    run(main())


def test_with_keys_only_operators_may() -> None:
    async def main() -> None:
        rig = Rig()
        keys = {name: ApiKey(sha256="0" * 64) for name in ("k", "op")}
        async with rig.standing(keys=keys, operators=("op",)) as (gateway, _):
            with pytest.raises(Status) as refused:
                await gateway._control.unload("bytes", Caller("t", "k"))
            assert refused.value.code is Code.PERMISSION_DENIED
            assert gateway.ready
            await gateway._control.unload("bytes", Caller("t", "op"))
            assert not gateway.ready

    run(main())


def test_who_missed_a_load_does_not_undo_it() -> None:
    """Its view is old when it writes the entry again."""

    async def main() -> None:
        rig = Rig()
        late, other = Unloaded(rig.bus("late")), Unloaded(rig.bus("other"))
        await other.add("m")
        assert "m" in other and "m" not in late
        await late.refresh()
        assert "m" in late
        await other.refresh()
        entry = await rig.bus("any").entry(subjects.unloaded_key("m"))
        assert entry is not None and entry.value is not None
        late._revisions[entry.key] = entry.revision - 1
        await other.remove("m")
        await late.refresh()
        assert "m" not in late
        gone = await rig.bus("any").entry(subjects.unloaded_key("m"))
        assert gone is None or gone.value is None

    run(main())


def test_it_lives_as_long_as_a_gateway_refreshes_it() -> None:
    async def main() -> None:
        rig = Rig()
        unloaded = Unloaded(rig.bus("one"))
        async with asyncio.timeout(5):
            subscription = await unloaded.watch()
        await unloaded.add("m")
        first = await rig.bus("any").entry(subjects.unloaded_key("m"))
        await unloaded.refresh()
        again = await rig.bus("any").entry(subjects.unloaded_key("m"))
        assert first is not None and again is not None and again.revision > first.revision
        await subscription.close()

    run(main())
