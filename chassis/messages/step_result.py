"""Results: what the last stage tells the batcher of a step. Columns are those of `pipeline.py`."""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from chassis.ids import MAX_U32, Epoch, StepNumber
from chassis.messages import check, parse
from chassis.messages.pipeline import LE_U32, StageTiming, build_timing, column, pack, parse_timings
from chassis.messages.sampling import TokenLogprobs, build_logprobs, parse_logprobs
from chassis.wire import pipeline_pb2 as pb


class PromptAnswer(NamedTuple):
    row: int
    first_index: int  # in the prompt, of the ids told of
    entries: tuple[TokenLogprobs, ...]


class StepResult(NamedTuple):
    epoch: Epoch
    number: StepNumber
    token_ids: tuple[int, ...]  # one a sampling row, in row order
    timings: tuple[StageTiming, ...]
    logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()  # by place among token_ids, ascending
    prompts: tuple[PromptAnswer, ...] = ()  # one an ask, in order
    nan_places: tuple[int, ...] = ()  # among token_ids, ascending: their logits were no numbers
    void_rows: tuple[
        int, ...
    ] = ()  # of the step, ascending: their blocks hold other content, ids stand for nothing
    waiting_places: tuple[int, ...] = ()  # as nan_places: not drawn, their grammar is compiled still
    refusals: tuple[tuple[int, str], ...] = ()  # the same, and why: it can't be followed


def build_result(
    epoch: int,
    number: int,
    token_ids: ArrayLike,
    timings: Sequence[StageTiming] = (),
    logprobs: Sequence[tuple[int, TokenLogprobs]] = (),
    prompts: Sequence[PromptAnswer] = (),
    nan_places: Sequence[int] = (),
    void_rows: Sequence[int] = (),
    waiting_places: Sequence[int] = (),
    refusals: Sequence[tuple[int, str]] = (),
) -> bytes:
    m = pb.StepResult(
        epoch=epoch,
        step=number,
        token_ids=np.asarray(token_ids, dtype=LE_U32).tobytes(),
        timings=[build_timing(t) for t in timings],
    )
    if logprobs:
        m.logprob_places = pack([place for place, _ in logprobs])
        m.MergeFrom(pb.StepResult(logprobs=build_logprobs([entry for _, entry in logprobs])))
    for row, first_index, entries in prompts:
        m.prompts.add(row=row, first_index=first_index, logprobs=build_logprobs(entries))
    if nan_places:
        m.nan_places = pack(nan_places)
    if void_rows:
        m.void_rows = pack(void_rows)
    if waiting_places:
        m.waiting_places = pack(waiting_places)
    for place, why in refusals:
        m.refusals.add(place=place, why=why)
    return m.SerializeToString()


def parse_result(data: bytes) -> StepResult:
    m = parse(pb.StepResult, data)
    epoch, number, ids, timings = m.epoch, m.step, m.token_ids, m.timings
    check(epoch > 0 and number > 0, "result: epoch and number start at 1")
    check(not len(ids) % 4, "result: token_ids")
    result = StepResult(
        Epoch(epoch),
        StepNumber(number),
        struct.unpack(f"<{len(ids) // 4}I", ids),
        parse_timings(timings) if timings else (),
    )
    if m.logprob_places or m.prompts or m.nan_places or m.void_rows or m.waiting_places or m.refusals:
        return _parse_rest(m, result)
    return result


def _parse_rest(m: pb.StepResult, result: StepResult) -> StepResult:
    """What few steps bring."""
    places, entries = _places(m.logprob_places, result), parse_logprobs(m.logprobs)
    check(len(places) == len(entries), "result: logprobs do not add up")
    prompts = tuple(PromptAnswer(a.row, a.first_index, parse_logprobs(a.logprobs)) for a in m.prompts)
    check(all(a.first_index for a in prompts), "result: nothing is told of a prompt's first id")
    return result._replace(
        logprobs=tuple(zip(places, entries, strict=True)),
        prompts=prompts,
        nan_places=_places(m.nan_places, result),
        void_rows=_ascending(m.void_rows, MAX_U32),
        waiting_places=_places(m.waiting_places, result),
        refusals=_refusals(m, result),
    )


def _refusals(m: pb.StepResult, result: StepResult) -> tuple[tuple[int, str], ...]:
    refused = tuple((r.place, r.why) for r in m.refusals)
    _check_rising([place for place, _ in refused], len(result.token_ids))
    return refused


def _places(data: bytes, result: StepResult) -> tuple[int, ...]:
    """Among its token ids."""
    return _ascending(data, len(result.token_ids))


def _ascending(data: bytes, limit: int) -> tuple[int, ...]:
    if not data:
        return ()
    places = tuple(column(data, "places").tolist())
    _check_rising(places, limit)
    return places


def _check_rising(places: Sequence[int], limit: int) -> None:
    rising = all(a < b for a, b in zip(places, (*places[1:], limit), strict=False))
    check(rising, "result: places out of order")
