"""What each slot sampled last, on the device: a step that was sent ahead finds its ids without the host.

As `shard_worker/last_sampled.py`, in the lane that computes: behind the step before, which may not be over.
"""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from shard_worker.executor import I64, StepInputs


class DeviceLastSampled:
    """Grows with the slots that come by. What an older epoch left nobody asks for: an id is left open only
    behind one that was sampled."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ids = torch.zeros(0, dtype=torch.int64, device=device)

    def fill(self, inputs: StepInputs, token_ids: torch.Tensor) -> None:
        """`token_ids`: the step's, there: what is left open gets its ids."""
        ahead = inputs.ahead
        if ahead is not None:
            token_ids[self._there(ahead.places)] = self._of(ahead.slots).to(token_ids.dtype)

    def shaped(self, inputs: StepInputs) -> StepInputs:
        """Where sampling follows the open ids the host has to wait for them."""
        ahead = inputs.ahead
        if ahead is None or ahead.shaping is None:
            return inputs
        ids = self._of(ahead.slots).cpu().numpy().astype(np.uint32)
        return replace(inputs, shaping=ahead.shaping(ids))

    def keep(self, inputs: StepInputs, ids: torch.Tensor) -> None:
        """`ids`: [k], of its rows that sample; -1 - id stands for an id that is none, and any will do."""
        slots = inputs.sample_slots
        if slots is None or not len(slots):
            return
        lacking = int(slots.max()) + 1 - len(self._ids)
        if lacking > 0:
            self._ids = torch.nn.functional.pad(self._ids, (0, max(lacking, 64)))
        self._ids[self._there(slots)] = torch.maximum(ids, -1 - ids)

    def _of(self, slots: I64) -> torch.Tensor:
        return self._ids[self._there(slots)]

    def _there(self, places: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(places).to(self._device, non_blocking=True)
