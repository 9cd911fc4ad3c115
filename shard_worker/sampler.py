"""From logits to token ids, one per row. The order of operations is frozen:

 1. log probabilities, for rows that ask: of the logits as the model gave them
 2. logit bias is added
 3. ids that the grammar does not allow next, ids outside the allowed ones, the ends of bad words, and before
    min_tokens the ids that would end the output, get no chance (bans that would leave nothing are void)
 4. penalties: repetition divides positive and multiplies other logits of ids in prompt or output; frequency
    (times their number) and presence are subtracted for ids in the output
 5. temperature 0 takes the largest logit, the lowest id among equals, and is done; others divide the logits
 6. top-k keeps every token that is at least the k-th largest
 7. top-p keeps every token at least as probable as the one at which the most probable reach its mass
 8. min-p keeps every token at least so probable as it times the most probable
 9. typical-p keeps every token whose surprise is at least as near to the entropy as that of the one at which
    the nearest reach its mass
10. the draw: inverse CDF in vocabulary order at the row's uniform number

6 to 9 each see what the one before left, as a distribution of its own. Equals stay together, so no step
depends on the order of a sort. Each row is computed by itself: who shares the batch does not matter. Rows
that use none of 1 to 4, 8, 9 pass none of their code. A row whose largest logit is NaN or infinite has no
distribution: it is told by place, and its id stands for nothing; so is one whose grammar is not compiled yet,
or can't be followed.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray

from shard_worker.executor import F32, I64, LogprobColumns, ShapingColumns, StepInputs, StepOutput
from shard_worker.grammar_masks import NO_MASKS, GrammarMasks, masks_of
from shard_worker.least_kept import least_of_mass, least_of_top_k
from shard_worker.prompt_asks import places_of
from shard_worker.uniforms import uniforms

Ids = NDArray[np.uint32]
Logits = torch.Tensor | NDArray[np.float32]
FLOAT_MAX = float(np.finfo(np.float32).max)
RUN = 64  # tokens whose weights are added before the running sum: it need not go over each
NO_BYTES = memoryview(b"")
PIECE_LOGITS = 1 << 21  # of prompts, looked at together: 8 MB, and as much again twice in doubles


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """What the k sampling rows want, as columns."""

    temperature: NDArray[np.float32]  # [k], 0 = greedy
    top_k: NDArray[np.int32]  # [k], 0 = off
    top_p: NDArray[np.float32]  # [k], 1 = off
    seeds: NDArray[np.uint64]  # [k]
    output_index: NDArray[np.int32]  # [k]
    shaping: ShapingColumns | None = None  # None: no row wants more


def columns_of(inputs: StepInputs) -> SamplingColumns:
    return SamplingColumns(
        inputs.temperature, inputs.top_k, inputs.top_p, inputs.seeds, inputs.output_index, inputs.shaping
    )


@torch.inference_mode()
def output(logits: Logits, inputs: StepInputs, prompts: LogprobColumns | None = None) -> StepOutput:
    """What the last stage answers. `logits`: [k, vocabulary], scratch from here on (see `sample`)."""
    columns = columns_of(inputs)
    shaping = columns.shaping
    if shaping is None:
        token_ids, nan_rows = drawn(logits, columns)
        return StepOutput(NO_BYTES, token_ids, None, prompts, nan_rows)
    told, masks = None, masks_of(shaping.grammars)
    if len(shaping.logprob_rows):
        raw = _tensor(logits)[_index(shaping.logprob_rows)].float()
    token_ids, nan_rows = drawn(logits, columns, masks)
    if len(shaping.logprob_rows):
        told = logprobs(raw, token_ids[shaping.logprob_rows].astype(np.int64), shaping)
    undrawn = masks.waiting_rows, masks.refused_rows
    return StepOutput(NO_BYTES, token_ids, told, prompts, nan_rows, *undrawn)


def sample(logits: Logits, columns: SamplingColumns) -> Ids:
    """`drawn` where all logits are numbers."""
    return drawn(logits, columns)[0]


def drawn(
    logits: Logits, columns: SamplingColumns, masks: GrammarMasks = NO_MASKS
) -> tuple[Ids, tuple[int, ...]]:
    """`logits`: [k, vocabulary], any float type, or float32 in numpy (not copied). Rows whose logits the
    parameters change are changed in place. Returns [k] token ids, and the rows that have no distribution."""
    assert logits.shape[0] == len(columns.temperature)
    drawing = np.flatnonzero(columns.temperature > 0)
    shaping = columns.shaping
    if shaping is not None and len(shaping.rows):
        logits = shape_logits(_tensor(logits).float(), shaping, masks)
    chosen, peaks = _largest(logits)
    nan_rows = np.flatnonzero(~np.isfinite(peaks))
    if len(nan_rows):
        drawing = np.setdiff1d(drawing, nan_rows)
    if len(drawing):
        tensor = _tensor(logits)
        if len(drawing) < len(chosen):
            tensor = tensor[torch.from_numpy(drawing).to(tensor.device)]
        kept = weights(tensor, columns.temperature[drawing], columns.top_k[drawing], columns.top_p[drawing])
        if shaping is not None:
            keep_shapes(kept, drawing, shaping)
        chosen[drawing] = _draw(kept, uniforms(columns.seeds[drawing], columns.output_index[drawing]))
    return chosen, tuple(nan_rows.tolist())


def _tensor(logits: Logits) -> torch.Tensor:
    return logits if isinstance(logits, torch.Tensor) else torch.from_numpy(logits)


def _largest(logits: Logits) -> tuple[Ids, F32]:
    """[k] ids, the first of equals, and their logits: NaN is the largest, in both libraries. On the CPU numpy
    takes a seventh of torch's time."""
    if isinstance(logits, torch.Tensor) and logits.device.type == "cpu" and logits.dtype == torch.float32:
        logits = logits.numpy()
    if isinstance(logits, np.ndarray):
        places = logits.argmax(-1)
        return places.astype(np.uint32), logits[np.arange(len(places)), places]
    peaks, at = logits.max(dim=-1)
    return at.cpu().numpy().astype(np.uint32), peaks.float().cpu().numpy()


