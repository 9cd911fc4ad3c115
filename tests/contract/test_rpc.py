"""Both implementations of `chassis.rpc` keep the same promises."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import orjson
import pytest

from chassis import log
from chassis.errors import RpcRejected, RpcUnavailable
from chassis.grpc_rpc import GrpcRpc
from chassis.memory_rpc import MemoryRpcNetwork
from chassis.messages.kvstore import EXCHANGE, MATCH, STATS
from chassis.rpc import Handlers, Rpc
from chassis.wire import kvstore_pb2 as pb

LIMIT_BYTES = 64 << 10
LOOPBACK = "127.0.0.1:0"


@dataclass
class Pair:
    """Two processes that can reach each other."""

    server: Rpc
    client: Rpc
    another: Callable[[], Rpc]


Case = Callable[[Pair], Awaitable[None]]


def run_grpc(case: Case, run: Callable[[Coroutine[Any, Any, None]], None] = asyncio.run) -> None:
    async def main() -> None:
        made = [GrpcRpc(LIMIT_BYTES), GrpcRpc(LIMIT_BYTES)]

        def another() -> GrpcRpc:
            made.append(GrpcRpc(LIMIT_BYTES))
            return made[-1]

        try:
            async with asyncio.timeout(20):
                await case(Pair(made[0], made[1], another))
        finally:
            for rpc in made:
                await rpc.close()

    run(main())


def run_grpc_on_uvloop(case: Case) -> None:
    run_grpc(case, pytest.importorskip("uvloop").run)


def run_memory(case: Case) -> None:
    async def main() -> None:
        network = MemoryRpcNetwork(message_bytes_max=LIMIT_BYTES)
        nodes = iter("cdefg")
        async with asyncio.timeout(20):
            await case(Pair(network.rpc("a"), network.rpc("b"), lambda: network.rpc(next(nodes))))
        await network.close()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


@pytest.fixture(params=[run_grpc, run_grpc_on_uvloop, run_memory], ids=["grpc", "uvloop", "memory"])
def run(request: pytest.FixtureRequest) -> Callable[[Case], None]:
    runner: Callable[[Case], None] = request.param
    return runner


async def echo(request: pb.StatsRequest) -> pb.StatsReply:
    return pb.StatsReply(total=len(request.generation), generations=[request.generation])


async def ask(rpc: Rpc, address: str, text: str = "x", timeout_s: float = 5.0) -> pb.StatsReply:
    return await rpc.call(address, STATS, pb.StatsRequest(generation=text), timeout_s)


ECHO: Handlers = {STATS: echo}


class Stuck:
    """A handler that never answers, and knows when it began and that it was cancelled."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def __call__(self, request: pb.StatsRequest) -> pb.StatsReply:
        self.began.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()
        raise AssertionError


def test_a_reply_comes_back(run: Callable[[Case], None]) -> None:
    async def case(pair: Pair) -> None:
        server = await pair.server.serve(LOOPBACK, ECHO)
        assert server.address.startswith("127.0.0.1:") and not server.address.endswith(":0")
        reply = await ask(pair.client, server.address, "grün")
        assert (reply.total, list(reply.generations)) == (4, ["grün"])

    run(case)


def test_two_servers_get_two_addresses_and_a_taken_one_is_refused(run: Callable[[Case], None]) -> None:
    async def case(pair: Pair) -> None:
        one = await pair.server.serve(LOOPBACK, ECHO)
        other = await pair.client.serve(LOOPBACK, ECHO)
        assert one.address != other.address
        with pytest.raises(OSError, match="cannot listen"):
            await pair.client.serve(one.address, ECHO)

    run(case)


