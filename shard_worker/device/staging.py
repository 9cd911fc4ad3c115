"""Order on the device, and the host memory that copies to and from it use.

Three lanes (streams): one computes, one brings activations in, one takes results out. A mark is a place in
a lane: another lane can be told to go on after it, the host can wait for it. So a step's results leave
while the next one computes, and the next one's activations arrive before it does. Host buffers are pinned,
without which no copy runs beside anything; each belongs to a turn, and a turn is taken again when its last
results are out. Without streams (on the processor) all work is done when it is called, and marks are
nothing. What a link reads from the device by itself (GPUDirect) does not leave it: `keep`.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from chassis.transport.registered import MemoryRange
from shard_worker.device.direct import DevicePool, tensor_of

_ALIGNMENT = 256  # bytes
TURNS = 3  # steps under way: one being sent, one waiting to be, one computing


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def recorded_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


class Mark:
    """A place in a lane's work."""

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        self._event = event

    @property
    def event(self) -> torch.cuda.Event | None:
        return self._event

    def passed(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Blocks the calling thread, not the interpreter."""
        if self._event is not None:
            self._event.synchronize()


class Lane:
    """Work on the device in the order it is given."""

    def __init__(self, device: torch.device) -> None:
        self.stream = _stream(device) if device.type == "cuda" else None

    def working(self) -> AbstractContextManager[object]:
        """What is called inside goes into this lane."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def mark(self) -> Mark:
        if self.stream is None:
            return Mark()
        return Mark(recorded_event(self.stream))

    def after(self, mark: Mark) -> None:
        """What follows in this lane waits for the mark; the host doesn't."""
        if self.stream is not None and mark.event is not None:
            self.stream.wait_event(mark.event)


class HostBuffer:
    """Bytes that grow; pinned where a device copies."""

    def __init__(self, device: torch.device, num_bytes: int = 0) -> None:
        self._pinned = device.type == "cuda"
        self.bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)

    def upto(self, num_bytes: int) -> torch.Tensor:
        """The first so many. What was there is lost when it grows: only at the beginning of a turn."""
        if num_bytes > len(self.bytes):
            self.bytes = torch.empty(_grown(num_bytes), dtype=torch.uint8, pin_memory=self._pinned)
        return self.bytes[:num_bytes]


class DeviceBuffer:
    """Bytes on the device that grow. Used in one lane only, in whose order the old ones are given back."""

    def __init__(self, device: torch.device, num_bytes: int = 0) -> None:
        self._device = device
        self.bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def upto(self, num_bytes: int) -> torch.Tensor:
        if num_bytes > len(self.bytes):
            self.bytes = torch.empty(_grown(num_bytes), dtype=torch.uint8, device=self._device)
        return self.bytes[:num_bytes]


def _grown(num_bytes: int) -> int:
    return 1 << max(12, (num_bytes - 1).bit_length())


@dataclass(slots=True, eq=False)
class Turn:
    """What one step under way has for itself."""

    columns: HostBuffer  # the packed step
    received: HostBuffer  # activations in
    arrived: torch.Tensor  # the same on the device
    leaving: MemoryRange  # activations out, on the device
    sent: HostBuffer
    ids: HostBuffer
    out: Mark = field(default_factory=Mark)  # all of its copies are over


class Staging:
    def __init__(self, device: torch.device, activation_bytes_max: int) -> None:
        """`activation_bytes_max`: of a step."""
        self.device = device
        apart = -(-activation_bytes_max // _ALIGNMENT) * _ALIGNMENT
        self.pool = DevicePool(TURNS * apart, device)
        self.compute, self.inward, self.outward = Lane(device), Lane(device), Lane(device)
        self._turns = [self._turn(i * apart, activation_bytes_max) for i in range(TURNS)]
        self._next = 0

    def _turn(self, offset: int, num_bytes: int) -> Turn:
        def here() -> HostBuffer:
            return HostBuffer(self.device, num_bytes)

        arrived = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        leaving = MemoryRange(self.pool, offset, num_bytes)
        small = [HostBuffer(self.device) for _ in range(2)]
        return Turn(small[0], here(), arrived, leaving, here(), small[1])

    def take(self) -> Turn:
        """Blocks while the step that had it last is not out."""
        turn = self._turns[self._next]
        self._next = (self._next + 1) % TURNS
        turn.out.wait()
        return turn

    def bring(self, turn: Turn, activations: memoryview) -> torch.Tensor:
        """Activations onto the device; what computes next waits for them. The caller may reuse its memory."""
        num_bytes = activations.nbytes
        host = turn.received.upto(num_bytes)
        host.numpy()[:] = np.frombuffer(activations, np.uint8)
        with self.inward.working():
            there = turn.arrived[:num_bytes]
            there.copy_(host, non_blocking=True)
        self.compute.after(self.inward.mark())
        return there

    def leave(self, turn: Turn, hidden: torch.Tensor) -> memoryview:
        """Sends a tensor that the next step may overwrite; the bytes are there when `turn.out` is."""
        parting = self._part(turn, hidden)
        host = turn.sent.upto(len(parting))
        self._out(turn, parting, host)
        return host.numpy().data

    def keep(self, turn: Turn, hidden: torch.Tensor) -> MemoryRange:
        """The same, but it stays on the device; nothing overwrites it before the turn is taken again."""
        parting = self._part(turn, hidden)
        turn.out = self.compute.mark()
        return MemoryRange(self.pool, turn.leaving.offset, len(parting))

    def _part(self, turn: Turn, hidden: torch.Tensor) -> torch.Tensor:
        with self.compute.working():
            parting = tensor_of(turn.leaving)[: hidden.numel() * hidden.element_size()]
            parting.view(hidden.dtype).view(hidden.shape).copy_(hidden)
        return parting

    def leave_ids(self, turn: Turn, ids: torch.Tensor) -> NDArray[np.int64]:
        """[k] int64 that nothing overwrites."""
        host = turn.ids.upto(ids.numel() * 8).view(torch.int64)
        self._out(turn, ids, host)
        return host.numpy()

    def end(self, turn: Turn) -> Mark:
        """Of a step that sends nothing."""
        turn.out = self.compute.mark()
        return turn.out

    def _out(self, turn: Turn, there: torch.Tensor, here: torch.Tensor) -> None:
        self.outward.after(self.compute.mark())
        with self.outward.working():
            here.copy_(there, non_blocking=True)
            if self.outward.stream is not None:
                there.record_stream(self.outward.stream)  # not given to others before the copy is over
        turn.out = self.outward.mark()
