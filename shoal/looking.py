"""What `why`, `cache`, `stats`, `usage` and `batch dead` look through: the bus of a deployment.

Each has a `tell(bus, dial, arguments)`, which gives its text and whether that is all there is. It runs here,
over a connection of our own; where one process is the whole deployment (`shoal serve --single`) nobody else
reaches its bus, so the words go to its door (`shoal/door.py`), and it runs there.
"""

import argparse
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from chassis.bus import Bus
from chassis.errors import BusError
from chassis.rpc import Rpc
from shoal import door
from shoal.run_folder import read_state, secure_of

Dial = Callable[[], Rpc]  # for calls to services; to be closed
Tell = Callable[[Bus, Dial, argparse.Namespace], Awaitable[tuple[str, bool]]]


async def look(arguments: argparse.Namespace) -> tuple[str, bool]:
    """`arguments.words`: the command line. Raises BusError, LaunchError, DoorError."""
    from chassis import nats_bus

    url, secure = arguments.nats or os.environ.get("SHOAL_NATS_URL"), None
    if not url:
        state = read_state(arguments.run_dir)
        if state.get("door"):
            return await door.ask(Path(str(state["door"])), arguments.words)
        url, secure = state["nats_url"], secure_of(arguments.run_dir)
    tell: Tell = arguments.tell
    bus = await nats_bus.connect(str(url), name="shoal")
    try:
        return await tell(bus, lambda: _dial(secure), arguments)
    finally:
        try:
            await bus.close()
        except BusError:
            pass  # it was only read from, or all that was sent is stored


def _dial(secure: Path | None) -> Rpc:
    """Raises ConfigError."""
    from chassis.grpc_rpc import GrpcRpc, RpcTls

    return GrpcRpc(tls=RpcTls.of_folder(secure / "rpc") if secure is not None else None)
