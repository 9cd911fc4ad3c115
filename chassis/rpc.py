"""Remote calls as services see them: one request message, one reply message, a deadline.

Implementations: `grpc_rpc` (production) and the in-memory one of the one-process deployment and the
simulation. Methods are described once, in `chassis/messages`, as `Method` values.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from google.protobuf.message import Message as ProtoMessage

MESSAGE_BYTES_MAX = 32 << 20  # of a request or a reply; above it: RpcRejected RESOURCE_EXHAUSTED
# Answers that say no more than silence does; as RpcUnavailable, also when a handler raises them.
UNAVAILABLE_CODES = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")

Req = TypeVar("Req", bound=ProtoMessage)
Rep = TypeVar("Rep", bound=ProtoMessage)


@dataclass(frozen=True, slots=True)
class Method(Generic[Req, Rep]):
    """`path` is gRPC's: /package.Service/Method."""

    path: str
    request: type[Req]
    reply: type[Rep]


Handlers = Mapping[Method[Any, Any], Callable[[Any], Awaitable[Any]]]


class Server(Protocol):
    @property
    def address(self) -> str: ...

    async def close(self, grace_s: float = 0.5) -> None: ...


class Rpc(Protocol):
    async def serve(self, address: str, handlers: Handlers) -> Server:
        """Listens (port 0: any) until closed. A handler raises `Status`-like RpcRejected to refuse."""

    async def call(self, address: str, method: Method[Req, Rep], request: Req, timeout_s: float) -> Rep:
        """Raises RpcUnavailable (no answer; it may have happened) or RpcRejected."""

    async def close(self) -> None: ...
