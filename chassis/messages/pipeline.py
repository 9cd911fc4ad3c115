"""Steps and greetings: what travels round the ring (results: `step_result.py`).

A step's columns travel as little-endian arrays. `read_step` takes a message apart and leaves them as bytes,
for whoever checks and reads these by compiled code; `unpacked` gives numpy views of them (read-only, no loop
over rows), after checking that all lengths add up; `parse_step` does both. A stage passes a step's header on
by appending its timing to the bytes it got: concatenated protobuf messages merge, and repeated fields grow.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from operator import add
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chassis.ids import MAX_U32, BootId, Epoch, StepNumber
from chassis.messages import BadMessage, check, parse
from chassis.messages.sampling import (
    Sampling,
    build_sampling,
    parse_sampling,
)
from chassis.wire import pipeline_pb2 as pb

FLAG_SAMPLES = 1
FLAG_FRESH = 2
BATCHER_STAGE = MAX_U32  # the batcher's place in a Hello, and kvstore's
LAST_SAMPLED = MAX_U32  # for a token id: left open, the one that the row's slot sampled last

U32 = NDArray[np.uint32]
U8 = NDArray[np.uint8]

LE_U32 = np.dtype("<u4")
_LE_U8 = np.dtype("u1")
_POSITION_MAX = 1 << 31


class LinkKind(Enum):
    """What a link is for, said by the dialling end."""

    CONTROL = "control"  # batcher to each stage; on stage 0 it carries the steps
    RING = "ring"  # stage i to stage i + 1
    RESULT = "result"  # last stage to batcher
    TIER = "tier"  # kvstore to each stage (`chassis/messages/tier.py`)


@dataclass(frozen=True, slots=True)
class SlotStart:
    """What a fresh row's slot needs to know to sample."""

    sampling: Sampling
    seed: int
    prompt_len: int = 0  # where the output begins, if the sampling follows the ids so far
    before: tuple[int, ...] = ()  # then: the ids before the row's first position
    min_tokens: int = 0  # until the output is so long
    stop_ids: tuple[int, ...] = ()  # none of these is drawn


class PromptAsk(NamedTuple):
    """Of one row: log probabilities of the ids that follow `num_tokens` of its tokens."""

    row: int
    first: int  # the first such token, among the row's
    num_tokens: int
    next_id: int  # what follows the last of them
    top: int  # how many of the likeliest at each


class StageTiming(NamedTuple):
    stage: int
    received_ns: int  # wall clock of the stage's host
    wait_ns: int  # received to compute start
    compute_ns: int
    send_ns: int  # the stage's previous send: waiting for credit and writing


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """n rows (sequences), T tokens, B block ids. All arrays are read-only views."""

    epoch: Epoch
    number: StepNumber
    trace_parent: bytes
    slots: U32  # [n]
    num_tokens: U32  # [n], each at least 1
    starts: U32  # [n]: position of each row's first token
    flags: U8  # [n]: FLAG_SAMPLES, FLAG_FRESH
    output_index: U32  # [n]
    token_ids: U32  # [T]: LAST_SAMPLED only for one-stage pipelines, in a row of one that samples
    table_lens: U32  # [n]: block ids that each row appends (fresh: its whole table)
    table: U32  # [B]
    fresh: tuple[SlotStart, ...]  # one per fresh row, in row order
    freed_slots: U32  # forgotten before the rows are read
    timings: tuple[StageTiming, ...]
    prompt_asks: tuple[PromptAsk, ...] = ()  # at most one a row, in row order


class PackedStep(NamedTuple):
    """A step whose columns nobody has looked at: little-endian bytes, named as in `Step`. A tuple: nothing is
    made sooner by a worker that waited."""

    epoch: Epoch
    number: StepNumber
    trace_parent: bytes
    slots: bytes
    num_tokens: bytes
    starts: bytes
    flags: bytes
    output_index: bytes
    token_ids: bytes
    table_lens: bytes
    table: bytes
    fresh: tuple[SlotStart, ...]
    freed_slots: bytes
    timings: tuple[StageTiming, ...]
    prompt_asks: tuple[PromptAsk, ...] = ()
    attachment: int = 0  # to kvstore, at the plan: calls of older ones may touch no block from here on
    digests: bytes = (
        b""  # u64, one a fresh row: of the ids before its first position (`sequence_digest`); or none
    )
    void_rows: tuple[int, ...] = ()  # ascending: stages before found other content in their blocks
    copies: bytes = b""  # u32 pairs, from and to: blocks copied before the rows (`copied_blocks`)


