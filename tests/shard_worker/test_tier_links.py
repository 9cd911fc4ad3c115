"""A plain kvstore over real links: contents leave a stage and come back, and nobody writes who may not."""

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from chassis.errors import LinkClosed
from chassis.ids import BlockHash, BlockId, BootId, Epoch
from chassis.messages import pipeline as p
from chassis.messages.registry import WorkerEntry
from chassis.messages.sampling import Sampling
from chassis.messages.tier import (
    OLD_ATTACHMENT,
    OLD_EPOCH,
    LoadBlocks,
    SaveBlocks,
    TierContent,
    TierDone,
    TierMessage,
    TierStage,
    build_tier,
    checksums,
    parse_tier,
    seed_of,
)
from chassis.sequence_digest import carried_on
from chassis.transport.interface import Link, LinkOptions
from shard_worker import fake_model as fm
from tests.shard_worker.test_service import BLOCK, LAYERS, Batcher, World, run

PROMPT = list(range(10, 31))  # five blocks and a token
WHOLE = len(PROMPT) // BLOCK
OPTIONS = LinkOptions(slots=4, slot_bytes=1 << 22)
HASHES = tuple(BlockHash(bytes([i + 1]) * 32) for i in range(64))


@dataclass
class Kept:
    """A block's content on one stage."""

    message: TierContent
    payload: bytes


