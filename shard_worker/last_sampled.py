"""Pure. What each slot sampled last: a step that was sent ahead leaves its token open, and here it is put in.

On the compute thread, between two runs: so it is the token of the step before, whatever the loop has taken
in since. Slots that pass to another sequence need nothing: its first row brings its ids along.
"""

from dataclasses import replace

import numpy as np

from shard_worker.executor import U32, StepInputs


class LastSampled:
    """Of one epoch on the only stage of a pipeline."""

    def __init__(self, slots_max: int) -> None:
        self._ids: U32 = np.zeros(slots_max, np.uint32)

    def known(self, inputs: StepInputs) -> StepInputs:
        """The step with all its ids, in place, and with what depends on them."""
        ahead = inputs.ahead
        if ahead is None:
            return inputs
        ids = self._ids[ahead.slots]
        inputs.token_ids[ahead.places] = ids
        return inputs if ahead.shaping is None else replace(inputs, shaping=ahead.shaping(ids))

    def keep(self, inputs: StepInputs, token_ids: U32) -> None:
        """`token_ids`: [k], of its rows that sample."""
        if inputs.sample_slots is not None:
            self._ids[inputs.sample_slots] = token_ids
