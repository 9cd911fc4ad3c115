"""Pure. What kvstores may do to a stage's blocks, and what their calls still lack.

Rules: only calls of the epoch that stands are taken, and none of an attachment older than the newest that a
step or a call has named: whoever attached later may have given the block away. A call under way is asked
about again before anything of it is written, and before anything that was read for it is sent. A block of a
load is done when each of its layers came once; a call is done when all its blocks are.
"""

import struct
from dataclasses import dataclass, field
from typing import Any

from chassis.ids import BlockHash, BlockId, Epoch
from chassis.messages import BadMessage
from chassis.messages.tier import (
    OLD_ATTACHMENT,
    OLD_EPOCH,
    LoadBlocks,
    SaveBlocks,
    TierContent,
    TierDone,
    TierStage,
)
from shard_worker.stamps import Stamp

CALLS_MAX = 16  # under way on one link
TOO_MANY = "too_many_calls"
NO_SUCH_BLOCK = "no_such_block"
_STAMP = struct.Struct("<QQii")

Call = SaveBlocks | LoadBlocks


class Fence:
    """Shared by all links of a stage."""

    def __init__(self) -> None:
        self.epoch = Epoch(0)  # 0: none stands
        self.attachment = 0
        self.prior_attachment = 0  # the newest of the epoch that stood before

    def stand(self, epoch: Epoch) -> None:
        self.epoch, self.prior_attachment, self.attachment = epoch, self.attachment, 0

    def end(self) -> None:
        self.epoch = Epoch(0)

    def rise(self, attachment: int) -> None:
        self.attachment = max(self.attachment, attachment)

    def refusal(self, call: Call) -> str:
        """Empty: it may go on."""
        if call.epoch != self.epoch:
            return OLD_EPOCH
        return OLD_ATTACHMENT if call.attachment < self.attachment else ""


@dataclass(frozen=True, slots=True)
class Piece:
    """Pages that came for a block: its layers from `first_layer` on, counted from the stage's first."""

    call: LoadBlocks
    index: int
    first_layer: int
    num_layers: int
    begins: bool = True  # nothing of the block came before

    @property
    def block(self) -> BlockId:
        return self.call.blocks[self.index]

    @property
    def content(self) -> BlockHash:
        return self.call.contents[self.index]

    @property
    def layers(self) -> int:
        """As bits."""
        return ((1 << self.num_layers) - 1) << self.first_layer


@dataclass(slots=True)
class _Load:
    call: LoadBlocks
    came: list[int]  # layers of each block, as bits
    written: list[int]
    refused: set[int] = field(default_factory=set)
    stamps: dict[int, bytes] = field(default_factory=dict)  # of each block


class LinkCalls:
    """Of one link."""

    def __init__(self, stage: TierStage, num_blocks: int) -> None:
        self.stage = stage
        self.late = 0  # contents of calls that are over
        self._num_blocks = num_blocks
        self._last = 0
        self._saves: dict[int, SaveBlocks] = {}
        self._loads: dict[int, _Load] = {}

    def open(self, call: Call) -> str:
        """Why it is not taken; empty: it is. Raises BadMessage."""
        if call.call <= self._last:
            raise BadMessage(f"tier: call {call.call} after {self._last}")
        self._last = call.call
        if len(self._saves) + len(self._loads) >= CALLS_MAX:
            return TOO_MANY
        if max(call.blocks) >= self._num_blocks:
            return NO_SUCH_BLOCK
        if isinstance(call, SaveBlocks):
            self._saves[call.call] = call
        else:
            nothing = [0] * len(call.blocks)
            self._loads[call.call] = _Load(call, nothing, nothing.copy())
        return ""

    def close(self, call: Call) -> bool:
        """It is over, whatever came of it; what still comes is late. False: it was over before."""
        of_kind: dict[int, Any] = self._saves if isinstance(call, SaveBlocks) else self._loads
        return of_kind.pop(call.call, None) is not None

    def placed(self, content: TierContent, payload_bytes: int) -> Piece | None:
        """Where a load's content belongs; None: it is late. Raises BadMessage."""
        if content.call > self._last or content.call in self._saves:
            raise BadMessage(f"tier: content of call {content.call}, which is no load")
        load = self._loads.get(content.call)
        if load is None:
            self.late += 1
            return None
        stage, layers = self.stage, content.layers
        if not (stage.layers.start <= layers.start and layers.stop <= stage.layers.stop):
            raise BadMessage(f"tier: {layers} is not of {stage.layers}")
        if payload_bytes != len(layers) * stage.page_bytes:
            raise BadMessage(f"tier: {payload_bytes} bytes for {len(layers)} pages of {stage.page_bytes}")
        if content.index >= len(load.came):
            raise BadMessage(f"tier: content {content.index} of {len(load.came)}")
        first, begins = layers.start - stage.layers.start, not load.came[content.index]
        piece = Piece(load.call, content.index, first, len(layers), begins)
        if load.came[piece.index] & piece.layers:
            raise BadMessage(f"tier: content {piece.index} came twice")
        load.came[piece.index] |= piece.layers
        return piece

    def written(self, piece: Piece, good: bool, stamp: bytes) -> bool:
        """Or it was not what it had to be. Whether the block is whole, and good: layers that other stages
        saved were stamped by them, and one that says something else holds something else."""
        load = self._loads.get(piece.call.call)
        if load is None:
            return False
        load.written[piece.index] |= piece.layers
        if not good or (stamp and load.stamps.setdefault(piece.index, stamp) != stamp):
            load.refused.add(piece.index)
        return self._whole(load, piece.index) and piece.index not in load.refused

    def done(self, call: LoadBlocks) -> TierDone | None:
        """The end of a load all of whose blocks came."""
        load = self._loads.get(call.call)
        if load is None or not all(self._whole(load, index) for index in range(len(load.came))):
            return None
        self.close(call)
        return TierDone(call.call, refused=tuple(sorted(load.refused)))

    def _whole(self, load: _Load, index: int) -> bool:
        return load.written[index] == (1 << len(self.stage.layers)) - 1


def pack_stamp(stamp: Stamp) -> bytes:
    return _STAMP.pack(*stamp)


def parse_stamp(data: bytes) -> Stamp | None:
    """None: it is none."""
    if len(data) != _STAMP.size:
        return None
    stamp = Stamp(*_STAMP.unpack(data))
    return stamp if stamp.place >= 0 and stamp.fill >= 0 else None