# ---- 2 to 4: changes of logits ----------------------------------------------------------------------


def _index(places: I64) -> torch.Tensor:
    return torch.from_numpy(places)


def shape_logits(logits: torch.Tensor, shaping: ShapingColumns, masks: GrammarMasks) -> torch.Tensor:
    """[k, vocabulary] float32, in place."""
    _bias(logits, shaping)
    for row, mask in masks.rows:
        logits[row].masked_fill_(torch.from_numpy(~mask).to(logits.device), -torch.inf)
    _mask(logits, shaping)
    _penalise(logits, shaping)
    return logits


def _bias(logits: torch.Tensor, shaping: ShapingColumns) -> None:
    if len(shaping.bias_ids):
        at = _index(shaping.bias_rows), _index(shaping.bias_ids)
        logits[at] += torch.from_numpy(shaping.bias).to(logits.device)


def _mask(logits: torch.Tensor, shaping: ShapingColumns) -> None:
    for row, ids in shaping.allowed:
        kept = logits[row, _index(ids)]
        logits[row] = -torch.inf
        logits[row, _index(ids)] = kept
    if len(shaping.banned_ids):
        logits[_index(shaping.banned_rows), _index(shaping.banned_ids)] = -torch.inf


def _penalise(logits: torch.Tensor, shaping: ShapingColumns) -> None:
    """All rows at once, and of each only the ids it has seen."""
    if not len(shaping.seen_ids):
        return
    lens = shaping.seen_lens

    def each(values: F32) -> torch.Tensor:
        return torch.from_numpy(values.repeat(lens)).to(logits.device)

    at = _index(shaping.penalty_rows.repeat(lens)), _index(shaping.seen_ids)
    counts = torch.from_numpy(shaping.seen_counts).to(logits.device)
    x, repetition = logits[at], each(shaping.repetition)
    x = torch.where(x > 0, x / repetition, x * repetition)
    x -= each(shaping.frequency) * counts
    x -= each(shaping.presence) * (counts > 0)
    logits[at] = x.clamp(max=FLOAT_MAX)  # divided by next to nothing: no distribution has an infinity


# ---- 5 to 9: the distribution -----------------------------------------------------------------------


def weights(
    logits: torch.Tensor,
    temperature: NDArray[np.float32],
    top_k: NDArray[np.int32],
    top_p: NDArray[np.float32],
) -> torch.Tensor:
    """[k, vocabulary] float32 on the CPU, steps 5 to 7: in proportion to the probabilities, 0 where filtered
    out."""
    x = logits.float().cpu()
    x = x - x.amax(dim=-1, keepdim=True)  # before the division: a tiny temperature must not overflow
    x /= torch.from_numpy(temperature)[:, None]
    rows: F32 = x.numpy()  # the same memory
    for i in np.flatnonzero((top_k > 0) & (top_k < x.shape[1])).tolist():
        row = rows[i]
        row[row < least_of_top_k(row, int(top_k[i]))] = -np.inf
    x.exp_()
    for i in np.flatnonzero(top_p < 1).tolist():
        row = rows[i]
        row[row < least_of_mass(row, float(top_p[i]))] = 0
    return x


def keep_shapes(kept: torch.Tensor, drawing: I64, shaping: ShapingColumns) -> None:
    """Steps 8 and 9. `kept`: one row for each of `drawing`, the rows that are drawn."""
    rows, places, of = np.intersect1d(drawing, shaping.min_p_rows, return_indices=True)
    if len(rows):
        least = torch.from_numpy(shaping.min_p[of]).to(kept.device)[:, None]
        x = kept[_index(places)]
        x.masked_fill_(x < least * x.amax(dim=-1, keepdim=True), 0)
        kept[_index(places)] = x
    _, places, of = np.intersect1d(drawing, shaping.typical_rows, return_indices=True)
    for place, typical_p in zip(places.tolist(), shaping.typical_p[of].tolist(), strict=True):
        _keep_typical(kept[place], typical_p)


