"""Conversations that come back after their blocks were evicted: restored, not computed, to the same answers.

From kvstore's memory and from its disk, in the pool they came from, in another replica's, in one with other
stages, and not at all where the disk lies.
"""

import asyncio
import os
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from chassis import subjects
from chassis.errors import RpcError
from chassis.grpc_rpc import GrpcRpc
from chassis.messages import kvstore as messages
from chassis.messages.registry import parse_kvstore
from chassis.transport.nixl_agent import Lanes, why_not
from shoal.client import AsyncClient, Delta, Finished, Params
from shoal.launcher import Plan
from tests.e2e.rig import Answer, Running, ask, call, fake_plan, running, until

BLOCK = 16
TALK = [(7 * i) % 251 for i in range(400)]  # 25 blocks
OTHERS = [[(11 * i + k) % 253 for i in range(700)] for k in range(3)]  # more than the pool has
LEASED_AHEAD = 9  # blocks that a batcher has at hand, and no sequence
FOUND = 24 * BLOCK  # of TALK, whose last token is computed anyway


def flags(disk: Path | None) -> dict[str, tuple[str, ...]]:
    tiers: tuple[str, ...] = (
        "--host-bytes",
        str(1 << 24),
        "--restore-min-tokens",
        "32",
        "--restore-wait-ms",
        "2000",
    )
    if disk is not None:
        tiers += ("--disk-bytes", str(1 << 26), "--disk-dir", str(disk))
    return {"kvstore": tiers}


def plan(folder: Path, disk: Path | None, **changes: Any) -> Plan:
    """A pool of 64 blocks."""
    return fake_plan(folder, "--num-blocks", "64", flags=flags(disk), **changes)


async def said(client: AsyncClient, prompt: list[int]) -> int:
    """Asks and checks the answer. Returns how many of the prompt's tokens were not computed."""
    answer = await ask(client, Answer(call(prompt, 6)))
    answer.check()
    assert answer.end is not None
    return answer.end.cached_tokens


async def answer(client: AsyncClient, prompt: list[int]) -> tuple[list[int], int]:
    ids: list[int] = []
    async for event in client.generate(prompt, Params(temperature=0.0, max_tokens=12, ignore_eos=True)):
        match event:
            case Delta(ids=fresh):
                ids.extend(fresh)
            case Finished(cached_tokens=cached):
                return ids, cached
    raise AssertionError("no end")


async def stats(shoal: Running) -> list[messages.Stats]:
    """Of all kvstores that answer."""
    bus, rpc, found = await shoal.bus(), GrpcRpc(), []
    try:
        for entry in await bus.entries(subjects.KVSTORES):
            if entry.value is None:
                continue
            address = parse_kvstore(entry.value).rpc_address
            try:
                reply = await rpc.call(address, messages.STATS, messages.build_stats_question(""), 2.0)
            except RpcError:
                continue  # the entry of one that is gone
            found.append(messages.parse_stats(reply))
    finally:
        await rpc.close()
        await bus.close()
    return found


async def tiers(shoal: Running) -> Counter[str]:
    return sum((Counter(one.tiers) for one in await stats(shoal)), Counter[str]())


async def rested(shoal: Running) -> None:
    """All is saved that is to be, and nobody uses a block: there is room to bring others back."""

    async def idle() -> bool:
        return all(not s.tiers["backlog"] and s.leased <= LEASED_AHEAD for s in await stats(shoal))

    await until(idle, "blocks are released and saved")


async def saved(shoal: Running, num_blocks: int) -> None:
    async def enough() -> bool:
        counts = await tiers(shoal)
        return counts["saved"] >= num_blocks and not counts["backlog"]

    await until(enough, f"{num_blocks} blocks are saved")


async def talk_and_evict(shoal: Running, client: AsyncClient) -> None:
    assert await said(client, TALK) == 0
    await saved(shoal, 25)
    for prompt in OTHERS:
        assert await said(client, prompt) == 0
    await rested(shoal)


async def kvstore_again(shoal: Running, client: AsyncClient) -> None:
    """Dies; who asks for something else finds that out, until another has the pool and has read its disk."""
    await shoal.kill("kvstore")

    async def attached() -> bool:
        await answer(client, [5] * 20)
        found = await stats(shoal)
        return any(s.total for s in found) and all(s.tiers["disk_contents"] >= 25 for s in found)

    await until(attached, "another kvstore has the pool")


NIXL_TCP = pytest.param("nixl+tcp", marks=pytest.mark.skipif(bool(why_not(Lanes.TCP)), reason="no NIXL"))


