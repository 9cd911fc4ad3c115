"""The device's sampler draws what the sampler draws, for any rows together."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shard_worker import sampler
from shard_worker.device.sampling import sample, weights
from shard_worker.executor import ShapingColumns, StepInputs
from shard_worker.probe import ProbeRow, probe_inputs
from shard_worker.uniforms import uniforms

torch.set_num_threads(1)
VOCAB = 200


def inputs_of(rows: list[tuple[float, int, float, int]], shaping: ShapingColumns | None = None) -> StepInputs:
    """Of (temperature, top_k, top_p, seed)."""
    made = probe_inputs([ProbeRow([1], 0, [i]) for i in range(len(rows))], 4)
    columns = {
        "temperature": np.array([r[0] for r in rows], np.float32),
        "top_k": np.array([r[1] for r in rows], np.int32),
        "top_p": np.array([r[2] for r in rows], np.float32),
        "seeds": np.array([r[3] for r in rows], np.uint64),
    }
    fields = {name: getattr(made, name) for name in made.__dataclass_fields__}
    return StepInputs(**(fields | columns | {"shaping": shaping}))


def on_device(logits: torch.Tensor, inputs: StepInputs) -> list[int]:
    u = uniforms(inputs.seeds, inputs.output_index)
    columns = (torch.from_numpy(c) for c in (inputs.temperature, inputs.top_k, inputs.top_p, u))
    found: list[int] = sample(logits.clone(), inputs, *columns).tolist()
    return found


row = st.tuples(
    st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    st.sampled_from([0, 0, 1, 5, 199, 200, 5000]),
    st.sampled_from([1.0, 1.0, 0.0001, 0.5, 0.95, 0.999999]),
    st.integers(0, 2**64 - 1),
)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(rows=st.lists(row, min_size=1, max_size=9), seed=st.integers(0, 100), coarse=st.booleans())
def test_draws_what_the_sampler_draws(
    rows: list[tuple[float, int, float, int]], seed: int, coarse: bool
) -> None:
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    if coarse:
        logits = logits.round()  # many equals
    inputs = inputs_of(rows)
    expected = sampler.sample(logits.clone(), sampler.columns_of(inputs))
    assert on_device(logits, inputs) == expected.tolist()


def test_weights_are_the_samplers() -> None:
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(5)) * 2
    temperature = np.array([0.5, 1, 2, 1, 1, 0.7], np.float32)
    top_k = np.array([0, 7, 200, 3, 0, 50], np.int32)
    top_p = np.array([0.9, 1, 0.3, 0.5, 1, 0.8], np.float32)
    expected = sampler.weights(logits.clone(), temperature, top_k, top_p)
    found = weights(logits, *map(torch.from_numpy, (temperature, top_k, top_p)))
    assert torch.equal(found > 0, expected > 0)
    torch.testing.assert_close(found, expected, atol=0, rtol=1e-6)