def _keep_typical(x: torch.Tensor, typical_p: float) -> None:
    """Locally typical sampling (Meister et al. 2023)."""
    ids = x.nonzero()[:, 0]
    p = x[ids].double()
    p /= p.sum()
    surprise = -p.log()
    distance = (surprise - (p * surprise).sum()).abs()
    ranked, order = distance.sort(stable=True)
    mass = p[order].cumsum(0)
    last = min(int((mass < typical_p).sum()), len(ranked) - 1)
    x[ids[distance > ranked[last]]] = 0


# ---- 10: the draw -----------------------------------------------------------------------------------


def _draw(kept: torch.Tensor, u: NDArray[np.float64]) -> Ids:
    found: Ids = draw(kept, torch.from_numpy(u).to(kept.device)).cpu().numpy().astype(np.uint32)
    return found


def draw(kept: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The first token in vocabulary order at which the sum of weights exceeds u times the whole.

    `u`: [rows] float64. Returns [rows] int64.
    """
    rows, vocab = kept.shape
    if vocab % RUN:
        kept = torch.nn.functional.pad(kept, (0, RUN - vocab % RUN))
    runs = kept.view(rows, -1, RUN)
    after = runs.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target = u[:, None] * after[:, -1:]
    run = torch.searchsorted(after, target, right=True).clamp(max=after.shape[1] - 1)  # NaN is found nowhere
    before = torch.where(run > 0, after.gather(1, (run - 1).clamp(min=0)), 0)
    inside = runs[torch.arange(rows, device=kept.device), run[:, 0]].cumsum(dim=-1, dtype=torch.float64)
    # The two ways of adding may differ in the last bit: then the run's last token of any weight is meant.
    place = torch.searchsorted(inside, target - before, right=True)
    last = torch.searchsorted(inside, inside[:, -1:].contiguous())
    return (run * RUN + torch.minimum(place, last))[:, 0]


# ---- 1: log probabilities ---------------------------------------------------------------------------


def logprobs(raw: torch.Tensor, chosen: I64, shaping: ShapingColumns) -> LogprobColumns:
    """`raw`: [m, vocabulary] float32, the model's logits of the rows that ask; `chosen`: their tokens."""
    return _told(raw, chosen, shaping.logprob_rows, shaping.top_logprobs)


@torch.inference_mode()
def prompt_logprobs(logits_of: Callable[[I64], torch.Tensor], inputs: StepInputs) -> LogprobColumns:
    """What the step's asks want. `logits_of`: of the last run's tokens at some places; a piece at a time, for
    those of a whole prompt are hundreds of megabytes."""
    places, following, tops = places_of(inputs)
    pieces, begin, piece_len = [], 0, 1
    while begin < len(places):
        at = slice(begin, begin + piece_len)
        raw = logits_of(places[at]).float()
        pieces.append(_told(raw, following[at], places[at], tops[at]))
        begin += piece_len
        piece_len = max(1, PIECE_LOGITS // raw.shape[1])
    return LogprobColumns(
        *(np.concatenate([getattr(p, f.name) for p in pieces]) for f in fields(LogprobColumns))
    )


def _told(raw: torch.Tensor, chosen: I64, places: I64, numbers: I64) -> LogprobColumns:
    whole = raw.double().logsumexp(dim=-1)
    picked = raw.gather(1, _index(chosen).to(raw.device)[:, None])
    ranks = (raw > picked).sum(dim=-1) + 1
    tops = [_top(raw[i], int(n)) for i, n in enumerate(numbers)]
    lens = np.array([len(ids) for ids in tops], np.int64)
    top_ids = torch.cat(tops)
    rows = torch.from_numpy(np.arange(len(tops)).repeat(lens)).to(raw.device)
    return LogprobColumns(
        places=places,
        logprobs=(picked[:, 0].double() - whole).float().cpu().numpy(),
        ranks=ranks.cpu().numpy(),
        top_lens=lens,
        top_ids=top_ids.cpu().numpy(),
        top_logprobs=(raw[rows, top_ids].double() - whole[rows]).float().cpu().numpy(),
    )


def _top(x: torch.Tensor, n: int) -> torch.Tensor:
    """Ids of the n largest, the lower id first among equals."""
    if not n:
        return torch.empty(0, dtype=torch.int64, device=x.device)
    least = x.topk(min(n, len(x))).values[-1]
    ids = (x >= least).nonzero()[:, 0]
    return ids[x[ids].sort(descending=True, stable=True).indices][:n]