@pytest.mark.parametrize("kind", ["any", NIXL_TCP])
def test_what_was_evicted_comes_back(runner: asyncio.Runner, tmp_path: Path, kind: str) -> None:
    """From memory; after kvstore's death from disk, into a pool of which it knows nothing."""

    async def life(shoal: Running) -> None:
        async with shoal.client() as client:
            await talk_and_evict(shoal, client)
            assert await said(client, TALK) == FOUND
            assert (await tiers(shoal))["restored"] == 24
            await kvstore_again(shoal, client)
            assert await said(client, TALK) == FOUND
            counts = await tiers(shoal)
            assert counts["restored"] == 24 and not counts["refused"] and not counts["disk_damaged"]

    env = {} if kind == "any" else {"SHOAL_CHASSIS_LINKS": f'{{ kinds = ["{kind}"] }}'}
    with running(runner, plan(tmp_path / "run", tmp_path / "disk", stages=2, env=env)) as shoal:
        shoal.run(life(shoal))


def test_another_pipeline_has_it_from_disk(runner: asyncio.Runner, tmp_path: Path) -> None:
    """Another day, with fewer and with more stages; and where bytes have changed meanwhile it is computed."""

    async def first(shoal: Running) -> None:
        async with shoal.client() as client:
            assert await said(client, TALK) == 0
            await saved(shoal, 25)

    async def second(shoal: Running) -> None:
        async with shoal.client() as client:
            assert await said(client, TALK) == FOUND

    async def third(shoal: Running) -> None:
        async with shoal.client() as client:
            assert await said(client, TALK) < FOUND
            counts = await tiers(shoal)
            assert counts["disk_damaged"] + counts["refused"] > 0

    disk = tmp_path / "disk"
    with running(runner, plan(tmp_path / "one", disk, stages=2)) as shoal:
        shoal.run(first(shoal))
    for stages in (1, 3):
        own = tmp_path / f"disk{stages}"
        shutil.copytree(disk, own)
        with running(runner, plan(tmp_path / f"two{stages}", own, stages=stages)) as shoal:
            shoal.run(second(shoal))
    for path in disk.rglob("*"):
        if path.is_file():
            data = bytearray(path.read_bytes())
            for at in range(200, len(data), 1009):
                data[at] ^= 0x10
            path.write_bytes(data)
    with running(runner, plan(tmp_path / "three", disk, stages=2)) as shoal:
        shoal.run(third(shoal))


def test_what_nobody_holds_outlives_a_move_of_the_layers(runner: asyncio.Runner, tmp_path: Path) -> None:
    """A spare takes the place of a stage that leaves: the pool is another one, the contents are not."""

    async def life(shoal: Running) -> None:
        async with shoal.client() as client:
            assert await said(client, TALK) == 0
            await saved(shoal, 25)
            pids = shoal.deployment.pids()
            stage = next(name for name in pids if "worker" in name and '"stage stands"' in shoal.log(name))
            (before,) = (await stats(shoal))[0].generations
            os.kill(pids[stage], signal.SIGTERM)

            async def moved() -> bool:
                await answer(client, [5] * 20)
                return (await stats(shoal))[0].generations[-1] != before

            await until(moved, "the spare has its place")
            assert await said(client, TALK) == FOUND

    with running(runner, plan(tmp_path / "run", None, stages=2, spares=1)) as shoal:
        shoal.run(life(shoal))


def test_another_replica_has_what_one_computed(runner: asyncio.Runner, tmp_path: Path) -> None:
    async def life(shoal: Running) -> None:
        async with shoal.client() as client:
            await shoal.deployment.retire("batcher-1")
            assert await said(client, TALK) == 0
            await saved(shoal, 25)
            await shoal.deployment.relaunch("batcher-1")
            await shoal.deployment.wait_ready()
            await shoal.deployment.retire("batcher")
            assert await said(client, TALK) == FOUND
            assert (await tiers(shoal))["restored"] == 24

    with running(runner, plan(tmp_path, None, stages=1, spares=1, batchers=2)) as shoal:
        shoal.run(life(shoal))


def test_the_real_model_says_the_same(runner: asyncio.Runner, tmp_path: Path) -> None:
    """SmolLM2 in bfloat16, computed, found in the pool, and restored from memory and from disk."""
    kvstore, worker = flags(tmp_path / "disk")["kvstore"], ("--num-blocks", "48")
    talk = [(37 * i) % 20_000 + 1_000 for i in range(400)]
    other = [(41 * i) % 20_000 + 1_000 for i in range(700)]

    async def life(shoal: Running) -> None:
        async with shoal.client() as client:
            expected, cached = await answer(client, talk)
            assert cached == 0
            assert await answer(client, talk) == (expected, FOUND)
            await saved(shoal, 25)
            await answer(client, other)
            await rested(shoal)
            assert await answer(client, talk) == (expected, FOUND)
            assert (await tiers(shoal))["restored"] > 0
            await kvstore_again(shoal, client)
            assert await answer(client, talk) == (expected, FOUND)
            assert (await tiers(shoal))["restored"] == 24

    made = Plan(
        run_dir=tmp_path / "run",
        dtype="bfloat16",
        stages=2,
        flags={"kvstore": kvstore, "shard_worker": worker},
    )
    with running(runner, made) as shoal:
        shoal.run(life(shoal))
