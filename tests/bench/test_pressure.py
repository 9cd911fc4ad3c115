"""With a KV pool of a third of what is asked for, little is computed twice."""

import pytest

from bench.pressure import MIXES, mixture, run

STEPS = 2000


@pytest.mark.parametrize("mix", MIXES)
def test_hardly_anything_is_computed_twice(mix: str) -> None:
    pressed = run(MIXES[mix], 4, STEPS)
    assert max(pressed.filled) > 0.6, "the pool was never short"
    assert pressed.recomputed < 0.05


@pytest.mark.parametrize("seed", range(6))
def test_whatever_the_lengths(seed: int) -> None:
    assert run(mixture(seed), seed, STEPS).recomputed < 0.05
