"""The deployment of one seed: nodes that can be brought up, killed, stopped and cut off, and their ground.

A node is built by the same constructors as in production; its ports are the memory ones under a seeded
chance. A node that crashes by itself is a failure of the run, unless its crash was ordered.
"""

import asyncio
import contextvars
import hashlib
import random
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from chassis.memory_bus import MemoryBus
from chassis.memory_rpc import MemoryRpcNetwork, RpcHabits
from chassis.messages.gateway import GenerateCall
from chassis.ports import Ports
from chassis.transport.memory import MemoryNetwork
from tests.kvstore.faulty_files import MemoryFiles
from tests.sim.network import SimBroker, SimHabits
from tests.sim.options import Options
from tests.sim.pause import CURRENT, Sleeper
from tests.sim.tracer import SimTracer


class NodeService(Protocol):
    async def run(self) -> None: ...

    async def drain(self) -> None: ...


Factory = Callable[[Ports], NodeService]


class Node:
    """A process: it can die, be stopped, and come again with a new boot and an empty memory."""

    def __init__(self, world: "World", name: str, factory: Factory) -> None:
        self.world = world
        self.name = name
        self.may_crash = False  # an ordered crash is on its way
        self.away = False  # it has not joined, or has left: nobody starts it
        self._factory = factory
        self._incarnation = 0
        self._task: asyncio.Task[None] | None = None
        self._bus: MemoryBus | None = None
        self._context = contextvars.copy_context()
        self.sleeper = Sleeper()
        self.service: Any = None
        self.down = asyncio.Event()
        self.down.set()

    @property
    def up(self) -> bool:
        return self._task is not None

    @property
    def bus_name(self) -> str:
        return f"{self.name}.{self._incarnation}"

    def start(self) -> None:
        assert self._task is None
        self._incarnation += 1
        world = self.world
        self._bus = MemoryBus(world.broker, self.bus_name)
        self.sleeper = Sleeper()
        ports = Ports(
            bus=self._bus,
            rpc=world.rpc.rpc(self.name),
            transport=world.ring.transport(self.name),
            tracer=world.tracer.of(self.bus_name),
            new_id=lambda: world.new_id(self.name),
            new_seed=lambda: world.rng.getrandbits(64),
            wall_ns=world.wall_ns,
        )
        self.down.clear()
        self._context = contextvars.copy_context()
        self._context.run(CURRENT.set, self.sleeper)
        self.service = self._context.run(self._factory, ports)
        self._task = self._do(self._live(), self.bus_name)

    def _do(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work, name=name, context=self._context)

    async def _live(self) -> None:
        try:
            await self.service.run()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            if not self.may_crash:
                self.world.fail(f"{self.name} crashed: {error!r}", error)
            asyncio.get_running_loop().call_soon(self.world.bury, self)

    async def drain(self, within_s: float) -> None:
        """SIGTERM: it lets go and ends, or is killed when it takes too long."""
        task = self._task
        if task is None:
            return
        draining = self._do(self.service.drain(), f"drain {self.name}")
        await asyncio.wait({task}, timeout=within_s)
        if not task.done():
            self.world.note(f"{self.name} is cut short")
        draining.cancel()
        await asyncio.wait({draining})
        if not draining.cancelled() and draining.exception() is not None:
            self.world.fail(f"drain of {self.name} crashed: {draining.exception()!r}", draining.exception())
        if self._task is task:
            await self.kill(unclean=not task.done())

    async def kill(self, unclean: bool = True) -> None:
        """SIGKILL: its links go first, then all that it was doing; nothing is tidied up for the others."""
        task, self._task = self._task, None
        if task is None:
            return
        if unclean:
            self.world.killed[self.bus_name] = None
        assert self._bus is not None
        self._bus.kill()
        self.world.rpc.kill(self.name)
        self.world.ring.kill(self.name)
        self.sleeper.wake()
        self.down.set()
        task.cancel()
        await asyncio.wait({task})
        if self._task is None:  # it has not come back meanwhile
            self.service = None


