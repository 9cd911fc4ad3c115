"""What only gRPC has: channels, and what the library says when it is closed."""

import asyncio
import subprocess
import sys
import textwrap
from pathlib import Path

import grpc
import grpc.aio
import pytest

from chassis import grpc_rpc
from chassis.grpc_rpc import GrpcRpc
from chassis.messages.kvstore import STATS
from chassis.wire import kvstore_pb2 as pb

ROOT = Path(__file__).parents[2]


async def echo(request: pb.StatsRequest) -> pb.StatsReply:
    return pb.StatsReply(total=len(request.generation))


def test_idle_channels_above_the_bound_are_closed_and_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_rpc, "CHANNELS_MAX", 2)

    async def main() -> None:
        rpc = GrpcRpc()
        try:
            addresses = [(await rpc.serve("127.0.0.1:0", {STATS: echo})).address for _ in range(4)]
            for address in [*addresses, *addresses]:
                reply = await rpc.call(address, STATS, pb.StatsRequest(generation="ab"), 5.0)
                assert reply.total == 2 and len(rpc._channels) <= 2
        finally:
            await rpc.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("garbage", "said"),
    [(b"\xff\xff", "not a StatsRequest"), (b"\x0a\x01\xff", "generation: not UTF-8 at byte 0")],
)
def test_garbage_is_an_invalid_argument_and_the_server_goes_on(garbage: bytes, said: str) -> None:
    async def main() -> None:
        rpc = GrpcRpc()
        try:
            address = (await rpc.serve("127.0.0.1:0", {STATS: echo})).address
            async with grpc.aio.insecure_channel(address) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await channel.unary_unary(STATS.path)(garbage, timeout=5)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert said in str(refused.value.details())
            assert (await rpc.call(address, STATS, pb.StatsRequest(generation="ab"), 5.0)).total == 2
        finally:
            await rpc.close()

    asyncio.run(main())


def test_a_process_that_closes_leaves_no_words() -> None:
    """Neither an open call, nor a dead peer, nor an unclosed interpreter warns."""
    program = """
        import asyncio, sys
        from chassis.errors import RpcUnavailable
        from chassis.grpc_rpc import GrpcRpc
        from chassis.messages.kvstore import STATS
        from chassis.wire import kvstore_pb2 as pb

        async def stuck(request):
            await asyncio.Event().wait()

        async def main():
            server, client = GrpcRpc(), GrpcRpc()
            address = (await server.serve("127.0.0.1:0", {STATS: stuck})).address
            call = asyncio.create_task(client.call(address, STATS, pb.StatsRequest(), 5.0))
            for _ in range(20):
                await asyncio.sleep(0.01)
            await server.close()
            for wait in (call, client.call(address, STATS, pb.StatsRequest(), 0.2)):
                try:
                    await wait
                    sys.exit("answered")
                except RpcUnavailable:
                    pass
            await client.close()

        asyncio.run(main())
    """
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", textwrap.dedent(program)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