@dataclass(frozen=True, slots=True)
class Hello:
    epoch: Epoch
    stage: int  # of the sender; BATCHER_STAGE for the batcher
    boot: BootId
    kind: LinkKind


# ---- columns ---------------------------------------------------------------------------------------


def pack(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)  # for so few, sooner than an array


def column(data: bytes, what: str, length: int | None = None) -> U32:
    if len(data) % 4 or (length is not None and len(data) != 4 * length):
        raise BadMessage(f"step: {what} has {len(data)} bytes")
    return np.frombuffer(data, dtype=LE_U32)


def build_timing(t: StageTiming) -> pb.StageTiming:
    return pb.StageTiming(
        stage=t.stage,
        received_ns=t.received_ns,
        wait_ns=t.wait_ns,
        compute_ns=t.compute_ns,
        send_ns=t.send_ns,
    )


def parse_timings(timings: Sequence[pb.StageTiming]) -> tuple[StageTiming, ...]:
    listed = timings[:]  # to find the end of what it iterates over, the library raises
    return tuple([StageTiming(t.stage, t.received_ns, t.wait_ns, t.compute_ns, t.send_ns) for t in listed])


# ---- steps -----------------------------------------------------------------------------------------


def build_step(
    epoch: int,
    number: int,
    *,
    slots: Sequence[int] = (),
    num_tokens: Sequence[int] = (),
    starts: Sequence[int] = (),
    flags: Sequence[int] = (),
    output_index: Sequence[int] = (),
    token_ids: Sequence[int] = (),
    table_lens: Sequence[int] = (),
    table: Sequence[int] = (),
    fresh: Sequence[SlotStart] = (),
    freed_slots: Sequence[int] = (),
    trace_parent: bytes = b"",
    prompt_asks: Sequence[PromptAsk] = (),
    attachment: int = 0,
    digests: Sequence[int] = (),
    copies: Sequence[tuple[int, int]] = (),
) -> bytes:
    """A step's header from its columns (see `Step`); no rows is an empty step."""
    return pb.Step(
        epoch=epoch,
        step=number,
        trace_parent=trace_parent,
        slots=pack(slots),
        num_tokens=pack(num_tokens),
        starts=pack(starts),
        flags=bytes(flags),
        output_index=pack(output_index),
        token_ids=pack(token_ids),
        table_lens=pack(table_lens),
        table=pack(table),
        fresh=[_build_start(f) for f in fresh],
        freed_slots=pack(freed_slots),
        prompt_asks=[pb.PromptAsk(**ask._asdict()) for ask in prompt_asks] if prompt_asks else None,
        attachment=attachment,
        block_copies=pack([block for copy in copies for block in copy]),
        stamps=pb.StepStamps(digests=struct.pack(f"<{len(digests)}Q", *digests)) if digests else None,
    ).SerializeToString()


def _build_start(start: SlotStart) -> pb.SlotStart:
    m = pb.SlotStart(sampling=build_sampling(start.sampling), seed=start.seed)
    if start.prompt_len:
        m.prompt_len, m.before = start.prompt_len, pack(start.before)
    if start.min_tokens:
        m.min_tokens, m.stop_ids = start.min_tokens, pack(start.stop_ids)
    return m


def _parse_start(m: pb.SlotStart) -> SlotStart:
    start = SlotStart(parse_sampling(m.sampling), m.seed)
    if not (m.prompt_len or m.min_tokens):
        return start
    before = tuple(column(m.before, "before").tolist())
    stop_ids = tuple(column(m.stop_ids, "stop_ids").tolist())
    return replace(start, prompt_len=m.prompt_len, before=before, min_tokens=m.min_tokens, stop_ids=stop_ids)


def read_step(data: bytes) -> PackedStep:
    """The message alone. Raises BadMessage."""
    m = parse(pb.Step, data)
    epoch, number, trace_parent = m.epoch, m.step, m.trace_parent
    if not (epoch and number):
        raise BadMessage("step: epoch and number start at 1")
    if len(trace_parent) not in (0, 25):
        raise BadMessage("step: trace_parent is 25 bytes")
    fresh, timings, asks = m.fresh, m.timings, m.prompt_asks
    digests, void_rows = _parse_stamps(m, len(fresh)) if m.HasField("stamps") else (b"", ())
    return PackedStep(
        Epoch(epoch),
        StepNumber(number),
        trace_parent,
        m.slots,
        m.num_tokens,
        m.starts,
        m.flags,
        m.output_index,
        m.token_ids,
        m.table_lens,
        m.table,
        tuple(map(_parse_start, fresh[:])) if fresh else (),
        m.freed_slots,
        parse_timings(timings) if timings else (),
        tuple(map(_parse_ask, asks[:])) if asks else (),
        m.attachment,
        digests,
        void_rows,
        m.block_copies,
    )