class World:
    EPOCH_NS = 1_700_000_000_000_000_000  # the wall clock at the start

    def __init__(self, options: Options) -> None:
        self._loop = asyncio.get_running_loop()
        self.options = options
        self.history: list[str] = []
        self.failures: list[str] = []
        self.rng = random.Random(f"world {options.seed}")
        self.habits = SimHabits(options)
        self.tracer = SimTracer(options.seed)
        self.broker = SimBroker(self.habits, self.wall_ns, self.note, self.fail)
        chance = random.Random(f"rpc {options.seed}")
        self.rpc = MemoryRpcNetwork(chance.random)
        self.rpc.habits = RpcHabits(0.0, options.delay_s, options.rpc_loss, options.rpc_loss)
        ring_chance = random.Random(f"ring {options.seed}")
        self.ring = MemoryNetwork(lambda a, b: ring_chance.random() * options.delay_s / 4)
        self.nodes: dict[str, Node] = {}
        self.first: dict[str, None] = {}  # nodes that are there before anybody joins
        self.errors: list[BaseException] = []
        self.disks: dict[str, MemoryFiles] = {}  # of kvstores' tiers, by node
        self.num_restored = 0
        self.hang_s = 0.0  # how much longer the next run of a device takes
        self.killed: dict[str, None] = {}  # processes that did not end by themselves
        self.troubles: list[tuple[float, float]] = []  # when somebody could not be heard
        self.calls: list[GenerateCall] = []  # what is asked
        self.num_deaths = 0  # of workers and batchers, or what their peers take for it
        self.calm_at = 0.0
        self._burials: list[asyncio.Task[None]] = []
        self.closing = False
        self._ids = 0

    def wall_ns(self) -> int:
        return self.EPOCH_NS + int(self._loop.time() * 1e9)

    def new_id(self, name: str) -> str:
        self._ids += 1
        digest = hashlib.sha256(f"{self.options.seed}:{self._ids}".encode()).hexdigest()[:6]
        return f"{''.join(c for c in name if c.isalnum())}{self._ids:04d}{digest}"

    def note(self, what: str) -> None:
        self.history.append(f"{self._loop.time():9.4f} {what}")

    def fail(self, what: str, error: BaseException | None = None) -> None:
        self.note(f"FAILURE {what}")
        self.failures.append(what)
        if error is not None:
            self.errors.append(error)

    def add(self, name: str, factory: Factory) -> Node:
        node = self.nodes[name] = Node(self, name, factory)
        return node

    def bury(self, node: Node) -> None:
        """A node ended by itself: it comes again, as a launcher would have it."""
        self._burials.append(self._loop.create_task(self._restart(node, 0.2), name=f"restart {node.name}"))

    def strike(self, node: Node, after_s: float, down_s: float) -> None:
        """Kills it a moment from now, if it is still the same process."""
        name = node.bus_name

        async def kill() -> None:
            await asyncio.sleep(after_s)
            if node.up and node.bus_name == name:
                await self.bounce(node, down_s)

        self._burials.append(self._loop.create_task(kill(), name=f"strike {node.name}"))

    async def _restart(self, node: Node, after_s: float) -> None:
        await node.kill()
        node.may_crash = False
        await asyncio.sleep(after_s)
        if not node.up and not node.away and not self.closing:
            node.start()

    def calm(self) -> None:
        """The faults are over."""
        self.note("calm")
        self.calm_at = self._loop.time()
        self.habits.calm = True
        self.rpc.habits = RpcHabits(0.0, self.options.delay_s)

    @contextmanager
    def trouble(self, begins: str, ends: str) -> Iterator[None]:
        self.note(begins)
        began = self._loop.time()
        yield
        self.troubles.append((began, self._loop.time()))
        self.note(ends)

    async def bounce(self, node: Node, after_s: float) -> None:
        with self.trouble(f"kill {node.name}", f"start {node.name}"):
            await self._restart(node, after_s)

    async def drain(self, node: Node, within_s: float, after_s: float) -> None:
        with self.trouble(f"drain {node.name}", f"start {node.name}"):
            await node.drain(within_s)
            await self._restart(node, after_s)

    async def close(self) -> None:
        self.closing = True
        for burial in self._burials:
            burial.cancel()
        await asyncio.gather(*self._burials, return_exceptions=True)
        for node in self.nodes.values():
            await node.kill()
        await self.rpc.close()