class Tier:
    """One stage's link."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.calls = 0

    @classmethod
    async def dial(cls, world: World, entry: WorkerEntry, epoch: int, boot: str = "kv") -> "Tier":
        hello = p.Hello(Epoch(epoch), p.BATCHER_STAGE, BootId(boot), p.LinkKind.TIER)
        transport = world.ports(f"{boot} {world.new_id()}").transport
        return cls(await transport.dial(entry.transport_address, p.build_hello(hello), OPTIONS))

    async def hear(self) -> tuple[TierMessage, bytes]:
        async with asyncio.timeout(5):
            frame = await self.link.receive()
        message, payload = parse_tier(frame.header), bytes(frame.payload)
        frame.release()
        return message, payload

    async def stage(self) -> TierStage:
        message, _ = await self.hear()
        assert isinstance(message, TierStage)
        return message

    async def done(self) -> TierDone:
        message, _ = await self.hear()
        assert isinstance(message, TierDone), message
        return message

    async def call(
        self, kind: type[SaveBlocks | LoadBlocks], blocks: list[int], epoch: int = 1, attachment: int = 1
    ) -> int:
        self.calls += 1
        ids = tuple(map(BlockId, blocks))
        message = kind(Epoch(epoch), attachment, self.calls, ids, HASHES[: len(blocks)])
        await self.link.send(build_tier(message))
        return self.calls

    async def save(self, blocks: list[int], **named: int) -> tuple[list[Kept], TierDone]:
        number = await self.call(SaveBlocks, blocks, **named)
        kept: list[Kept] = []
        while True:
            message, payload = await self.hear()
            if isinstance(message, TierDone):
                assert message.call == number
                return kept, message
            assert isinstance(message, TierContent) and message.call == number
            kept.append(Kept(message, payload))

    async def load(self, blocks: list[int], kept: list[Kept], **named: int) -> TierDone:
        number = await self.call(LoadBlocks, blocks, **named)
        for one in kept:
            await self.link.send(build_tier(replace(one.message, call=number)), one.payload)
        return await self.done()


async def pipeline(
    world: World, num_stages: int, prefix: str = "w", epoch: int = 1
) -> tuple[Batcher, list[WorkerEntry]]:
    entries = [await world.registered(world.start(f"{prefix}{i}")) for i in range(num_stages)]
    batcher = await Batcher(world, boot=prefix, node=f"batcher-{prefix}").form(epoch, entries)
    await batcher.stand()
    return batcher, entries


async def prefill(batcher: Batcher, table: list[int], start: int = 0, **columns: object) -> tuple[int, ...]:
    """PROMPT from there on in one step; what it samples. The ids before are vouched for."""
    await batcher.send(
        slots=[0], num_tokens=[len(PROMPT) - start], starts=[start], flags=[3], output_index=[0],
        token_ids=PROMPT[start:], table_lens=[len(table)], table=table,
        fresh=[p.SlotStart(Sampling(0.0, 0, 1.0), 0)], digests=[carried_on(0, PROMPT[:start])], **columns,
    )  # fmt: skip
    result = await batcher.receive()
    return () if result.void_rows else result.token_ids


ANSWER = tuple(fm.oracle(PROMPT, 0, 0.0, 1, LAYERS))
TABLE, OTHER = [9, 3, 22, 14, 5, 30], [40, 41, 7, 50, 33, 60]
Body = Callable[[World], Awaitable[None]]
everywhere = pytest.mark.parametrize("sockets", [False, True])


@everywhere
@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 2), (3, 2)])
def test_another_pipeline_goes_on_from_what_one_computed(sockets: bool, before: int, after: int) -> None:
    async def body(world: World) -> None:
        first, entries = await pipeline(world, before, "w")
        assert await prefill(first, TABLE) == ANSWER
        by_layer: dict[tuple[int, int], Kept] = {}
        for entry in entries:
            tier = await Tier.dial(world, entry, 1)
            stage = await tier.stage()
            assert stage.layout == "words.4" and stage.page_bytes == 32
            kept, done = await tier.save(TABLE[:WHOLE])
            assert (done.error, done.refused) == ("", ())
            assert len(kept) == WHOLE
            for one in kept:
                content, payload = HASHES[one.message.index], one.payload
                sums = checksums(seed_of(stage.layout), content, one.message.layers, payload)
                assert sums == one.message.checksums and one.message.layers == stage.layers
                for i, layer in enumerate(stage.layers):
                    page = Kept(
                        replace(one.message, first_layer=layer, checksums=sums[i : i + 1]),
                        payload[32 * i : 32 * i + 32],
                    )
                    by_layer[one.message.index, layer] = page
        second, entries = await pipeline(world, after, "v", 2)
        for entry in entries:
            tier = await Tier.dial(world, entry, 2)
            stage = await tier.stage()
            pages = [by_layer[i, layer] for layer in stage.layers for i in range(WHOLE)]
            assert await tier.load(OTHER[:WHOLE], pages, epoch=2) == TierDone(tier.calls)
        assert await prefill(second, OTHER, WHOLE * BLOCK) == ANSWER

    run(body, sockets)


@everywhere
def test_a_page_that_is_not_what_it_has_to_be_is_not_written(sockets: bool) -> None:
    async def body(world: World) -> None:
        batcher, (entry,) = await pipeline(world, 1)
        await prefill(batcher, TABLE)
        tier = await Tier.dial(world, entry, 1)
        await tier.stage()
        kept, _ = await tier.save(TABLE[:WHOLE])
        before, _ = await tier.save([40, 41])
        assert not before, "nobody knows what they hold"
        flipped = bytearray(kept[1].payload)
        flipped[77] ^= 4
        wrong = [
            Kept(kept[1].message, bytes(flipped)),
            Kept(replace(kept[0].message, index=1), kept[0].payload),  # another block's
            Kept(replace(kept[1].message, stamp=b""), kept[1].payload),  # that nobody vouches for
        ]
        for bad in wrong:
            assert (await tier.load([50, 51], [kept[0], bad])).refused == (1,)
        assert (await tier.save([51, 50]))[1].refused == (0,)
        held, other = TABLE[1], kept[0]
        sums = checksums(seed_of("words.4"), HASHES[1], other.message.layers, other.payload)
        unproven = Kept(replace(other.message, index=1, checksums=sums, stamp=b""), other.payload)
        assert (await tier.load([50, held], [other, unproven])).refused == (1,)
        assert (await tier.save([held]))[1].refused == (0,), "it holds what nobody vouches for"
        assert await prefill(batcher, [50, 51, *TABLE[2:]], WHOLE * BLOCK) == (), "its rows find it out too"

    run(body, sockets)


@everywhere
def test_an_older_attachment_may_touch_nothing(sockets: bool) -> None:
    """A step's attachment ends the right of older ones, on links that stand and in calls under way."""

    async def body(world: World) -> None:
        batcher, (entry,) = await pipeline(world, 1)
        await prefill(batcher, TABLE, attachment=1)
        old = await Tier.dial(world, entry, 1, "old")
        await old.stage()
        kept, _ = await old.save(TABLE[:WHOLE])
        number = await old.call(LoadBlocks, OTHER[:WHOLE])
        assert await prefill(batcher, OTHER, attachment=2) == ANSWER
        swapped = [*kept[1:], kept[0]]
        for index, one in enumerate(swapped):
            await old.link.send(build_tier(replace(one.message, call=number, index=index)), one.payload)
        assert await old.done() == TierDone(number, OLD_ATTACHMENT)
        assert (await old.save(TABLE[:1]))[1].error == OLD_ATTACHMENT
        new = await Tier.dial(world, entry, 1, "new")
        await new.stage()
        again, done = await new.save(OTHER[:WHOLE], attachment=2)
        assert not done.error and [k.payload for k in again] == [k.payload for k in kept], (
            "as the step wrote it"
        )
        assert await prefill(batcher, OTHER, WHOLE * BLOCK) == ANSWER
        assert (await new.save(OTHER[:1], attachment=5))[1].error == ""
        assert (await new.save(OTHER[:1], attachment=4))[1].error == OLD_ATTACHMENT, "a call says it too"

    run(body, sockets)


