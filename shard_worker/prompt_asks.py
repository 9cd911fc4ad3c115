"""Pure. What steps ask of their prompts: checked, as columns over the step's tokens, and answered."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from chassis.messages import BadMessage
from chassis.messages.pipeline import PackedStep, PromptAsk
from chassis.messages.sampling import TOP_LOGPROBS_MAX, TokenLogprobs
from chassis.messages.step_result import PromptAnswer
from shard_worker.executor import I64, LogprobColumns, StepInputs


def with_asks(inputs: StepInputs, asks: tuple[PromptAsk, ...], vocab_size: int) -> StepInputs:
    """Raises BadMessage."""
    counts = np.diff(inputs.row_offsets).tolist()
    last = -1
    for row, first, num_tokens, next_id, top in asks:
        if not last < row < len(counts):
            raise BadMessage("step: a prompt's row is none, or out of order")
        if not 0 < num_tokens <= counts[row] - first:
            raise BadMessage("step: a prompt's row has no such tokens")
        if next_id >= vocab_size or top > min(TOP_LOGPROBS_MAX, vocab_size):
            raise BadMessage("step: a prompt's id or number of likeliest is out of range")
        last = row
    return replace(inputs, prompt_asks=asks)


def places_of(inputs: StepInputs) -> tuple[I64, I64, I64]:
    """Of all asks, one after another: tokens among the step's, the ids behind them, how many likeliest."""
    places, following, tops = [], [], []
    for row, first, num_tokens, next_id, top in inputs.prompt_asks:
        begin = int(inputs.row_offsets[row]) + first
        end = begin + num_tokens
        places.append(np.arange(begin, end))
        following += [inputs.token_ids[begin + 1 : end].astype(np.int64), np.array([next_id], np.int64)]
        tops.append(np.full(num_tokens, top, np.int64))
    return np.concatenate(places), np.concatenate(following), np.concatenate(tops)


def answers(step: PackedStep, columns: LogprobColumns) -> list[PromptAnswer]:
    starts = np.frombuffer(step.starts, np.dtype("<u4"))
    entries, found, end = entries_of(columns), [], 0
    for row, first, num_tokens, *_ in step.prompt_asks:
        begin, end = end, end + num_tokens
        found.append(PromptAnswer(row, int(starts[row]) + first + 1, tuple(entries[begin:end])))
    return found


def entries_of(columns: LogprobColumns) -> Sequence[TokenLogprobs]:
    ends = columns.top_lens.cumsum()
    ids, logprobs = columns.top_ids.tolist(), columns.top_logprobs.tolist()
    return [
        TokenLogprobs(logprob, rank, tuple(ids[begin:end]), tuple(logprobs[begin:end]))
        for logprob, rank, begin, end in zip(
            columns.logprobs.tolist(),
            columns.ranks.tolist(),
            (ends - columns.top_lens).tolist(),
            ends.tolist(),
            strict=True,
        )
    ]
