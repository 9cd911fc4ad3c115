"""Processes that join and leave for good while clients ask, in some seeds; where pools must lie afterwards.

One leaves by draining, and only while others of its kind are there. When the faults are over whoever was
there at first is there again, so that there is a pipeline; who joined may stay.
"""

import asyncio
import random
from collections.abc import Callable, Mapping

from batcher.rendezvous import ranked
from tests.sim.scaling_options import KINDS
from tests.sim.world import Node, World

DRAIN_S = 6.0


def add_extra(world: World, add: Mapping[str, Callable[[int], None]], counts: dict[str, int]) -> None:
    """Makes the processes that are away at first. `counts`: those there are of each kind."""
    scaling = world.options.scaling
    for kind in KINDS if scaling is not None else ():
        assert scaling is not None
        for i in range(counts[kind], counts[kind] + scaling.extra.get(kind, 0)):
            add[kind](i)
            world.nodes[f"{kind}{i}"].away = True
    world.first = {name: None for name, node in world.nodes.items() if not node.away}


async def run_scaling(world: World) -> None:
    scaling = world.options.scaling
    if scaling is None:
        return
    rng = random.Random(f"scaling {world.options.seed}")
    async with asyncio.TaskGroup() as group:
        for _ in range(scaling.changes):
            await asyncio.sleep(rng.uniform(0.0, 2 * world.options.fault_time_s / scaling.changes))
            _change(world, rng, group)


def come_back(world: World) -> None:
    """Those that were there at first, and left."""
    for name in world.first:
        _join(world.nodes[name])


def _change(world: World, rng: random.Random, group: asyncio.TaskGroup) -> None:
    scaling = world.options.scaling
    assert scaling is not None
    kind = rng.choice([kind for kind, count in scaling.extra.items() if count] or ["kvstore"])
    nodes = [node for name, node in world.nodes.items() if name.startswith(kind)]
    away, there = [n for n in nodes if n.away], [n for n in nodes if not n.away]
    if away and (len(there) < 2 or rng.random() < 0.5):
        node = rng.choice(away)
        world.note(f"{node.name} joins")
        _join(node)
    elif len(there) > 1:
        node = rng.choice(there)
        node.away = True  # nobody starts it again
        within_s = 0.05 if rng.random() < scaling.cut_short else DRAIN_S
        world.num_deaths += 1
        group.create_task(_leave(world, node, within_s), name=f"{node.name} leaves")


def _join(node: Node) -> None:
    node.away = False
    if not node.up:
        node.start()


async def _leave(world: World, node: Node, within_s: float) -> None:
    with world.trouble(f"{node.name} leaves", f"{node.name} has left"):
        await node.drain(within_s)
    if not node.away and not node.up and not world.closing:  # it was called back meanwhile
        node.start()


def check_owners(world: World) -> None:
    """At rest every standing pool lies at the kvstore that is its owner by rendezvous of those there are, and
    nowhere else, unless its batcher could not reach that one."""
    kvstores = {n.service.boot: n for n in world.nodes.values() if n.name.startswith("kvstore") and n.up}
    for node in world.nodes.values():
        core = getattr(node.service, "_core", None)
        if not node.name.startswith("batcher") or core is None or not core.standing:
            continue
        client = node.service._kvstore
        attachment = client._attachment
        generation = attachment.pool.generation
        owner = ranked(generation, kvstores)[0]
        blamed = [k.boot for k in client._kvstores.present() if k.failed_revision == k.revision]
        if owner in blamed or attachment.boot not in kvstores:
            continue  # it is asked again once it has written anew; or was not asked since it died
        if attachment.boot != owner:
            world.fail(f"{node.name}: its pool lies at {attachment.boot}, not at {owner}")