@everywhere
def test_a_newer_link_of_the_same_kvstore_ends_the_older(sockets: bool) -> None:
    async def body(world: World) -> None:
        batcher, (entry,) = await pipeline(world, 1)
        await prefill(batcher, TABLE)
        first = await Tier.dial(world, entry, 1)
        await first.stage()
        second = await Tier.dial(world, entry, 1)
        await second.stage()
        other = await Tier.dial(world, entry, 1, "other")
        await other.stage()
        with pytest.raises(LinkClosed):
            await first.done()
        for tier in (second, other):
            assert len((await tier.save(TABLE[:WHOLE]))[0]) == WHOLE

    run(body, sockets)


@everywhere
def test_links_end_with_their_epoch(sockets: bool) -> None:
    async def body(world: World) -> None:
        batcher, entries = await pipeline(world, 1)
        await prefill(batcher, TABLE)
        with pytest.raises(LinkClosed):
            await (await Tier.dial(world, entries[0], 2)).stage()
        tier = await Tier.dial(world, entries[0], 1)
        await tier.stage()
        assert (await tier.save(TABLE[:1], epoch=2))[1].error == OLD_EPOCH
        await batcher.form(7, entries)
        await batcher.stand()
        with pytest.raises(LinkClosed):
            await tier.done()
        with pytest.raises(LinkClosed):
            await (await Tier.dial(world, entries[0], 1)).stage()
        tier = await Tier.dial(world, entries[0], 7)
        await tier.stage()
        assert len((await tier.save(TABLE[:WHOLE], epoch=7))[0]) == WHOLE, "the memory stayed"

    run(body, sockets)


@everywhere
def test_whoever_speaks_nonsense_loses_its_link_alone(sockets: bool) -> None:
    async def body(world: World) -> None:
        batcher, (entry,) = await pipeline(world, 1)
        for header in (b"\xff", build_tier(TierDone(1)), build_tier(TierContent(1, 0, 0, (1,)))):
            tier = await Tier.dial(world, entry, 1)
            await tier.stage()
            await tier.link.send(header, bytes(32))
            with pytest.raises(LinkClosed):
                await tier.done()
        assert await prefill(batcher, TABLE) == ANSWER

    run(body, sockets)


class Held:
    """`Compute`: what was begun runs when it is let go."""

    def __init__(self) -> None:
        self.works: list[tuple[Callable[[], Any], asyncio.Future[Any]]] = []

    def begin(self, work: Callable[[], Any]) -> Awaitable[Any]:
        future = asyncio.get_running_loop().create_future()
        self.works.append((work, future))
        return future

    def ahead(self, work: Callable[[], Any]) -> Awaitable[Any]:
        raise AssertionError("no step is computed here")

    async def call(self, work: Callable[[], Any]) -> Any:
        return work()

    async def close(self) -> None:
        pass

    def let_go(self) -> None:
        for work, future in self.works:
            found = work()
            if not future.done():
                future.set_result(found)


