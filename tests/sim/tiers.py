"""kvstores with tiers: disks that outlive them, and what goes wrong with both."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

from kvstore.config import Config
from kvstore.io_thread import InlineIo, Io
from kvstore.segment_files import Files
from tests.kvstore.faulty_files import MemoryFiles
from tests.sim.world import Node, World


def with_tiers(world: World, config: Config, name: str) -> tuple[Config, tuple[Files, Io] | None]:
    """A kvstore's configuration, and the disk that it finds again."""
    tiers = world.options.tiers
    if tiers is None:
        return config, None
    config = replace(
        config,
        host_bytes=tiers.host_bytes,
        disk_bytes=tiers.disk_bytes,
        disk_dir="memory" if tiers.disk_bytes else "",
        restore_wait_ms=tiers.restore_wait_ms,
        restore_min_tokens=tiers.restore_min_tokens,
        tier_call_timeout_ms=500,
    )
    files = world.disks.setdefault(name, MemoryFiles())
    rng = random.Random(f"disk of {name} {world.options.seed}")
    return config, (files, InlineIo(lambda: rng.random() * tiers.io_delay_s))


async def run_tier_faults(world: World) -> None:
    """One after another at random times, while the others go on."""
    tiers = world.options.tiers
    if tiers is None or not tiers.faults:
        return
    rng = random.Random(f"tier faults {world.options.seed}")
    for _ in range(tiers.faults):
        await asyncio.sleep(rng.uniform(0.0, 2 * world.options.fault_time_s / tiers.faults))
        rng.choice(_FAULTS)(world, rng)
    await asyncio.sleep(0.1)
    for disk in world.disks.values():
        disk.room, disk.fails = None, 0


def restored(world: World) -> int:
    """Blocks that came back, at the kvstores that are left."""
    return sum(node.service.tiers.tiers.tally.restored for node in _kvstores(world))


def _kvstores(world: World) -> list[Node]:
    return [n for name, n in world.nodes.items() if name.startswith("kvstore") and n.service is not None]


def _cut(world: World, rng: random.Random) -> None:
    """Links between a kvstore and a worker are lost, amid calls or not."""
    workers = [name for name in world.nodes if name.startswith("worker")]
    kvstores = [name for name in world.nodes if name.startswith("kvstore")]
    one, other = rng.choice(kvstores), rng.choice(workers)
    world.note(f"tier links {one}-{other} lost")
    world.ring.cut(one, other)


def _part(world: World, rng: random.Random) -> None:
    """A worker hears a kvstore late, or no more: its calls come when nobody waits for them."""
    workers = [name for name in world.nodes if name.startswith("worker")]
    kvstores = [name for name in world.nodes if name.startswith("kvstore")]
    one, other = rng.choice(kvstores), rng.choice(workers)
    seconds = rng.choice((0.1, 0.4, 1.0))
    world.note(f"tier partition {one}-{other} for {seconds} s")
    world.ring.partition(one, other)
    asyncio.get_running_loop().call_later(seconds, world.ring.heal, one, other)


def _disk(world: World, rng: random.Random) -> MemoryFiles:
    return world.disks[rng.choice(sorted(world.disks))]


def _flip(world: World, rng: random.Random) -> None:
    disk = _disk(world, rng)
    number = rng.choice(sorted(disk.files)) if disk.files else None
    if number is not None and disk.files[number]:
        world.note("a bit of a disk flips")
        disk.flip(number, rng.randrange(8 * len(disk.files[number])))


def _tear(world: World, rng: random.Random) -> None:
    disk = _disk(world, rng)
    if disk.files:
        number = max(disk.files)
        world.note("the end of a segment is lost")
        disk.tear(number, rng.randrange(len(disk.files[number]) + 1))


def _full(world: World, rng: random.Random) -> None:
    disk = _disk(world, rng)
    world.note("a disk is full")
    disk.room = sum(map(len, disk.files.values()))


def _fail(world: World, rng: random.Random) -> None:
    world.note("a disk fails")
    _disk(world, rng).fails = rng.choice((1, 3, 100))


def _flip_memory(world: World, rng: random.Random) -> None:
    """A bit of kvstore's own memory."""
    for node in _kvstores(world):
        catalog = node.service.tiers.tiers.host.catalog
        for content in catalog:
            entry = catalog._held[content]
            pages = entry.pieces[0]
            data = bytearray(pages.data)
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            world.note(f"a bit of {node.name}'s memory flips")
            entry.pieces[0] = replace(pages, data=bytes(data))
            return


_FAULTS: tuple[Callable[[World, random.Random], None], ...] = (
    _cut,
    _cut,
    _part,
    _part,
    _flip,
    _tear,
    _full,
    _fail,
    _flip_memory,
)
