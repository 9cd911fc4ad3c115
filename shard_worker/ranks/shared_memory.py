"""Sums over ranks of one host, through memory that their processes share: a tenth of what loopback takes.

The leader makes it without a name, so that nothing of it outlives the processes, and says where it is in its
open files. Two processes can share it if they say the same of where they are: machine, its addresses, user,
compiled code.
"""

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from shard_worker.native import library as native

BOOT = Path("/proc/sys/kernel/random/boot_id")
SPACES = (Path("/proc/self/ns/pid"), Path("/proc/self/ns/net"))  # where ids, and addresses, mean the same


def place() -> str:
    """The same in processes that can share memory; empty: this one can't."""
    try:
        spaces = " ".join(str(path.stat().st_ino) for path in SPACES)
        boot = BOOT.read_text("ascii").strip()
    except (OSError, ValueError):
        return ""
    code = native.digest()
    return f"{boot} {spaces} {os.getuid()} {code}" if code else ""


class SharedCollective:
    """`Collective`."""

    def __init__(self, path: Path, rank: int, size: int, timeout_s: float) -> None:
        """Raises OSError."""
        library = native.native()
        assert library is not None, "only where there is compiled code"
        self._library, self.rank = library, rank
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), library.shoal_ranks_bytes(size))
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._handle = library.shoal_ranks_open(address, size, rank, round(timeout_s * 1000))
        if self._handle is None:
            raise OSError(f"no memory for {size} ranks")
        # Not at exit: somebody may still wait in it, and the process takes everything with it.
        weakref.finalize(self, library.shoal_ranks_destroy, self._handle).atexit = False

    def sum(self, rows: torch.Tensor) -> torch.Tensor:
        assert rows.dtype == torch.float32 and rows.is_contiguous()
        if self._library.shoal_ranks_sum(self._handle, rows.data_ptr(), rows.numel()):
            raise RuntimeError("a rank did not come to a sum")
        return rows

    def gather(self, own: torch.Tensor, widths: Sequence[int]) -> list[torch.Tensor]:
        assert own.dtype == torch.float32 and own.is_contiguous()
        counts = np.array([len(own) * width for width in widths], np.int64)
        found = [] if self.rank else [own.new_empty(len(own), width) for width in widths]
        parts = (ctypes.c_void_p * len(found))(*(part.data_ptr() for part in found)) if found else None
        counted = native.address(counts)
        if self._library.shoal_ranks_gather(self._handle, own.data_ptr(), counted, parts):
            raise RuntimeError("a rank did not come with its part")
        return found

    def abort(self) -> None:
        self._library.shoal_ranks_abort(self._handle)


@contextmanager
def new_memory(size: int) -> Iterator[Path]:
    """Of zeros, for so many ranks: where to open it meanwhile; who has it open keeps it. Raises OSError."""
    library = native.native()
    assert library is not None, "only where there is compiled code"
    handle = os.memfd_create("shoal-ranks")
    try:
        os.ftruncate(handle, library.shoal_ranks_bytes(size))
        yield Path(f"/proc/{os.getpid()}/fd/{handle}")
    finally:
        os.close(handle)