def test_nothing_is_shared_between_the_ends(run: Callable[[Case], None]) -> None:
    kept: list[pb.StatsRequest] = []
    shared = pb.StatsReply(total=1)

    async def keep(request: pb.StatsRequest) -> pb.StatsReply:
        kept.append(request)
        return shared

    async def case(pair: Pair) -> None:
        server = await pair.server.serve(LOOPBACK, {STATS: keep})
        request = pb.StatsRequest(generation="before")
        reply = await pair.client.call(server.address, STATS, request, 5.0)
        request.generation = "after"
        shared.total = 2
        assert kept[0].generation == "before" and reply.total == 1

    run(case)


def test_a_refusal_keeps_its_code_and_words(run: Callable[[Case], None]) -> None:
    async def refuse(request: pb.StatsRequest) -> pb.StatsReply:
        raise RpcRejected("FAILED_PRECONDITION", "old epoch 3")

    async def case(pair: Pair) -> None:
        server = await pair.server.serve(LOOPBACK, {STATS: refuse})
        with pytest.raises(RpcRejected) as caught:
            await ask(pair.client, server.address)
        assert (caught.value.code, caught.value.message) == ("FAILED_PRECONDITION", "old epoch 3")

    run(case)


def test_a_handler_that_says_unavailable_is_unavailable(run: Callable[[Case], None]) -> None:
    async def refuse(request: pb.StatsRequest) -> pb.StatsReply:
        raise RpcRejected("UNAVAILABLE", "draining")

    async def case(pair: Pair) -> None:
        server = await pair.server.serve(LOOPBACK, {STATS: refuse})
        with pytest.raises(RpcUnavailable, match="draining"):
            await ask(pair.client, server.address)

    run(case)


def test_a_failing_handler_is_internal_and_the_server_goes_on(run: Callable[[Case], None]) -> None:
    lines: list[bytes] = []

    async def fail(request: pb.StatsRequest) -> pb.StatsReply:
        if request.generation == "secret":
            raise ValueError(request.generation)
        return await echo(request)

    async def case(pair: Pair) -> None:
        log.bind(write=lines.append, service="server")
        server = await pair.server.serve(LOOPBACK, {STATS: fail})
        log.bind(service="client")
        with pytest.raises(RpcRejected) as caught:
            await ask(pair.client, server.address, "secret")
        assert caught.value.code == "INTERNAL" and "secret" not in caught.value.message
        assert (await ask(pair.client, server.address, "ok")).total == 2

    run(case)
    (line,) = [orjson.loads(line) for line in lines]
    assert (line["event"], line["method"]) == ("rpc handler failed", STATS.path)
    assert "ValueError" in line["error"] and line["service"] == "server"


def test_an_unknown_method_is_unimplemented(run: Callable[[Case], None]) -> None:
    async def case(pair: Pair) -> None:
        server = await pair.server.serve(LOOPBACK, ECHO)
        with pytest.raises(RpcRejected) as caught:
            await pair.client.call(server.address, MATCH, pb.MatchRequest(), 5.0)
        assert caught.value.code == "UNIMPLEMENTED"

    run(case)


