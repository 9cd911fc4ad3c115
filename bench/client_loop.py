"""How a bench's clients run: they share the cores with what they measure, so they take as little as they can.

On the services' own loop, and with the poller of gRPC's that hands nothing from thread to thread: together
half of the processor time per token. Import it before gRPC. The services themselves run as they always do.
"""

import asyncio
import os
from collections.abc import Coroutine
from typing import Any, TypeVar

from chassis.service import loop_factory

T = TypeVar("T")
_POLLER = "GRPC_EXPERIMENTS"
SERVICES_ENV = {_POLLER: os.environ.get(_POLLER, "")}
os.environ.setdefault(_POLLER, "-event_engine_client,-event_engine_listener")


def run(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(work)
