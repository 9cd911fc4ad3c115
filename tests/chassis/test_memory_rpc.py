"""The network's bad habits, one by one, on a virtual clock."""

import asyncio
import random
from collections.abc import Awaitable, Callable

from chassis.errors import RpcUnavailable
from chassis.memory_rpc import MemoryRpcNetwork, RpcHabits
from chassis.messages.kvstore import STATS
from chassis.rpc import Rpc
from chassis.wire import kvstore_pb2 as pb
from tests.sim.loop import run as on_virtual_clock


class Log:
    """What a handler saw, and when."""

    def __init__(self, work_s: float = 0.0) -> None:
        self.seen: list[tuple[str, float]] = []
        self.cancelled = 0
        self._work_s = work_s

    async def __call__(self, request: pb.StatsRequest) -> pb.StatsReply:
        self.seen.append((request.generation, round(asyncio.get_running_loop().time(), 6)))
        try:
            await asyncio.sleep(self._work_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return pb.StatsReply(total=1)


async def ask(rpc: Rpc, address: str, text: str = "x", timeout_s: float = 1.0) -> float:
    """Seconds until the answer, or the time after which there was none, negated; in whole microseconds,
    since the virtual clock wakes a nanosecond late."""
    clock = asyncio.get_running_loop().time

    def now() -> float:
        return round(clock(), 6)

    start = now()
    try:
        await rpc.call(address, STATS, pb.StatsRequest(generation=text), timeout_s)
    except RpcUnavailable:
        return -round(now() - start, 6)
    return round(now() - start, 6)


def on_network(
    case: Callable[[MemoryRpcNetwork, Rpc, str, Log], Awaitable[None]], seed: int = 1, work_s: float = 0.0
) -> None:
    async def main() -> None:
        network = MemoryRpcNetwork(random.Random(seed).random)
        seen = Log(work_s)
        server = await network.rpc("server").serve("host:0", {STATS: seen})
        await case(network, network.rpc("client"), server.address, seen)
        await network.close()

    on_virtual_clock(main())


def test_without_habits_a_call_takes_no_time() -> None:
    async def case(network: MemoryRpcNetwork, client: Rpc, address: str, seen: Log) -> None:
        assert await ask(client, address) == 0.0

    on_network(case)


def test_delays_lie_within_their_bounds_and_differ() -> None:
    async def case(network: MemoryRpcNetwork, client: Rpc, address: str, seen: Log) -> None:
        network.habits = RpcHabits(delay_min_s=0.01, delay_max_s=0.02)
        times = [await ask(client, address) for _ in range(20)]
        assert all(0.02 <= t <= 0.04 for t in times) and len(dict.fromkeys(times)) > 10

    on_network(case)


def test_the_same_seed_does_the_same_and_another_does_not() -> None:
    runs: list[list[float]] = []

    async def case(network: MemoryRpcNetwork, client: Rpc, address: str, seen: Log) -> None:
        network.habits = RpcHabits(0.001, 0.1, request_loss=0.2, reply_loss=0.2)
        runs.append(list(await asyncio.gather(*(ask(client, address, str(i)) for i in range(30)))))

    for seed in (1, 1, 2):
        on_network(case, seed)
    assert runs[0] == runs[1] != runs[2]


def test_a_lost_request_never_happens_and_a_lost_reply_did_happen() -> None:
    async def case(network: MemoryRpcNetwork, client: Rpc, address: str, seen: Log) -> None:
        network.habits = RpcHabits(request_loss=1.0)
        assert await ask(client, address, "lost") == -1.0
        network.habits = RpcHabits(reply_loss=1.0)
        assert await ask(client, address, "done") == -1.0
        assert [text for text, _ in seen.seen] == ["done"]

    on_network(case)


def test_a_request_given_up_may_still_arrive() -> None:
    async def case(network: MemoryRpcNetwork, client: Rpc, address: str, seen: Log) -> None:
        network.habits = RpcHabits(delay_min_s=2.0, delay_max_s=2.0)
        assert await ask(client, address, "late") == -1.0
        assert seen.seen == []
        await asyncio.sleep(1.5)
        assert seen.seen == [("late", 2.0)]

    on_network(case)


def test_a_partition_is_silence_in_its_direction_until_healed() -> None:
    async def case(network: MemoryRpcNetwork, client: Rpc, address: str, seen: Log) -> None:
        network.partition("server", "client", both_ways=False)
        assert await ask(client, address, "in") == -1.0
        network.heal()
        network.partition("client", "server")
        assert await ask(client, address, "out") == -1.0
        network.heal()
        assert await ask(client, address, "again") == 0.0
        assert [text for text, _ in seen.seen] == ["in", "again"]

    on_network(case)


def test_a_dead_server_cancels_its_handlers_and_its_callers_know_at_once() -> None:
    async def case(network: MemoryRpcNetwork, client: Rpc, address: str, seen: Log) -> None:
        call = asyncio.create_task(ask(client, address, timeout_s=100.0))
        await asyncio.sleep(1.0)
        network.kill("server")
        assert await call == -1.0 and seen.cancelled == 1
        assert await ask(client, address) == 0.0 and len(seen.seen) == 1  # refused without delay

    on_network(case, work_s=10.0)


def test_a_dead_caller_ends_its_handlers() -> None:
    async def case(network: MemoryRpcNetwork, client: Rpc, address: str, seen: Log) -> None:
        call = asyncio.create_task(ask(client, address, timeout_s=100.0))
        await asyncio.sleep(1.0)
        network.kill("client")
        await call
        await asyncio.sleep(0)
        assert seen.cancelled == 1
        assert await ask(network.rpc("client"), address, timeout_s=20.0) == 10.0  # its next life

    on_network(case, work_s=10.0)


def test_a_request_for_the_dead_does_not_reach_their_successor() -> None:
    async def case(network: MemoryRpcNetwork, client: Rpc, address: str, seen: Log) -> None:
        network.habits = RpcHabits(delay_min_s=0.5, delay_max_s=0.5)
        call = asyncio.create_task(ask(client, address))
        await asyncio.sleep(0.1)
        network.kill("server")
        await network.rpc("server").serve(address, {STATS: seen})
        assert await call == -0.5 and seen.seen == []
        assert await ask(client, address, timeout_s=5.0) == 1.0

    on_network(case)
