"""Memory that a network card reads and writes by itself: what a link registers once, and ranges of it.

It lies in the host, or in a device that computes (GPUDirect): then a payload that is there never passes
through the host's memory. Who owns the memory keeps it in place and unchanged as long as it says.
"""

from dataclasses import dataclass
from typing import Protocol


class Memory(Protocol):
    @property
    def address(self) -> int: ...

    @property
    def capacity(self) -> int:
        """Bytes."""

    @property
    def device(self) -> int | None:
        """The GPU it lies in; None: the host."""


@dataclass(frozen=True, slots=True)
class MemoryRange:
    memory: Memory
    offset: int
    nbytes: int

    @property
    def address(self) -> int:
        return self.memory.address + self.offset
