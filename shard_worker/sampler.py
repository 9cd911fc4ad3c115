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
FIRST_LOOK = 256  # tokens examined before the whole vocabulary is sorted for top-p


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
        chosen[drawing] = _draw(
            probabilities(
                logits, columns.temperature[drawing], columns.top_k[drawing], columns.top_p[drawing]
            ),
            uniforms(columns.seeds[drawing], columns.output_index[drawing]),
        )
    return chosen


def probabilities(
    logits: torch.Tensor,
    temperature: NDArray[np.float32],
    top_k: NDArray[np.int32],
    top_p: NDArray[np.float32],
) -> torch.Tensor:
    """[k, vocabulary] float32: steps 1 to 4; what is filtered out is 0. Not renormalised after top-p."""
    x = logits.float()
    x = x - x.amax(dim=-1, keepdim=True)  # before the division: a tiny temperature must not overflow
    x /= torch.from_numpy(temperature).to(x.device)[:, None]
    limited = np.flatnonzero((top_k > 0) & (top_k < x.shape[1]))
    if len(limited):
        _keep_top_k(x, limited, top_k)
    p = torch.softmax(x, dim=-1)
    nucleus = np.flatnonzero(top_p < 1)
    if len(nucleus):
        _keep_top_p(p, nucleus, top_p)
    return p


def _keep_top_k(x: torch.Tensor, rows: NDArray[np.int64], top_k: NDArray[np.int32]) -> None:
    largest = x.topk(int(top_k[rows].max()), dim=-1).values
    for row in rows.tolist():
        x[row].masked_fill_(x[row] < largest[row, int(top_k[row]) - 1], -torch.inf)


def _keep_top_p(p: torch.Tensor, rows: NDArray[np.int64], top_p: NDArray[np.float32]) -> None:
    look = min(FIRST_LOOK, p.shape[1])
    for row in rows.tolist():
        target = float(top_p[row])
        ranked = p[row].topk(look).values
        mass = ranked.cumsum(0, dtype=torch.float64)
        if float(mass[-1]) < target and look < p.shape[1]:
            ranked = p[row].sort(descending=True).values
            mass = ranked.cumsum(0, dtype=torch.float64)
        last = min(int((mass < target).sum()), len(ranked) - 1)
        p[row].masked_fill_(p[row] < ranked[last], 0)


def _draw(p: torch.Tensor, u: NDArray[np.float64]) -> NDArray[np.uint32]:
    """The first token in vocabulary order at which the mass exceeds u times the whole."""
    mass = p.cumsum(dim=-1, dtype=torch.float64)
    target = torch.from_numpy(u).to(p.device)[:, None] * mass[:, -1:]
    found: NDArray[np.uint32] = (
        torch.searchsorted(mass, target, right=True)[:, 0].cpu().numpy().astype(np.uint32)
    )
    return found
