"""A step that the device works on by itself, and how it is waited for."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chassis.transport.registered import MemoryRange
from shard_worker.device.sampling import ids_of
from shard_worker.device.staging import Mark
from shard_worker.executor import StepOutput
from shard_worker.grammar_masks import NO_MASKS, GrammarMasks

NO_IDS = np.empty(0, np.uint32)


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step that the device works on."""

    out: Mark
    activations: memoryview
    ids: NDArray[np.int64] | None = None
    known: StepOutput | None = None
    masks: GrammarMasks = NO_MASKS
    direct: MemoryRange | None = None

    def ready(self) -> bool:
        return self.out.passed()

    def result(self) -> StepOutput:
        """Blocks until it is out; holds until the `staging.TURNS`-th step after it begins."""
        self.out.wait()
        if self.known is not None:
            return self.known
        if self.ids is None:
            return StepOutput(self.activations, NO_IDS, direct=self.direct)
        token_ids, nan_rows = ids_of(self.ids)
        undrawn = self.masks.waiting_rows, self.masks.refused_rows
        return StepOutput(self.activations, token_ids, None, None, nan_rows, *undrawn)
