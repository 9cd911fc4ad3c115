"""The seams a service is built on, handed to it when it starts.

Time is the running loop's `time()`; everything else that is not a decision comes through here, so that
the simulation can put its own in place.
"""

from collections.abc import Callable
from dataclasses import dataclass

from chassis.bus import Bus
from chassis.rpc import Rpc
from chassis.trace import Tracer
from chassis.transport.interface import Transport


@dataclass(frozen=True, slots=True)
class Ports:
    bus: Bus
    rpc: Rpc
    transport: Transport
    tracer: Tracer
    new_id: Callable[[], str]  # a fresh ULID-like id, lower-case base32, safe in a subject
    new_seed: Callable[[], int]  # 64 random bits
    wall_ns: Callable[[], int]
