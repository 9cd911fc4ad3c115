"""Which workers serve which layers: evenly among equals, else by measured time and memory."""

import dataclasses

import pytest

from batcher.arrangement import arrange, gain, split_layers
from chassis.ids import BootId, Epoch
from chassis.messages.registry import WorkerEntry


def worker(boot: str, layer_us: float = 100.0, **changes: object) -> WorkerEntry:
    entry = WorkerEntry(
        boot=BootId(boot),
        model="m",
        model_digest="d",
        rpc_address="r",
        transport_address="t",
        last_epoch=Epoch(0),
        free=True,
        num_layers=30,
        head_cost_layers=0.0,
        layer_us=layer_us,
    )
    return dataclasses.replace(entry, **changes)  # type: ignore[arg-type]


def holds(entry: WorkerEntry, index: int, layers: tuple[int, int]) -> int:
    return 4 if (entry.loaded.start, entry.loaded.stop) == layers else 1


def arranged(workers: list[WorkerEntry], num_stages: int = 2) -> list[tuple[str, int]] | None:
    stages = arrange(workers, num_stages, holds)
    if stages is None:
        return None
    assert stages[0].first_layer == 0 and stages[-1].end_layer == 30
    return [(s.worker.boot, s.end_layer - s.first_layer) for s in stages]


def test_equals_share_evenly_whatever_little_they_differ_by() -> None:
    assert arranged([worker("a"), worker("b", 120.0)]) == [("a", 15), ("b", 15)]
    assert arranged([worker("a", 0.0), worker("b", 0.0)]) == [("a", 15), ("b", 15)]


def test_who_is_twice_as_quick_gets_twice_the_layers() -> None:
    assert arranged([worker("a", 100.0), worker("b", 200.0)]) == [("a", 20), ("b", 10)]


def test_the_slow_one_is_left_out_where_there_are_enough() -> None:
    assert arranged([worker("a"), worker("b", 1000.0), worker("c")]) == [("a", 15), ("c", 15)]


def test_memory_bounds_a_stage_and_the_ends_need_more() -> None:
    assert arranged([worker("a", layers_max=10), worker("b")]) == [("a", 10), ("b", 20)]
    assert arranged([worker("a", layers_max=10, head_layers=3.0), worker("b")]) == [("a", 7), ("b", 23)]
    assert arranged([worker("a", layers_max=10), worker("b", layers_max=10)]) is None
    alone = worker("a", layers_max=34, head_layers=3.0)
    assert arranged([alone], 1) is None
    assert arranged([dataclasses.replace(alone, ends_layers=4.0)], 1) == [("a", 30)]
    assert arranged([worker("a", layers_max=10) for _ in range(1)], 1) is None


def test_who_says_nothing_of_its_speed_counts_as_one_in_the_middle() -> None:
    found = arranged([worker("a", 100.0), worker("b", 0.0), worker("c", 100.0), worker("d", 900.0)], 3)
    assert found == [("a", 10), ("b", 10), ("c", 10)]


def test_layers_stay_where_they_lie_if_that_is_nearly_as_quick() -> None:
    """A dead one's place is taken by another; the others keep theirs, though another split were better."""
    a, b = worker("a", 100.0, loaded=range(0, 20)), worker("b", 200.0, loaded=range(20, 30))
    assert arranged([a, worker("n", 210.0)]) == [("a", 20), ("n", 10)]
    assert arranged([worker("n", 95.0), b]) == [("n", 20), ("b", 10)]
    assert arranged([worker("n", 20.0), b]) != [("n", 20), ("b", 10)], "far quicker: it gets more"


def test_one_that_may_serve_only_one_stage_is_not_taken_for_another() -> None:
    small = worker("a", 100.0, layers_max=9)
    stages = arrange([small, worker("b", 200.0), worker("c", 100.0)], 3, holds)
    assert stages is not None
    sizes = {s.worker.boot: s.end_layer - s.first_layer for s in stages}
    assert sizes[BootId("a")] <= 9 and sizes[BootId("c")] == max(sizes.values())


@pytest.mark.parametrize(("quick_us", "least", "most"), [(100.0, 0.0, 0.0), (50.0, 0.3, 0.4), (90.0, 0, 0.1)])
def test_what_a_newcomer_would_gain(quick_us: float, least: float, most: float) -> None:
    a, b = worker("a", loaded=range(0, 15)), worker("b", loaded=range(15, 30))
    stages = arrange([a, b], 2, holds)
    assert stages is not None
    assert least <= gain(stages, [a, b, worker("n", quick_us)], holds) <= most


def test_the_split_of_equals_is_the_old_one() -> None:
    assert split_layers(30, 4.5, 2) == [(0, 17), (17, 30)]