@everywhere
def test_the_next_batcher_is_told_as_of_which_attach_the_memory_is(sockets: bool) -> None:
    """By steps and by calls of kvstores; of the epoch before alone."""

    async def body(world: World) -> None:
        batcher, (entry,) = await pipeline(world, 1)
        assert batcher.replies[0].prior_attachment == 0
        await prefill(batcher, TABLE, attachment=4)
        await prefill(batcher, TABLE, attachment=2)
        for epoch, heard in ((2, 4), (3, 0)):
            await batcher.form(epoch, [entry])
            await batcher.stand()
            assert (batcher.replies[0].prior_epoch, batcher.replies[0].prior_attachment) == (epoch - 1, heard)
        tier = await Tier.dial(world, entry, 3)
        await tier.stage()
        await tier.save(TABLE[:1], epoch=3, attachment=9)
        await batcher.form(4, [entry])
        await batcher.stand()
        assert batcher.replies[0].prior_attachment == 9

    run(body, sockets)


@pytest.mark.parametrize("what", ["a newer link", "a step", "another epoch", "a lost link", "nothing"])
def test_what_was_under_way_is_not_written_once_its_right_has_ended(what: str) -> None:
    async def body(world: World) -> None:
        batcher, (entry,) = await pipeline(world, 1)
        await prefill(batcher, TABLE, attachment=1)
        tier = await Tier.dial(world, entry, 1)
        await tier.stage()
        kept, _ = await tier.save(TABLE[:WHOLE])
        worker = world.workers["w0"]
        held = worker._tiers._copies = Held()
        pages = worker._executor.pages
        assert pages is not None
        before = np.zeros((WHOLE, LAYERS, 32), np.uint8)
        pages.read(OTHER[:WHOLE], before)
        number = await tier.call(LoadBlocks, OTHER[:WHOLE])
        for one in kept[:4]:  # as many as the link has slots
            await tier.link.send(build_tier(replace(one.message, call=number)), one.payload)
        async with asyncio.timeout(5):
            while len(held.works) < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        match what:
            case "a newer link":
                await (await Tier.dial(world, entry, 1)).stage()
            case "a step":
                assert await prefill(batcher, TABLE, attachment=2) == ANSWER
            case "another epoch":
                await batcher.form(2, [entry])
                await batcher.stand()
            case "a lost link":
                tier.link.close()
                await asyncio.sleep(1)
        held.let_go()
        after = np.zeros_like(before)
        pages.read(OTHER[:WHOLE], after)
        assert np.array_equal(before, after) == (what != "nothing")

    run(body)


def test_steps_go_on_while_blocks_are_saved() -> None:
    async def body(world: World) -> None:
        batcher, (entry,) = await pipeline(world, 1)
        await prefill(batcher, TABLE)
        tier = await Tier.dial(world, entry, 1)
        await tier.stage()
        calls = [await tier.call(SaveBlocks, TABLE[:WHOLE]) for _ in range(8)]
        outputs = await batcher.generate([[1, 2, 3], [4] * 9], 6, 0, 0.0)
        assert outputs == [fm.oracle(ids, 0, 0.0, 6, LAYERS) for ids in ([1, 2, 3], [4] * 9)]
        ended: list[int] = []
        while len(ended) < len(calls):
            message, _ = await tier.hear()
            if isinstance(message, TierDone):
                ended.append(message.call)
        assert ended == calls

    run(body)


def test_a_link_that_is_gone_leaves_nothing_behind() -> None:
    """Each epoch that ends closes some, and a service practically never looks for what refers to itself."""

    async def body(world: World) -> None:
        worker = world.start("w0")
        entry = await world.registered(worker)
        batcher = await Batcher(world).form(1, [entry])
        await batcher.stand()
        gc.collect()
        gc.disable()
        try:
            for boot in ("kv", "other"):
                tier = await Tier.dial(world, entry, 1, boot)
                await tier.stage()
                (served,) = map(weakref.ref, worker._tiers._links)
                tier.link.close()
                await asyncio.sleep(1)
                assert not worker._tiers._links and served() is None
        finally:
            gc.enable()
        batcher.close()

    run(body)