def copied_blocks(step: PackedStep, num_blocks: int) -> tuple[U32, U32]:
    """Sources and targets of its copies. Raises BadMessage unless blocks are in range, targets differ, and
    rows follow: a step that computes nothing copies nothing."""
    check(bool(step.flags), "step: copies without rows")
    check(len(step.copies) % 8 == 0, "step: a copy of half a pair")
    pairs = np.frombuffer(step.copies, dtype=LE_U32).reshape(-1, 2)
    check(int(pairs.max(initial=0)) < num_blocks, "step: a copied block out of range")
    sources, targets = pairs[:, 0], pairs[:, 1]
    fine = len(np.unique(targets)) == len(targets) and not np.isin(targets, sources).any()
    check(fine, "step: a block copied to twice, or copied from there too")
    return sources, targets


def _parse_stamps(m: pb.Step, num_fresh: int) -> tuple[bytes, tuple[int, ...]]:
    digests, void_rows = m.stamps.digests, tuple(sorted(dict.fromkeys(m.stamps.void_rows)))
    check(len(digests) in (0, 8 * num_fresh), "step: one digest a fresh row")
    check(not void_rows or void_rows[-1] < len(m.flags), "step: a void row that is none")
    return digests, void_rows


def _parse_ask(m: pb.PromptAsk) -> PromptAsk:
    return PromptAsk(m.row, m.first, m.num_tokens, m.next_id, m.top)


def unpacked(step: PackedStep) -> Step:
    """Raises BadMessage unless the columns add up; ranges of slots and blocks are the stage's to check."""
    slots = column(step.slots, "slots")
    n = len(slots)
    num_tokens = column(step.num_tokens, "num_tokens", n)
    starts = column(step.starts, "starts", n)
    output_index = column(step.output_index, "output_index", n)
    table_lens = column(step.table_lens, "table_lens", n)
    token_ids = column(step.token_ids, "token_ids")
    table = column(step.table, "table")
    freed_slots = column(step.freed_slots, "freed_slots")
    check(len(step.flags) == n, "step: one flag a row")
    flags = np.frombuffer(step.flags, dtype=_LE_U8)
    counts = num_tokens.tolist()  # of so few rows lists are sooner looked through than arrays
    check(all(counts), "step: a row without tokens")
    check(max(step.flags, default=0) <= FLAG_SAMPLES | FLAG_FRESH, "step: unknown flag")
    last_end = max(map(add, starts.tolist(), counts), default=0)
    check(last_end < _POSITION_MAX, "step: position out of range")
    check(sum(counts) == len(token_ids), "step: token_ids do not add up")
    check(sum(table_lens.tolist()) == len(table), "step: table does not add up")
    check(int(np.count_nonzero(flags & FLAG_FRESH)) == len(step.fresh), "step: one start a fresh row")
    return Step(
        epoch=step.epoch,
        number=step.number,
        trace_parent=step.trace_parent,
        slots=slots,
        num_tokens=num_tokens,
        starts=starts,
        flags=flags,
        output_index=output_index,
        token_ids=token_ids,
        table_lens=table_lens,
        table=table,
        fresh=step.fresh,
        freed_slots=freed_slots,
        timings=step.timings,
        prompt_asks=step.prompt_asks,
    )


def parse_step(data: bytes) -> Step:
    """Raises BadMessage unless the columns add up."""
    return unpacked(read_step(data))


def add_timing(step_header: bytes, timing: StageTiming, void_rows: Sequence[int] = ()) -> bytes:
    """The header as the next stage gets it."""
    stamps = pb.StepStamps(void_rows=void_rows) if void_rows else None
    return step_header + pb.Step(timings=[build_timing(timing)], stamps=stamps).SerializeToString()


# ---- links --------------------------------------------------------------------------------------------


def build_hello(hello: Hello) -> bytes:
    return pb.Hello(
        epoch=hello.epoch, stage=hello.stage, boot=hello.boot, kind=hello.kind.value
    ).SerializeToString()


def parse_hello(data: bytes) -> Hello:
    m = parse(pb.Hello, data)
    check(m.epoch > 0 and bool(m.boot), "hello: epoch and boot")
    try:
        kind = LinkKind(m.kind)
    except ValueError:
        raise BadMessage(f"hello: kind {m.kind!r} is unknown") from None
    return Hello(Epoch(m.epoch), m.stage, BootId(m.boot), kind)
