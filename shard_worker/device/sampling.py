"""The sampler's rules on a device, without a look at it: one vectorised pass, no row by itself.

The order of operations is `sampler`'s, number by number; only how the same is calculated differs. Rows that
want more than temperature, top-k and top-p pass through the sampler's own steps, which may wait for the
device.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from shard_worker import sampler
from shard_worker.executor import StepInputs
from shard_worker.grammar_masks import NO_MASKS, GrammarMasks


def sample(
    logits: torch.Tensor,
    inputs: StepInputs,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    uniforms: torch.Tensor,
    *,
    masks: GrammarMasks = NO_MASKS,
) -> torch.Tensor:
    """`logits`: [k, vocabulary], scratch from here on. The columns are `inputs`' on the device: what the host
    knows decides which operations are needed at all. Returns [k] int64 on the device: below 0 where
    logits are no numbers (`ids_of`)."""
    shaping = inputs.shaping
    if shaping is not None and len(shaping.rows):
        logits = sampler.shape_logits(logits.float(), shaping, masks)
    peaks, largest = logits.max(dim=-1)
    none = -1 - largest
    finite = peaks.isfinite()
    draws = inputs.temperature > 0
    if not draws.any():
        return torch.where(finite, largest, none)
    limited = bool((draws & (inputs.top_k > 0) & (inputs.top_k < logits.shape[1])).any())
    cut = bool((draws & (inputs.top_p < 1)).any())
    kept = weights(logits, temperature, top_k if limited else None, top_p if cut else None)
    if shaping is not None:
        sampler.keep_shapes(kept, np.arange(len(draws)), shaping)
    drawn = sampler.draw(kept, uniforms)
    if not draws.all():
        drawn = torch.where(temperature > 0, drawn, largest)
    return torch.where(finite, drawn, none)


def ids_of(sampled: NDArray[np.int64]) -> tuple[NDArray[np.uint32], tuple[int, ...]]:
    """Of what `sample` returned, on the host: token ids, and the rows whose ids stand for nothing."""
    nan_rows = np.flatnonzero(sampled < 0)
    if len(nan_rows):
        sampled = np.where(sampled < 0, -1 - sampled, sampled)
    return sampled.astype(np.uint32), tuple(nan_rows.tolist())


def weights(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None
) -> torch.Tensor:
    """[k, vocabulary] float32: `sampler.weights` for all rows at once. Rows of temperature 0: anything."""
    x = logits.float()
    vocab = x.shape[1]
    x = x - x.amax(dim=-1, keepdim=True)
    x /= torch.where(temperature > 0, temperature, 1.0)[:, None]
    if top_k is not None:
        place = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab).long() - 1
        least = x.sort(dim=-1, descending=True).values.gather(1, place[:, None])
        x.masked_fill_(x < least, -torch.inf)
    x.exp_()
    if top_p is not None:
        _keep_top_p(x, top_p)
    return x


def _keep_top_p(x: torch.Tensor, top_p: torch.Tensor) -> None:
    """As many of the likeliest as reach the mass, and all that equal the last of them."""
    total = x.sum(dim=-1, keepdim=True, dtype=torch.float64)
    share = top_p.double()[:, None]
    cutoff = (total * (1 - share) / x.shape[1]).float()  # all below it together weigh less than the rest
    possible = (x >= cutoff).sum(dim=-1, keepdim=True)
    ranked = x.sort(dim=-1, descending=True).values
    mass = ranked.cumsum(dim=-1, dtype=torch.float64)
    last = torch.minimum((mass < share * total).sum(dim=-1, keepdim=True), possible - 1).clamp(min=0)
    x.masked_fill_((x < ranked.gather(1, last)) & (share < 1), 0)
