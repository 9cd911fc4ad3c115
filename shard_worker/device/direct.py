"""Memory of a device that links write into and read from by themselves (GPUDirect), and when it can be read.

On the processor it is memory of the host: the same path, over any kind of NIXL link.
"""

import ctypes
from collections.abc import Callable

import torch

from chassis import log
from chassis.transport.registered import MemoryRange

# of the CUDA driver's interface
_WRITES_ORDERING = 118  # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING
_TO_OWNER = 100  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER
_CURRENT_CONTEXT = 0  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX


class DevicePool:
    """`Memory` that is a tensor."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Raises torch.OutOfMemoryError."""
        self.bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.address = self.bytes.data_ptr()
        self.capacity = num_bytes
        self.device = None if device.type == "cpu" else self.bytes.get_device()


def tensor_of(at: MemoryRange) -> torch.Tensor:
    """[nbytes] uint8, in place."""
    assert isinstance(at.memory, DevicePool)
    return at.memory.bytes[at.offset : at.offset + at.nbytes]


def flush_for(device: torch.device, driver: Callable[[], ctypes.CDLL] | None = None) -> Callable[[], None]:
    """What is to be called, on a thread with the device's context, between a notification and the work that
    reads what it announced: a card's writes need not be seen by the GPU as soon as they are done. Most GPUs
    order them by themselves; then it does nothing. (CUDA driver API, cuFlushGPUDirectRDMAWrites.)

    Raises RuntimeError when the driver says neither.
    """
    if device.type == "cpu":
        return _nothing
    library = driver() if driver is not None else ctypes.CDLL("libcuda.so.1")
    ordering = ctypes.c_int()
    handle = ctypes.c_int()
    _check(library.cuDeviceGet(ctypes.byref(handle), device.index or 0), "cuDeviceGet")
    asked = library.cuDeviceGetAttribute(ctypes.byref(ordering), _WRITES_ORDERING, handle)
    _check(asked, "cuDeviceGetAttribute")
    if ordering.value >= _TO_OWNER:
        return _nothing
    log.info("a card's writes are flushed", device=str(device))
    flush = library.cuFlushGPUDirectRDMAWrites

    def flushed() -> None:
        _check(flush(_CURRENT_CONTEXT, _TO_OWNER), "cuFlushGPUDirectRDMAWrites")

    return flushed


def _nothing() -> None:
    return None


def _check(result: int, call: str) -> None:
    if result:
        raise RuntimeError(f"{call}: CUDA error {result}")
