"""What the ranks of a stage do together: sums of rows over all, and parts that the first rank takes in.

Two ways: memory that they share (`shared_memory.py`), where all are processes of one host with compiled code;
else torch.distributed, gloo on processors, NCCL where a device computes. Rules: every rank calls the same in
the same order. A sum has one order, rank by rank, whatever shares the step: NCCL alone chooses its own. What
takes longer than the limit fails, and with it the stage; who learns sooner that a rank is gone aborts.
"""

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed

STORE_PREFIX = "shoal"
NO_TAG = 1  # nobody sends with it
dist: Any = torch.distributed  # its types leave out what is used here


class Collective(Protocol):
    def sum(self, rows: torch.Tensor) -> torch.Tensor:
        """Over all ranks, in place; float32, contiguous. Raises RuntimeError."""

    def gather(self, own: torch.Tensor, widths: Sequence[int]) -> list[torch.Tensor]:
        """`own`: [k, widths[rank]], float32, contiguous. Of all ranks at the first, nothing elsewhere.
        Raises RuntimeError."""

    def abort(self) -> None:
        """From any thread, for good: whoever waits gives up at once."""


def meeting_point(
    host: str, port: int, size: int, timeout_s: float, listener: socket.socket | None = None
) -> Any:
    """A store over TCP through which ranks find each other; with a `listener` there it is kept by this
    process. Raises RuntimeError."""
    limit = timedelta(seconds=timeout_s)
    if listener is None:
        return dist.TCPStore(host, port, size, False, limit)
    handle = listener.detach()
    return dist.TCPStore(host, port, size, True, limit, wait_for_workers=False, master_listen_fd=handle)


class GroupCollective:
    """`Collective` by torch.distributed."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        host: str,
        timeout_s: float,
        device: torch.device,
    ) -> None:
        """`host`: of this rank, as the others reach it; `device`: where the rows lie that are summed up.
        Waits for the others. Raises RuntimeError."""
        self.rank, self.size = rank, size
        limit = timedelta(seconds=timeout_s)
        prefixed = dist.PrefixStore(STORE_PREFIX, store)
        self._nccl = device.type == "cuda"
        self._group: Any
        if self._nccl:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._group = dist.ProcessGroupNCCL(prefixed, rank, size, options)
        else:
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            options._timeout = limit
            self._group = dist.ProcessGroupGloo(prefixed, rank, size, options)
        self._parts = torch.empty(0)

    def sum(self, rows: torch.Tensor) -> torch.Tensor:
        if self.size == 2 or self._nccl:  # of two numbers there is one order
            self._group.allreduce([rows]).wait()
            return rows
        count = rows.numel()
        if self._parts.numel() < self.size * count:
            self._parts = torch.empty(self.size * count)
        parts = list(self._parts[: self.size * count].view(self.size, *rows.shape))
        self._group.allgather([parts], [rows]).wait()
        rows.copy_(parts[0])
        for part in parts[1:]:
            rows += part
        return rows

    def gather(self, own: torch.Tensor, widths: Sequence[int]) -> list[torch.Tensor]:
        if self.rank:
            self._group.send([own], 0, 0).wait()
            return []
        found = [own]
        for rank, width in enumerate(widths[1:], 1):
            found.append(own.new_empty(len(own), width))
            self._group.recv([found[-1]], rank, 0).wait()
        return found

    def abort(self) -> None:
        if self._nccl:
            self._group.abort()
            return
        # Gloo's own abort frees nobody who waits. A wait that times out does: it closes all connections.
        try:
            self._group.recv([torch.empty(1)], (self.rank + 1) % self.size, NO_TAG).wait(
                timedelta(milliseconds=1)
            )
        except RuntimeError:
            pass
