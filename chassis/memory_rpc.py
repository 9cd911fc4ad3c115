"""Remote calls inside one process: the one-process deployment's, and with bad habits the simulation's.

Rules: messages pass as bytes, so nothing is shared; time is the loop's; chance is given. A lost message
is silence until the caller's deadline. A request on its way still arrives after its caller gave up; a
running handler is cancelled when its caller gives up or its node dies, as gRPC does it.
"""

import asyncio
import contextvars
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from chassis import log
from chassis.errors import RpcError, RpcRejected, RpcUnavailable
from chassis.rpc import MESSAGE_BYTES_MAX, UNAVAILABLE_CODES, Handlers, Method, Rep, Req

CALLS_MAX = 65536  # on their way at once, in the whole network
FIRST_PORT = 40001


@dataclass(frozen=True, slots=True)
class RpcHabits:
    """What the network does to each message: delays it evenly within bounds, or loses it."""

    delay_min_s: float = 0.0
    delay_max_s: float = 0.0
    request_loss: float = 0.0  # probability
    reply_loss: float = 0.0


class MemoryRpcNetwork:
    """What the nodes share. `chance` draws from [0, 1); without it habits must stay the default's."""

    def __init__(
        self, chance: Callable[[], float] | None = None, message_bytes_max: int = MESSAGE_BYTES_MAX
    ) -> None:
        self.habits = RpcHabits()
        self.message_bytes_max = message_bytes_max
        self._chance = chance
        self._servers: dict[str, _MemoryServer] = {}
        self._nodes: dict[str, list[MemoryRpc]] = {}
        self._cut: dict[tuple[str, str], None] = {}  # from, to
        self._calls: dict[_Call, None] = {}
        self._next_port = FIRST_PORT

    def rpc(self, node: str) -> "MemoryRpc":
        """A new process on a node. Several may live there; `kill` ends them all."""
        rpc = MemoryRpc(self, node)
        self._nodes.setdefault(node, []).append(rpc)
        return rpc

    def partition(self, one: str, other: str, both_ways: bool = True) -> None:
        """Loses everything from one node to the other, and the other way round."""
        self._cut[one, other] = None
        if both_ways:
            self._cut[other, one] = None

    def heal(self) -> None:
        self._cut.clear()

    def kill(self, node: str) -> None:
        """Ends a node's processes at once: its handlers are cancelled, its peers see a lost connection."""
        for rpc in self._nodes.pop(node, []):
            rpc.abort()

    def forget(self, node: str, rpc: "MemoryRpc") -> None:
        processes = self._nodes.get(node, [])
        if rpc in processes:
            processes.remove(rpc)

    async def close(self) -> None:
        """Ends what is still on its way."""
        tasks = [call.task for call in self._calls if call.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def travel(self, source: str, target: str, loss: float) -> bool:
        """Takes the time a message takes; False when it is lost."""
        habits = self.habits
        delay_s, lost = habits.delay_min_s, False
        if self._chance is not None:
            delay_s += (habits.delay_max_s - habits.delay_min_s) * self._chance()
            lost = self._chance() < loss
        await asyncio.sleep(delay_s)
        return not lost and (source, target) not in self._cut

    def listen(self, server: "_MemoryServer") -> str:
        host, _, port = server.asked.rpartition(":")
        address = server.asked
        if port == "0":
            address = f"{host}:{self._next_port}"
            self._next_port += 1
        if address in self._servers:
            raise OSError(f"cannot listen on {address}: in use")
        self._servers[address] = server
        return address

    def unlisten(self, server: "_MemoryServer") -> None:
        if self._servers.get(server.address) is server:
            del self._servers[server.address]

    def server(self, address: str) -> "_MemoryServer | None":
        return self._servers.get(address)

    def cut(self, source: str, target: str) -> bool:
        return (source, target) in self._cut

    def start(self, call: "_Call") -> None:
        if len(self._calls) >= CALLS_MAX:
            call.resolve(RpcUnavailable("too many calls on their way"))
            return
        self._calls[call] = None
        server = self._servers.get(call.address)
        call.task = asyncio.get_running_loop().create_task(
            call.run(),
            name=f"rpc {call.method.path}",
            context=None if server is None else server.context.copy(),
        )
        call.task.add_done_callback(lambda _: self._calls.pop(call, None))


class _Call:
    """One request's way there, its handling, and the reply's way back."""

    def __init__(
        self, network: MemoryRpcNetwork, caller: str, address: str, method: Method[Any, Any], data: bytes
    ) -> None:
        self.network = network
        self.caller = caller
        self.address = address
        self.method = method
        self.data = data
        self.answer: asyncio.Future[bytes | RpcError] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[None] | None = None
        self._handled_by: _MemoryServer | None = None

    def resolve(self, outcome: bytes | RpcError) -> None:
        if not self.answer.done():
            self.answer.set_result(outcome)

    def give_up(self) -> None:
        """The caller no longer waits. A request on its way still arrives; a running handler ends."""
        self.answer.cancel()
        if self._handled_by is not None and self.task is not None:
            self.task.cancel()

    def break_off(self) -> None:
        """The handling node died or closed: the caller sees its connection lost, if it can see anything."""
        server = self._handled_by
        assert server is not None and self.task is not None
        self.task.cancel()
        if not self.network.cut(server.node, self.caller):
            self.resolve(RpcUnavailable(f"{self.address}: connection lost"))

    async def run(self) -> None:
        network, habits = self.network, self.network.habits
        found = network.server(self.address)
        if not await network.travel(
            self.caller, found.node if found is not None else "", habits.request_loss
        ):
            return
        server = network.server(self.address)
        if server is None or (found is not None and server is not found):
            self.resolve(RpcUnavailable(f"{self.address}: nobody listens"))
            return
        self._handled_by = server
        server.calls[self] = None
        try:
            outcome = await server.handle(self.method, self.data)
        finally:
            del server.calls[self]
            self._handled_by = None
        if await network.travel(server.node, self.caller, network.habits.reply_loss):
            self.resolve(outcome)


class _MemoryServer:
    def __init__(self, network: MemoryRpcNetwork, node: str, asked: str, handlers: Handlers) -> None:
        self.node = node
        self.asked = asked
        self.context = contextvars.copy_context()  # handlers log as their own service
        self.calls: dict[_Call, None] = {}  # in their handlers
        self._handlers = {method.path: handler for method, handler in handlers.items()}
        self._network = network
        self._address = network.listen(self)

    @property
    def address(self) -> str:
        return self._address

    async def handle(self, method: Method[Any, Any], data: bytes) -> bytes | RpcError:
        handler = self._handlers.get(method.path)
        if handler is None:
            return RpcRejected("UNIMPLEMENTED", f"no method {method.path}")
        try:
            reply = await handler(method.request.FromString(data))
        except RpcRejected as error:
            return RpcRejected(error.code, error.message)
        except DecodeError:
            return RpcRejected("INTERNAL", "request: not a message of this method")
        except Exception as error:
            log.exception("rpc handler failed", error, method=method.path)
            return RpcRejected("INTERNAL", f"{type(error).__name__} in {method.path}")
        assert isinstance(reply, method.reply)
        return bytes(reply.SerializeToString())

    def abort(self) -> None:
        self._network.unlisten(self)
        for call in list(self.calls):
            call.break_off()

    async def close(self, grace_s: float = 0.5) -> None:
        self._network.unlisten(self)
        tasks = [call.task for call in self.calls if call.task is not None]
        if tasks and grace_s > 0:
            await asyncio.wait(tasks, timeout=grace_s)
        self.abort()
        await asyncio.gather(*tasks, return_exceptions=True)


class MemoryRpc:
    """One process's end of the network (an `Rpc`)."""

    def __init__(self, network: MemoryRpcNetwork, node: str) -> None:
        self._network = network
        self._node = node
        self._closed = False
        self._waiting: dict[_Call, None] = {}
        self._servers: list[_MemoryServer] = []

    async def serve(self, address: str, handlers: Handlers) -> _MemoryServer:
        """Raises OSError when the address is taken."""
        assert not self._closed
        server = _MemoryServer(self._network, self._node, address, handlers)
        self._servers.append(server)
        return server

    async def call(self, address: str, method: Method[Req, Rep], request: Req, timeout_s: float) -> Rep:
        assert isinstance(request, method.request)
        if self._closed:
            raise RpcUnavailable("closed")
        data = request.SerializeToString()
        self._limit("request", data)
        call = _Call(self._network, self._node, address, method, data)
        self._waiting[call] = None
        self._network.start(call)
        try:
            async with asyncio.timeout(timeout_s):
                outcome = await call.answer
        except TimeoutError:
            raise RpcUnavailable(f"{address}: no answer within {timeout_s} s") from None
        finally:
            self._waiting.pop(call, None)
            call.give_up()
        if isinstance(outcome, RpcRejected) and outcome.code in UNAVAILABLE_CODES:
            raise RpcUnavailable(outcome.message)
        if isinstance(outcome, RpcError):
            raise outcome
        self._limit("reply", outcome)
        return method.reply.FromString(outcome)

    def _limit(self, which: str, data: bytes) -> None:
        if len(data) > self._network.message_bytes_max:
            limit = self._network.message_bytes_max
            raise RpcRejected("RESOURCE_EXHAUSTED", f"{which} of {len(data)} bytes is above {limit}")

    def abort(self) -> None:
        self._closed = True
        for server in self._servers:
            server.abort()
        for call in list(self._waiting):
            call.resolve(RpcUnavailable("closed"))

    async def close(self) -> None:
        self.abort()
        for server in self._servers:
            await server.close(0.0)
        self._network.forget(self._node, self)
