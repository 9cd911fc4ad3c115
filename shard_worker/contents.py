"""Pure. What full blocks came to when they were written: bits that flip in KV memory are noticed.

Beside the stamp (`stamps.py`) a share of the blocks has a checksum over its pages in all layers of the stage.
Rules:
- only a full block has one, and nobody writes a full block: so it is taken after the step, beside the next;
- who begins to write a block drops its checksum, and one that was being taken then is not kept;
- blocks that a row is to go on from, and those it copies, are compared, if they have one. One that changed
  holds nothing known any more, and whoever reads it is void as with a wrong stamp;
- a running row's own blocks are not compared: memory is looked at when somebody takes it over.
Who reads memory: `block_sums.py`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from chassis.messages.pipeline import FLAG_FRESH, PackedStep
from shard_worker.executor import I32, I64, U32

SHARE_ONE = 1 << 32


class Written(NamedTuple):
    """By a step that was begun."""

    turn: int
    full: I64  # blocks it writes the last position of


class Kept(NamedTuple):
    """What is to be compared."""

    block: int
    turn: int  # of who wrote it
    checksum: int


class Contents:
    """Of one pool."""

    def __init__(self, num_blocks: int, block_size_tokens: int, share: float) -> None:
        """`share`: of full blocks that get a checksum, 0 to 1."""
        assert 0 <= share <= 1
        self._size = block_size_tokens
        self._share = round(share * SHARE_ONE)
        self._chosen = 0  # blocks so far, times the share, modulo one
        self._turn = 0
        self._turns = np.zeros(num_blocks, np.int64)  # who wrote each block last
        self._known = np.zeros(num_blocks, np.bool_)
        self._sums = np.zeros(num_blocks, np.uint64)

    def has(self, block: int) -> bool:
        return bool(self._known[block])

    # ---- written

    def begun(self, kv_slots: I64, copies: tuple[U32, U32] | None = None) -> Written:
        """A step is about to write there, after what it copies."""
        blocks, within = np.divmod(kv_slots, self._size)
        full = blocks[within == self._size - 1]
        turn = self.drop(blocks)
        if copies is not None:
            self._turns[copies[1]], self._known[copies[1]] = turn, False
        return Written(turn, full)

    def drop(self, blocks: I64 | Sequence[int]) -> int:
        """They hold something else from now on. Returns the turn of who writes it."""
        self._turn += 1
        self._turns[blocks] = self._turn
        self._known[blocks] = False
        return self._turn

    def restored(self, block: int) -> Written:
        """It was brought here from elsewhere, full."""
        return Written(self.drop([block]), np.array([block]))

    def choose(self, written: Written, fills: I32) -> list[int]:
        """The blocks that get a checksum. `fills`: of the pool's stamps, after the step."""
        full = written.full
        if not len(full):
            return []
        full = full[(fills[full] == self._size) & (self._turns[full] == written.turn)]
        turns = self._chosen + self._share * np.arange(len(full) + 1)
        self._chosen = int(turns[-1]) % SHARE_ONE
        chosen: list[int] = full[np.diff(turns // SHARE_ONE) > 0].tolist()
        return chosen

    def keep(self, turn: int, blocks: Sequence[int], checksums: Sequence[int]) -> None:
        """As they were read after the turn that wrote them."""
        for block, checksum in zip(blocks, checksums, strict=True):
            if self._turns[block] == turn:
                self._known[block], self._sums[block] = True, checksum

    # ---- taken over

    def kept(self, blocks: Sequence[int]) -> list[Kept]:
        """Of those that have one."""
        return [Kept(b, int(self._turns[b]), int(self._sums[b])) for b in blocks if self._known[b]]

    def reused(
        self, step: PackedStep, block_tables: I32, copies: tuple[U32, U32] | None
    ) -> dict[int, list[int]]:
        """The blocks with a checksum that each fresh row goes on from, or copies and goes on from."""
        starts = np.frombuffer(step.starts, "<u4")
        fresh = np.frombuffer(step.flags, np.uint8) & FLAG_FRESH
        copied: dict[int, int] = {}
        if copies is not None:
            copied = dict(zip(copies[1].tolist(), copies[0].tolist(), strict=True))
        found: dict[int, list[int]] = {}
        for row in fresh.nonzero()[0].tolist():
            table = block_tables[row, : -(-int(starts[row]) // self._size)].tolist()
            blocks = [copied.get(block, block) for block in table] if copied else table
            if known := [block for block in blocks if self._known[block]]:
                found[row] = known
        return found

    def changed(self, kept: Sequence[Kept], checksums: Sequence[int]) -> list[int]:
        """The blocks that came to something else now, and that nobody has written since. They have no
        checksum from here on."""
        blocks = [
            entry.block
            for entry, checksum in zip(kept, checksums, strict=True)
            if checksum != entry.checksum and self._turns[entry.block] == entry.turn
        ]
        self._known[blocks] = False
        return blocks
