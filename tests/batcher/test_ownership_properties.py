"""Two ownership cores, a broker, a gateway and a client, steered by hypothesis: what fails shrinks."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model.test_ownership_explore import setting_of
from tests.model.world import World

MOVES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1 << 16)), max_size=60)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 16), moves=MOVES)
def test_any_interleaving_with_faults_ends_well(seed: int, moves: list[tuple[int, int]]) -> None:
    """A move of 8 or 9 is a fault, a recovery or a wish, of which there are few; else something fair."""
    rng = random.Random(seed)
    world, faults = World(setting_of(rng), rng), 4
    for sort, pick in moves:
        others = world.faults() + world.recoveries() + world.wishes() if sort >= 8 and faults else []
        actions = others or world.fair()
        if not actions:
            break
        action = actions[pick % len(actions)]
        faults -= action.kind == "fault"
        world.apply(action)
    world.settle()