def test_nobody_there_is_known_long_before_the_deadline(run: Callable[[Case], None]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"

    async def case(pair: Pair) -> None:
        now = asyncio.get_running_loop().time
        start = now()
        for _ in range(3):
            with pytest.raises(RpcUnavailable):
                await ask(pair.client, address, timeout_s=10.0)
        assert now() - start < 3.0

    run(case)


def test_a_deadline_ends_the_call_and_its_handler(run: Callable[[Case], None]) -> None:
    async def case(pair: Pair) -> None:
        stuck = Stuck()
        server = await pair.server.serve(LOOPBACK, {STATS: stuck})
        start = asyncio.get_running_loop().time()
        with pytest.raises(RpcUnavailable):
            await ask(pair.client, server.address, timeout_s=0.2)
        assert 0.19 < asyncio.get_running_loop().time() - start < 2.0
        await stuck.cancelled.wait()

    run(case)


def test_cancelling_a_call_cancels_its_handler(run: Callable[[Case], None]) -> None:
    async def case(pair: Pair) -> None:
        stuck = Stuck()
        server = await pair.server.serve(LOOPBACK, {STATS: stuck})
        task = asyncio.create_task(ask(pair.client, server.address))
        await stuck.began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await stuck.cancelled.wait()

    run(case)


def test_many_calls_at_once_each_get_their_own_answer(run: Callable[[Case], None]) -> None:
    async def case(pair: Pair) -> None:
        server = await pair.server.serve(LOOPBACK, ECHO)
        replies = await asyncio.gather(*(ask(pair.client, server.address, f"{i}") for i in range(200)))
        assert [r.generations[0] for r in replies] == [f"{i}" for i in range(200)]

    run(case)


@pytest.mark.parametrize("length", [LIMIT_BYTES - 100, LIMIT_BYTES + 1])
def test_size_limits_hold_both_ways(run: Callable[[Case], None], length: int) -> None:
    async def take(request: pb.ExchangeRequest) -> pb.ExchangeReply:
        return pb.ExchangeReply(free=len(request.release_blocks))

    async def give(request: pb.StatsRequest) -> pb.StatsReply:
        return pb.StatsReply(generations=["x" * int(request.generation)])

    async def case(pair: Pair) -> None:
        server = await pair.server.serve(LOOPBACK, {EXCHANGE: take, STATS: give})
        request = pb.ExchangeRequest(release_blocks=bytes(length))
        if length < LIMIT_BYTES:
            assert (await pair.client.call(server.address, EXCHANGE, request, 5.0)).free == length
            assert len((await ask(pair.client, server.address, str(length))).generations[0]) == length
            return
        for call in (
            pair.client.call(server.address, EXCHANGE, request, 5.0),
            ask(pair.client, server.address, str(length)),
        ):
            with pytest.raises(RpcRejected) as caught:
                await call
            assert caught.value.code == "RESOURCE_EXHAUSTED"
        assert (await ask(pair.client, server.address, "1")).generations[0] == "x"

    run(case)


def test_a_closed_server_fails_its_calls_and_can_come_back(run: Callable[[Case], None]) -> None:
    async def case(pair: Pair) -> None:
        stuck = Stuck()
        server = await pair.server.serve(LOOPBACK, {STATS: stuck})
        task = asyncio.create_task(ask(pair.client, server.address))
        await stuck.began.wait()
        await server.close(0.0)
        with pytest.raises(RpcUnavailable):
            await task
        assert stuck.cancelled.is_set()
        with pytest.raises(RpcUnavailable):
            await ask(pair.client, server.address)
        await pair.another().serve(server.address, ECHO)
        async with asyncio.timeout(3.0):
            while True:
                try:
                    assert (await ask(pair.client, server.address, "abc")).total == 3
                    break
                except RpcUnavailable:
                    await asyncio.sleep(0.02)

    run(case)


def test_grace_lets_a_running_handler_finish(run: Callable[[Case], None]) -> None:
    async def case(pair: Pair) -> None:
        began, go = asyncio.Event(), asyncio.Event()

        async def slow(request: pb.StatsRequest) -> pb.StatsReply:
            began.set()
            await go.wait()
            return await echo(request)

        server = await pair.server.serve(LOOPBACK, {STATS: slow})
        task = asyncio.create_task(ask(pair.client, server.address, "abc"))
        await began.wait()
        closing = asyncio.create_task(server.close(5.0))
        await asyncio.sleep(0)
        go.set()
        assert (await task).total == 3
        await closing

    run(case)


def test_closing_twice_is_nothing_and_calls_after_it_are_unavailable(run: Callable[[Case], None]) -> None:
    async def case(pair: Pair) -> None:
        stuck = Stuck()
        server = await pair.server.serve(LOOPBACK, {STATS: stuck})
        task = asyncio.create_task(ask(pair.client, server.address))
        await stuck.began.wait()
        await pair.client.close()
        with pytest.raises(RpcUnavailable):
            await task
        await pair.client.close()
        with pytest.raises(RpcUnavailable):
            await ask(pair.client, server.address)
        await server.close()
        await server.close()

    run(case)
