"""Pure. What each block of a stage's pool holds, as its worker saw it written: the cache cannot lie to it.

A stamp says of a block: the digest of its sequence's ids before and after it (`chassis/sequence_digest.py`),
its place in the sequence, how full it is, and the epoch that wrote it. Stamps live as long as the KV memory
does; what slots hold is of one epoch. Rules:
- stamps are taken when a step has been computed, in order, so they never say of a step what it did not do;
  of one that was begun and not finished, `void` says that its blocks hold nothing known;
- after that, every row of the step is proven: the blocks of its table, in order, each begin where the one
  before ends, and the last ends with what the row has computed, reckoned from what the batcher says of the
  ids before a fresh row. A wrong, stale, moved or overwritten block breaks this chain;
- of a block that a step wrote twice nothing is known: what was computed beside another's writing is not right
  because its stamp was the last;
- a row that is not proven is void, on all stages behind as well, and stays so until its slot begins anew:
  what it writes gets no stamp. Slots whose batcher says nothing of them are not judged.
With compiled code `native/stamps.py` does the same, sooner.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chassis.ids import Epoch
from chassis.messages.pipeline import FLAG_FRESH, FLAG_SAMPLES, LAST_SAMPLED, PackedStep
from chassis.sequence_digest import words
from shard_worker.contents import Contents
from shard_worker.executor import I32, I64, U32

BLOCK = np.dtype([("begin", "<u8"), ("end", "<u8"), ("epoch", "<u8"), ("index", "<i4"), ("fill", "<i4")])
SLOT = np.dtype([("digest", "<u8"), ("position", "<i8"), ("last", "<u4"), ("state", "<u4")])
UNKNOWN, GOOD, VOID = 0, 1, 2  # states of a slot
RATE_ONE = 1 << 32


class Stamp(NamedTuple):
    """Of a block, for whoever moves its content elsewhere."""

    begin: int  # digest of the ids before it
    end: int  # and with those in it
    place: int  # which block of its sequence it is
    fill: int  # tokens in it; 0: nothing is known; -n: n, a copy to be gone on from at any of them


class Stamps:
    """Of one pool."""

    def __init__(self, num_blocks: int, block_size_tokens: int, rate: float = 1.0) -> None:
        """`rate`: the share of rows that are proven, 0 to 1."""
        assert 0 <= rate <= 1
        self.block_size_tokens = block_size_tokens
        self.blocks = np.zeros(num_blocks, BLOCK)
        self._slots = np.zeros(0, SLOT)
        self._epoch = 0
        self._rate = round(rate * RATE_ONE)
        self._turn = 0  # rows so far, times the rate, modulo one
        self.contents: Contents | None = None  # None: memory is trusted to hold what was written

    def begin(self, epoch: Epoch, slots_max: int) -> None:
        """A new epoch, with empty tables."""
        self._epoch = epoch
        self._slots = np.zeros(slots_max, SLOT)

    def watch(self, share: float) -> None:
        """`share`: of full blocks whose memory is compared when it is reused."""
        self.contents = Contents(len(self.blocks), self.block_size_tokens, share) if share else None

    # ---- blocks that move --------------------------------------------------------------------------

    def get(self, block: int) -> Stamp:
        begin, end, _, place, fill = self.blocks[block].tolist()
        return Stamp(begin, end, place, fill)

    def put(self, block: int, stamp: Stamp) -> None:
        """The content was brought here from elsewhere."""
        self.blocks[block] = (stamp.begin, stamp.end, self._epoch, stamp.place, stamp.fill)

    def forget(self, blocks: int | U32) -> None:
        """Their content is about to be another one."""
        self.blocks[blocks] = 0

    def partly(self, block: int) -> None:
        """More of a content that is brought here comes; whether a step wrote meanwhile is kept."""
        self.blocks["fill"][block] = 0

    def restored(self, block: int, stamp: Stamp) -> bool:
        """All of a content was brought here. False: a step wrote there meanwhile, and nothing is known."""
        if self.blocks[block]["epoch"]:
            self.forget(block)
            return False
        self.put(block, stamp)
        return True

    def copy(self, sources: U32, targets: U32) -> None:
        """Contents were copied within the pool, to be gone on from at any place up to the end."""
        copied = self.blocks[sources]
        copied["epoch"], copied["fill"] = self._epoch, -np.abs(copied["fill"])
        self.blocks[targets] = copied

    def void(self, step: PackedStep, block_tables: I32) -> None:
        """The step was begun, and perhaps wrote something."""
        starts = _u32(step.starts)
        self._forget(block_tables, starts, starts + _u32(step.num_tokens), range(len(starts)))

    def _forget(self, block_tables: I32, starts: I64 | U32, ends: I64 | U32, rows: Sequence[int]) -> None:
        """What these rows of a step wrote is not known."""
        size = self.block_size_tokens
        for row in rows:
            written = block_tables[row, int(starts[row]) // size : -(-int(ends[row]) // size)]
            self.blocks["fill"][written] = 0

    # ---- steps -------------------------------------------------------------------------------------

    def note(self, step: PackedStep, block_tables: I32, sampled: U32) -> tuple[int, ...]:
        """The step was computed. `block_tables`: [n, widest], as it was laid out; `sampled`: one id for
        each row that samples, on the last stage. Returns the rows that are void, ascending."""
        slots, counts = _u32(step.slots).astype(np.int64), _u32(step.num_tokens).astype(np.int64)
        starts = _u32(step.starts).astype(np.int64)
        flags = np.frombuffer(step.flags, np.uint8)
        rows = self._begun(step, slots, starts, (flags & FLAG_FRESH) != 0)
        self._write(step, rows, slots, starts, counts, block_tables)
        self._slots[slots] = rows
        self._prove(rows, block_tables)
        self._slots["state"][slots] = rows["state"]
        if len(sampled):
            self._slots["last"][slots[(flags & FLAG_SAMPLES) != 0]] = sampled
        void_rows = tuple((rows["state"] == VOID).nonzero()[0].tolist())
        self._forget(block_tables, starts, starts + counts, void_rows)
        return void_rows

    def _begun(self, step: PackedStep, slots: I64, starts: I64, fresh: NDArray[np.bool_]) -> NDArray[np.void]:
        """[n]: the slots as they stand before this step's tokens."""
        rows = self._slots[slots]
        rows["state"][(rows["position"] != starts) & (rows["state"] == GOOD)] = UNKNOWN
        if len(step.fresh):
            rows["position"][fresh] = starts[fresh]
            if step.digests:
                rows["digest"][fresh] = np.frombuffer(step.digests, "<u8")
                rows["state"][fresh] = GOOD
            else:
                rows["state"][fresh] = UNKNOWN
        rows["state"][list(step.void_rows)] = VOID
        return rows

    def _write(
        self,
        step: PackedStep,
        rows: NDArray[np.void],
        slots: I64,
        starts: I64,
        counts: I64,
        block_tables: I32,
    ) -> None:
        """Stamps the blocks that the step wrote, and moves the rows on."""
        size = self.block_size_tokens
        offsets = np.cumsum(counts) - counts
        of = np.arange(len(counts)).repeat(counts)
        positions = np.arange(len(of)) + (starts - offsets)[of]
        token_ids = _u32(step.token_ids)
        left_open = token_ids == LAST_SAMPLED
        if left_open.any():
            token_ids = np.where(left_open, rows["last"][of], token_ids)
        sums = np.zeros(len(of) + 1, np.uint64)
        np.cumsum(words(token_ids, positions.astype(np.uint64)), out=sums[1:])
        sums = sums[:-1] - sums[offsets][of], sums[1:] - sums[offsets][of]  # type: ignore[assignment]
        before, after = rows["digest"][of] + sums[0], rows["digest"][of] + sums[1]
        firsts = ((positions % size == 0) | (np.arange(len(of)) == offsets[of])).nonzero()[0]
        lasts = np.append(firsts[1:], len(of)) - 1
        index, within = np.divmod(positions[firsts], size)
        blocks = block_tables[of[firsts], index]
        old = self.blocks[blocks]
        joined = (np.abs(old["fill"]) == within) & (old["end"] == before[firsts])
        joined |= within < -old["fill"]
        joined &= old["index"] == index
        known = (rows["state"][of[firsts]] == GOOD) & ((within == 0) | joined)
        _, which, writers = np.unique(blocks, return_inverse=True, return_counts=True)
        known &= writers[which] == 1
        new = np.zeros(len(firsts), BLOCK)
        new["begin"] = np.where(within == 0, before[firsts], old["begin"])
        new["end"] = after[lasts]
        new["epoch"] = self._epoch
        new["index"] = index
        new["fill"] = np.where(known, positions[lasts] % size + 1, 0)
        self.blocks[blocks] = new
        rows["digest"] = after[offsets + counts - 1]
        rows["position"] = starts + counts

    def _prove(self, rows: NDArray[np.void], block_tables: I32) -> None:
        """Rows whose blocks do not hold what they computed are void."""
        size = self.block_size_tokens
        turns = self._turn + self._rate * np.arange(len(rows) + 1)
        self._turn = int(turns[-1]) % RATE_ONE
        chosen = (rows["state"] == GOOD) & (np.diff(turns // RATE_ONE) > 0)
        if not chosen.any():
            return
        lens = -(-rows["position"] // size)
        widest = int(lens.max())
        stamps = self.blocks[block_tables[:, :widest]]
        index = np.arange(widest)
        here, inner = index < lens[:, None], index < lens[:, None] - 1
        last = stamps[np.arange(len(rows)), lens - 1]
        whole = last["end"] == rows["digest"]
        whole &= last["fill"] == rows["position"] - (lens - 1) * size
        whole &= ((stamps["index"] == index) | ~here).all(1)
        whole &= ((stamps["epoch"] <= self._epoch) | ~here).all(1)
        whole &= ((stamps["fill"] == size) | ~inner).all(1)
        whole &= ((stamps["end"][:, :-1] == stamps["begin"][:, 1:]) | ~inner[:, :-1]).all(1)
        rows["state"][chosen & ~whole] = VOID


MakeStamps = Callable[[int, int, float], Stamps]  # blocks, tokens of a block, rate


def _u32(column: bytes) -> U32:
    return np.frombuffer(column, "<u4")
