"""The quickest arrangement, against trying all of them."""

from collections.abc import Iterator
from itertools import combinations, permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.shares import ROOM_MAX, Server, Share, quickest, slowest

SERVERS = st.lists(
    st.tuples(
        st.integers(1, 9),  # time of a layer
        st.integers(0, 12),  # of the head
        st.one_of(st.integers(0, 6), st.just(ROOM_MAX)),
        st.sampled_from((0.0, 0.5, 1.0, 2.0)),
    ),
    max_size=5,
)


def servers_of(drawn: list[tuple[int, int, int, float]]) -> list[Server]:
    return [Server(f"s{i}", *values) for i, values in enumerate(drawn)]


def all_shares(servers: list[Server], num_layers: int, num_stages: int) -> Iterator[list[Share]]:
    for chosen in permutations(servers, num_stages):
        for cuts in combinations(range(1, num_layers), num_stages - 1):
            borders = [0, *cuts, num_layers]
            yield [Share(s, *borders[i : i + 2]) for i, s in enumerate(chosen)]


def allowed(shares: list[Share]) -> bool:
    last = len(shares) - 1
    return all(
        s.end_layer - s.first_layer + ((i == 0) + (i == last)) * s.server.head_room <= s.server.room
        for i, s in enumerate(shares)
    )


@settings(max_examples=300)
@given(SERVERS, st.integers(1, 7), st.integers(1, 4))
def test_none_is_quicker(drawn: list[tuple[int, int, int, float]], num_layers: int, num_stages: int) -> None:
    num_stages = min(num_stages, num_layers)
    servers = servers_of(drawn)
    times = [slowest(s) for s in all_shares(servers, num_layers, num_stages) if allowed(s)]
    found = quickest(servers, num_layers, num_stages)
    if found is None:
        assert not times
        return
    assert slowest(found) == min(times)
    assert allowed(list(found))
    assert [s.first_layer for s in found] == [0, *[s.end_layer for s in found[:-1]]]
    assert found[-1].end_layer == num_layers and all(s.first_layer < s.end_layer for s in found)
    assert len({s.server.name for s in found}) == num_stages


def test_large_ones_are_quick_enough() -> None:
    """Not tried one by one: 128 workers, 96 layers, 16 stages."""
    servers = [Server(f"w{i:03}", 50.0 + i % 37, 100.0, 4 + i % 9) for i in range(128)]
    found = quickest(servers, 96, 16)
    assert found is not None and len(found) == 16
