"""Host memory and disk hold contents within their bounds, and never give what was not put."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from chassis.ids import BlockHash
from chassis.messages.tier import checksums, seed_of
from kvstore.catalog import Origin
from kvstore.changes import Changes
from kvstore.content import Pages
from kvstore.disk_tier import PAUSE_S, DiskTier
from kvstore.host_tier import HostTier
from kvstore.io_thread import InlineIo, IoThread
from kvstore.segment import Damage, build_head, scan
from kvstore.segment_files import Files, FolderFiles
from kvstore.tiers import Tiers
from tests.kvstore.faulty_files import MemoryFiles
from tests.sim.loop import run as on_virtual_clock

SPACE, OTHER = seed_of("fake u64"), seed_of("float32")
ORIGIN = Origin(BlockHash(b"p" * 32), 16)
PAGE = 64


def content(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "little"))


def pages_of(number: int, layers: range = range(4), space: int = SPACE, size: int = PAGE) -> Pages:
    """What these layers hold of a content: every byte says where it belongs."""
    data = b"".join(
        bytes(random.Random(f"{number} {layer} {space}").randrange(256) for _ in range(size))
        for layer in layers
    )
    stamp = b"stamp%d" % number
    return Pages(space, layers, checksums(space, content(number), layers, data), stamp, data)


def same(one: Pages | None, other: Pages) -> bool:
    return one is not None and (one.layers, one.sums, one.data, one.stamp) == (
        other.layers,
        other.sums,
        other.data,
        other.stamp,
    )


# ---- host memory


def test_any_split_of_the_layers_reads_what_another_saved() -> None:
    host = HostTier(1 << 20, Changes())
    host.put(content(1), ORIGIN, pages_of(1, range(0, 3)), 0.0)
    assert not host.has(content(1), SPACE, range(0, 4))
    host.put(content(1), ORIGIN, pages_of(1, range(3, 4)), 0.0)
    for layers in (range(0, 4), range(0, 1), range(1, 4), range(2, 4), range(3, 4)):
        found = host.get(content(1), SPACE, layers)
        assert same(found, pages_of(1, layers)) and found is not None and found.proves(content(1))
    assert host.get(content(1), SPACE, range(0, 5)) is None
    assert host.get(content(1), OTHER, range(0, 4)) is None, "another layout"
    assert host.get(content(2), SPACE, range(0, 4)) is None
    host.check()


def test_a_piece_that_says_more_takes_the_place_of_those_that_say_less() -> None:
    host = HostTier(1 << 20, Changes())
    for layers in (range(0, 2), range(2, 4), range(0, 4), range(0, 4)):
        host.put(content(1), ORIGIN, pages_of(1, layers), 0.0)
    host.put(content(1), ORIGIN, pages_of(1, range(0, 4), OTHER), 0.0)
    assert host.catalog.num_bytes == 2 * 4 * PAGE
    host.check()


def test_pieces_with_pages_of_different_sizes_are_not_put_together() -> None:
    host = HostTier(1 << 20, Changes())
    host.put(content(1), ORIGIN, pages_of(1, range(0, 2)), 0.0)
    host.put(content(1), ORIGIN, pages_of(1, range(2, 4), size=32), 0.0)
    assert host.has(content(1), SPACE, range(4)) and host.get(content(1), SPACE, range(4)) is None


def test_pieces_of_which_stages_said_different_things_are_not_put_together() -> None:
    """One of them was told of a block that held something else."""
    tiers = Tiers(HostTier(1 << 20, Changes()), None)
    lower, upper = pages_of(1, range(0, 2)), pages_of(1, range(2, 4))
    tiers.put(content(1), ORIGIN, [lower, replace(upper, stamp=b"of another block")], 0.0)
    assert asyncio.run(tiers.get(content(1), SPACE, range(2))) is lower
    assert asyncio.run(tiers.get(content(1), SPACE, range(4))) is None
    assert not tiers.has(content(1), SPACE, range(2)) and tiers.tally.refused == 1
    tiers.put(content(1), ORIGIN, [replace(lower, stamp=b""), upper], 0.0)
    found = asyncio.run(tiers.get(content(1), SPACE, range(4)))
    assert found is not None and found.stamp == b"", "nobody vouches for all of it"
    tiers.check()


def test_memory_is_bounded_and_the_longest_unused_goes() -> None:
    host = HostTier(4 * PAGE * 3, Changes())
    for number in (1, 2, 3):
        host.put(content(number), ORIGIN, pages_of(number), float(number))
    host.used((content(1),), 4.0)
    host.put(content(4), ORIGIN, pages_of(4), 5.0)
    assert [n for n in (1, 2, 3, 4) if host.has(content(n), SPACE, range(4))] == [1, 3, 4]
    assert host.evictions == 1
    host.put(content(5), ORIGIN, pages_of(5, range(16)), 6.0)
    assert not host.has(content(5), SPACE, range(16)), "it would push out all and not fit"
    host.forget(content(3))
    host.check()
    assert len(host.catalog) == 2


def test_who_reads_piece_by_piece_misses_nothing_that_stays() -> None:
    host = HostTier(1 << 20, Changes())
    for number in range(10):
        host.put(content(number), ORIGIN, pages_of(number), 0.0)
    seen, place = {}, 0
    step: int | None = 0
    while step is not None:
        held, step = host.catalog.piece(place, 3, 2.0)
        seen.update({h.content: h for h in held})
        host.forget(content(place))
        host.used((content(9 - place),), 1.0)
        host.put(content(100 + place), ORIGIN, pages_of(100), 1.0)
        place = step or 0
    assert {content(n) for n in range(10)} - seen.keys() <= {content(0), content(3), content(6), content(9)}
    assert seen[content(1)].parent == ORIGIN.parent and seen[content(1)].unused_ms == 2000


# ---- segments


def segment_of(*numbers: int) -> tuple[bytes, list[int]]:
    """And where each record begins."""
    data, starts = b"", []
    for number in numbers:
        starts.append(len(data))
        pages = pages_of(number)
        data += build_head(content(number), ORIGIN, pages) + pages.data
    return data, starts


def found_in(data: bytes) -> tuple[list[BlockHash], Damage]:
    damage = Damage()
    return [head.content for _, head in scan(memoryview(data), damage)], damage


def test_a_torn_tail_is_skipped_wherever_it_was_torn() -> None:
    data, starts = segment_of(1, 2)
    for length in range(starts[1], len(data)):
        found, damage = found_in(data[:length])
        assert found == [content(1)] and damage.torn + damage.broken == (length > starts[1])


@pytest.mark.parametrize("seed", range(60))
def test_after_a_broken_head_the_next_record_is_found(seed: int) -> None:
    rng = random.Random(seed)
    data, starts = segment_of(1, 2, 3)
    head_len = len(data) // 3 - 4 * PAGE
    bit = 8 * starts[1] + rng.randrange(8 * head_len)
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    found, damage = found_in(bytes(flipped))
    assert found == [content(1), content(3)] and damage.broken == 1


def test_pages_that_look_like_a_head_begin_no_record() -> None:
    inner, _ = segment_of(7)
    data = inner[: 4 * (len(inner) // 4)]
    layers = range(4)
    pages = Pages(SPACE, layers, checksums(SPACE, content(1), layers, data), b"", data)
    record = build_head(content(1), ORIGIN, pages) + data
    assert found_in(record)[0] == [content(1)]


# ---- disk


def on_disk(case: Callable[[DiskTier], Awaitable[None]], files: Files, bytes_max: int = 1 << 20) -> DiskTier:
    async def main() -> DiskTier:
        disk = DiskTier(files, bytes_max, InlineIo(), Changes())
        running = asyncio.create_task(disk.run(0.0))
        await asyncio.sleep(0.1)
        try:
            await case(disk)
            disk.check()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await disk.close()
        return disk

    return on_virtual_clock(main())


async def put(disk: DiskTier, *numbers: int) -> None:
    for number in numbers:
        disk.put(content(number), ORIGIN, pages_of(number))
    await asyncio.sleep(0.1)


async def present(disk: DiskTier, *numbers: int) -> list[int]:
    """Whose pages come back, and are what they were."""
    found = []
    for number in numbers:
        pages = await disk.get(content(number), SPACE, range(4))
        assert pages is None or same(pages, pages_of(number)), "a lie"
        if pages is not None:
            found.append(number)
    return found


def test_what_is_written_is_there_after_a_restart() -> None:
    files = MemoryFiles()

    async def first(disk: DiskTier) -> None:
        await put(disk, 1, 2, 3)
        assert await present(disk, 1, 2, 3, 4) == [1, 2, 3]
        assert same(await disk.get(content(2), SPACE, range(1, 3)), pages_of(2, range(1, 3)))

    async def second(disk: DiskTier) -> None:
        assert await present(disk, 1, 2, 3) == [1, 2, 3]
        await put(disk, 4)
        assert await present(disk, 1, 4) == [1, 4]

    on_disk(first, files)
    on_disk(second, files)


def test_the_oldest_segment_goes_as_a_whole_and_the_bound_holds() -> None:
    files = MemoryFiles()
    bytes_max = 3 << 16

    async def case(disk: DiskTier) -> None:
        for number in range(1200):
            await put(disk, number)
            assert sum(map(len, files.files.values())) <= bytes_max
        left = await present(disk, *range(1200))
        assert left == list(range(left[0], 1200)) and len(left) > 250
        assert disk.evictions == 1200 - len(left)

    on_disk(case, files, bytes_max)


@pytest.mark.parametrize("seed", range(40))
def test_flipped_bits_and_torn_files_never_become_an_answer(seed: int) -> None:
    files, rng = MemoryFiles(), random.Random(seed)

    async def write(disk: DiskTier) -> None:
        await put(disk, *range(30))
        for _ in range(3):
            number = rng.choice(list(files.files))
            files.flip(number, rng.randrange(8 * len(files.files[number])))
        left = await present(disk, *range(30))
        assert 27 <= len(left) < 30
        assert disk.segments.damage.wrong + disk.segments.damage.broken >= 1
        assert await present(disk, *range(30)) == left, "what was found out is forgotten"

    async def read(disk: DiskTier) -> None:
        left = await present(disk, *range(30))
        await put(disk, *range(30))
        assert await present(disk, *range(30)) == list(range(30)), "damaged ones can be written anew"
        assert len(left) >= 20

    on_disk(write, files)
    number = rng.choice(list(files.files))
    files.tear(number, len(files.files[number]) - rng.randrange(1, 2000))
    on_disk(read, files)
    on_disk(read, files)


def test_a_full_disk_gives_up_the_oldest_and_goes_on() -> None:
    files = MemoryFiles()

    async def case(disk: DiskTier) -> None:
        await put(disk, *range(400))
        files.room = sum(map(len, files.files.values())) + 100
        await put(disk, *range(400, 420))
        assert await present(disk, *range(400, 420)) == list(range(400, 420))
        assert disk.failures == 1 and await present(disk, 0) == []

    on_disk(case, files)


def test_a_disk_that_fails_is_left_alone_for_a_while_and_then_used_again() -> None:
    files = MemoryFiles()

    async def case(disk: DiskTier) -> None:
        await put(disk, 1)
        files.fails = 10**9
        await put(disk, 2, 3)
        assert disk.failures == 1 and disk.left_out == 2
        await put(disk, 4)
        files.fails = 0
        assert await present(disk, 1) == [1]
        await asyncio.sleep(PAUSE_S)
        await put(disk, 5)
        assert await present(disk, 1, 2, 4, 5) == [1, 4, 5]
        files.fails = 1
        assert await present(disk, 1, 5) == [5], "what can't be read is forgotten"

    on_disk(case, files)


def test_a_folder_of_the_real_thing(tmp_path: Path) -> None:
    async def main() -> None:
        for numbers, expected in (((1, 2), [1, 2]), ((3,), [1, 2, 3])):
            disk = DiskTier(FolderFiles(tmp_path / "kv"), 1 << 20, IoThread(), Changes())
            running = asyncio.create_task(disk.run(0.0))
            for number in numbers:
                disk.put(content(number), ORIGIN, pages_of(number))
            for _ in range(1000):
                if disk.idle and len(disk.catalog) == len(expected):
                    break
                await asyncio.sleep(0.01)
            assert await present(disk, 1, 2, 3) == expected
            rival = FolderFiles(tmp_path / "kv")
            with pytest.raises(OSError):
                rival.open()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await disk.close()

    asyncio.run(main())
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    assert len(list((tmp_path / "kv").glob("*.segment"))) == 1
