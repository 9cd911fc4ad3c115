"""What happens to the deployment of a seed, and when: drawn beforehand, carried out while clients run."""

import asyncio
import random

from tests.sim.world import Node, World


async def run_faults(world: World) -> None:
    """Draws and carries out the seed's faults, one after another at random times."""
    options = world.options
    rng = random.Random(f"faults {options.seed}")
    kinds = [kind for kind in options.faults if kind in _FAULTS]
    if not kinds:
        return
    times = sorted(rng.uniform(0.0, options.fault_time_s) for _ in range(options.num_faults))
    start = asyncio.get_running_loop().time()
    async with asyncio.TaskGroup() as group:
        for at in times:
            kind = rng.choice(kinds)
            fault = _FAULTS[kind](world, random.Random(rng.getrandbits(64)))
            world.num_deaths += _DEADLY.get(kind, 0)
            group.create_task(_at(start + at, fault), name=f"fault {kind}")


def kill_who_ends(world: World) -> None:
    """Batchers die just after a terminal record of theirs was stored: before the receipt, or before the
    acknowledgement."""
    options = world.options
    rng = random.Random(f"ends {options.seed}")
    if "batcher" not in options.faults or rng.random() < 0.5:
        return
    left = rng.choice((1, 2, 3))
    world.num_deaths += left

    def ended(boot: str) -> None:
        nonlocal left
        nodes = [n for n in _nodes(world, "batcher") if n.service is not None and n.service.boot == boot]
        if left and nodes and not world.habits.calm and rng.random() < 0.4:
            left -= 1
            after_s = rng.choice((0.0, rng.uniform(0.0, 4 * options.delay_s)))
            world.strike(nodes[0], after_s, _pause_s(world, rng))

    world.broker.when_ended = ended


async def _at(when: float, fault) -> None:  # type: ignore[no-untyped-def]
    loop = asyncio.get_running_loop()
    try:
        await asyncio.sleep(max(0.0, when - loop.time()))
    except asyncio.CancelledError:
        fault.close()
        raise
    await fault


def _nodes(world: World, kind: str) -> list[Node]:
    return [node for name, node in world.nodes.items() if name.startswith(kind) and node.up]


def _some(world: World, rng: random.Random) -> list[Node]:
    """Of one kind: owners of requests are few among so many nodes."""
    if world.options.duel:
        return _nodes(world, "batcher")
    return _nodes(world, rng.choice(("worker", "batcher", "batcher", "gateway", "gateway", "kvstore")))


def _pause_s(world: World, rng: random.Random) -> float:
    """Down times around the protocol's own: ack wait, takeover, free-after, registry."""
    if world.options.duel:
        return rng.uniform(0.7, 2.2)
    return rng.choice((0.05, 0.3, 1.2, 3.0))


def _killer(kind: str):  # type: ignore[no-untyped-def]
    async def fault(world: World, rng: random.Random) -> None:
        nodes = _nodes(world, kind)
        if nodes:
            await world.bounce(rng.choice(nodes), _pause_s(world, rng))

    return fault


async def _drain(world: World, rng: random.Random) -> None:
    """SIGTERM: it leaves in good order, or is cut short."""
    nodes = _some(world, rng)
    if nodes:
        await world.drain(rng.choice(nodes), rng.choice((0.05, 4.0)), _pause_s(world, rng))


async def _all(world: World, rng: random.Random) -> None:
    """The power fails."""
    async with asyncio.TaskGroup() as group:
        for node in _nodes(world, ""):
            group.create_task(world.bounce(node, _pause_s(world, rng)), name=f"bounce {node.name}")


async def _expire(world: World, rng: random.Random) -> None:
    """Registry entries are gone before their time, as after a long silence. Nobody is told."""
    kind = rng.choice(("", "worker.", "batcher.", "kvstore.", "gateway.", "model.", "epoch."))
    world.note(f"entries expire: {kind}*")
    world.broker.expire(kind)


async def _broker(world: World, rng: random.Random) -> None:
    if world.broker.up:
        with world.trouble("broker stops", "broker starts"):
            world.broker.stop()
            await asyncio.sleep(_pause_s(world, rng))
            world.broker.start()


async def _pause(world: World, rng: random.Random) -> None:
    """SIGSTOP and SIGCONT of any process."""
    nodes = [n for n in _some(world, rng) if not n.sleeper.stopped]
    if nodes:
        node = rng.choice(nodes)
        sleeper = node.sleeper
        with world.trouble(f"stop {node.name}", f"continue {node.name}"):
            sleeper.stop()
            await asyncio.sleep(_pause_s(world, rng))
            sleeper.wake()


async def _cut(world: World, rng: random.Random) -> None:
    """A process that can't reach the broker; the ring goes on."""
    nodes = _some(world, rng)
    if nodes:
        name = rng.choice(nodes).bus_name
        with world.trouble(f"cut {name} from the broker", f"heal {name}"):
            world.broker.cut(name)
            await asyncio.sleep(_pause_s(world, rng))
            world.broker.heal(name)


async def _link(world: World, rng: random.Random) -> None:
    """A link of the ring is lost, or hangs for a while."""
    ends = [n.name for n in [*_nodes(world, "worker"), *_nodes(world, "batcher")]]
    if len(ends) < 2:
        return
    a, b = rng.sample(ends, 2)
    if rng.random() < 0.5:
        world.note(f"links {a}-{b} lost")
        world.ring.cut(a, b)
        return
    world.note(f"partition {a}-{b}")
    world.ring.partition(a, b)
    world.rpc.partition(a, b)
    await asyncio.sleep(_pause_s(world, rng))
    world.ring.heal(a, b)
    world.rpc.heal()
    world.note(f"heal {a}-{b}")


async def _hang(world: World, rng: random.Random) -> None:
    """A device that takes very long over one step."""
    world.note("a device hangs")
    world.hang_s = rng.choice((0.5, 3.0, 8.0))


_FAULTS = {
    "worker": _killer("worker"),
    "batcher": _killer("batcher"),
    "kvstore": _killer("kvstore"),
    "gateway": _killer("gateway"),
    "drain": _drain,
    "all": _all,
    "expire": _expire,
    "broker": _broker,
    "pause": _pause,
    "cut": _cut,
    "link": _link,
    "hang": _hang,
}

_DEADLY = {
    "worker": 1,
    "batcher": 1,
    "drain": 1,
    "all": 2,
    "broker": 1,
    "pause": 1,
    "cut": 1,
    "link": 1,
    "hang": 1,
}
