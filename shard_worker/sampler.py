"""From logits to token ids, one per row: greedy, or temperature, then top-k, then top-p, then the draw.

The order is frozen: (1) temperature 0 takes the largest logit, the lowest id among equals; otherwise logits
divided by temperature; (2) top-k keeps every token that is at least the k-th largest; (3) softmax over what
is kept; (4) top-p keeps every token at least as probable as the one at which the mass of the most probable
reaches top-p; (5) inverse CDF in vocabulary order at the row's uniform number. Equals stay together, so no
step depends on the order of a sort. Each row is computed by itself: who shares the batch does not matter.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from shard_worker.executor import StepInputs
from shard_worker.uniforms import uniforms

Ids = NDArray[np.uint32]
RUN = 64  # tokens whose weights are added before the running sum: it need not go over each


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """What the k sampling rows want, as columns."""

    temperature: NDArray[np.float32]  # [k], 0 = greedy
    top_k: NDArray[np.int32]  # [k], 0 = off
    top_p: NDArray[np.float32]  # [k], 1 = off
    seeds: NDArray[np.uint64]  # [k]
    output_index: NDArray[np.int32]  # [k]


def columns_of(inputs: StepInputs) -> SamplingColumns:
    return SamplingColumns(inputs.temperature, inputs.top_k, inputs.top_p, inputs.seeds, inputs.output_index)


def sample(logits: torch.Tensor, columns: SamplingColumns) -> NDArray[np.uint32]:
    """`logits`: [k, vocabulary], any float type. Returns [k] token ids."""
    assert logits.shape[0] == len(columns.temperature)
    chosen: NDArray[np.uint32] = logits.argmax(dim=-1).cpu().numpy().astype(np.uint32)
    drawing = np.flatnonzero(columns.temperature > 0)
    if len(drawing):
        if len(drawing) < len(chosen):
            logits = logits[torch.from_numpy(drawing).to(logits.device)]
        kept = weights(logits, columns.temperature[drawing], columns.top_k[drawing], columns.top_p[drawing])
        chosen[drawing] = _draw(kept, uniforms(columns.seeds[drawing], columns.output_index[drawing]))
    return chosen


def weights(
    logits: torch.Tensor,
    temperature: NDArray[np.float32],
    top_k: NDArray[np.int32],
    top_p: NDArray[np.float32],
) -> torch.Tensor:
    """[k, vocabulary] float32, steps 1 to 4: in proportion to the probabilities, 0 where filtered out."""
    x = logits.float()
    x = x - x.amax(dim=-1, keepdim=True)  # before the division: a tiny temperature must not overflow
    x /= torch.from_numpy(temperature).to(x.device)[:, None]
    limited = np.flatnonzero((top_k > 0) & (top_k < x.shape[1]))
    if len(limited):
        _keep_top_k(x, limited, top_k)
    x.exp_()
    for row in np.flatnonzero(top_p < 1).tolist():
        _keep_top_p(x[row], float(top_p[row]))
    return x


def _keep_top_k(x: torch.Tensor, rows: NDArray[np.int64], top_k: NDArray[np.int32]) -> None:
    for row in rows.tolist():
        least = x[row].topk(int(top_k[row])).values[-1]
        x[row].masked_fill_(x[row] < least, -torch.inf)


def _keep_top_p(x: torch.Tensor, top_p: float) -> None:
    """Sorts only tokens that can be kept: all below `cutoff` together weigh less than 1 - top_p."""
    total = float(x.sum(dtype=torch.float64))
    cutoff = total * (1 - top_p) / len(x)
    ranked = x[x >= cutoff].sort(descending=True).values
    mass = ranked.cumsum(0, dtype=torch.float64)
    last = min(int((mass < top_p * total).sum()), len(ranked) - 1)
    x.masked_fill_(x < ranked[last], 0)


def _draw(kept: torch.Tensor, u: NDArray[np.float64]) -> Ids:
    """The first token in vocabulary order at which the sum of weights exceeds u times the whole."""
    rows, vocab = kept.shape
    if vocab % RUN:
        kept = torch.nn.functional.pad(kept, (0, RUN - vocab % RUN))
    runs = kept.view(rows, -1, RUN)
    after = runs.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target = torch.from_numpy(u).to(kept.device)[:, None] * after[:, -1:]
    run = torch.searchsorted(after, target, right=True)
    before = torch.where(run > 0, after.gather(1, (run - 1).clamp(min=0)), 0)
    inside = runs[torch.arange(rows, device=kept.device), run[:, 0]].cumsum(dim=-1, dtype=torch.float64)
    # The two ways of adding may differ in the last bit: then the run's last token of any weight is meant.
    place = torch.searchsorted(inside, target - before, right=True)
    last = torch.searchsorted(inside, inside[:, -1:].contiguous())
    found: Ids = (run * RUN + torch.minimum(place, last))[:, 0].cpu().numpy().astype(np.uint32)
    return found
