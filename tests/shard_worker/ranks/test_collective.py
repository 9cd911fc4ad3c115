"""Sums and parts over ranks, by shared memory and by torch.distributed alike: in rank order."""

import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import pytest
import torch

from shard_worker.native import library
from shard_worker.ranks.collective import Collective, GroupCollective, dist, meeting_point
from shard_worker.ranks.shared_memory import SharedCollective, new_memory, place

T = TypeVar("T")
LONG = 150_001  # numbers: more than fit at once
PATIENCE_S = 30.0


def shared(ranks: int, timeout_s: float = PATIENCE_S) -> list[Collective]:
    if not place():
        pytest.skip("no compiler, or no memory to share")
    with new_memory(ranks) as path:
        return [SharedCollective(path, rank, ranks, timeout_s) for rank in range(ranks)]


def group(ranks: int, device: str = "cpu") -> list[Collective]:
    """On a device each, where it is no processor."""
    devices = [torch.device(device) if device == "cpu" else torch.device(device, i) for i in range(ranks)]
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    kept = meeting_point("127.0.0.1", port, ranks, PATIENCE_S, listener)
    stores = [kept, *(meeting_point("127.0.0.1", port, ranks, PATIENCE_S) for _ in range(1, ranks))]
    return together(
        [
            partial[Collective](GroupCollective, store, rank, ranks, "127.0.0.1", PATIENCE_S, devices[rank])
            for rank, store in enumerate(stores)
        ]
    )


WAYS: dict[str, Callable[[int], list[Collective]]] = {"shared": shared, "group": group}


def together(works: Sequence[Callable[[], T]]) -> list[T]:
    with ThreadPoolExecutor(len(works)) as pool:
        return [done.result(PATIENCE_S) for done in [pool.submit(work) for work in works]]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_sums_have_rank_order(way: str, ranks: int) -> None:
    """However long the rows are, and whoever comes first."""
    members = WAYS[way](ranks)
    generator = torch.Generator().manual_seed(ranks)
    for count in (1, 576, 65_536, 65_537, LONG):
        rows = torch.randn(ranks, count, generator=generator)
        wanted = rows[0].clone()
        for row in rows[1:]:
            wanted += row
        summed = together([partial(m.sum, r.clone()) for m, r in zip(members, rows, strict=True)])
        assert all(torch.equal(found, wanted) for found in summed)


@pytest.mark.parametrize("way", WAYS)
def test_the_first_gets_all_parts(way: str) -> None:
    members = WAYS[way](3)
    for widths in ([3, 2, 4], [1, 70_000, 3], [70_000, 1, 1]):
        parts = [torch.arange(2.0 * width).view(2, width) + 1000 * width for width in widths]
        found = together([partial(m.gather, p, widths) for m, p in zip(members, parts, strict=True)])
        assert all(map(torch.equal, found[0], parts)) and found[1:] == [[], []]
        summed = together([partial(m.sum, torch.ones(1)) for m in members])  # nobody is a turn ahead
        assert [rows.tolist() for rows in summed] == [[3.0]] * 3


@pytest.mark.parametrize("way", WAYS)
def test_who_waits_is_told_to_give_up(way: str) -> None:
    """At once, though the other neither comes nor goes; and for good."""
    first, second = WAYS[way](2)
    begun = threading.Event()

    def waits() -> None:
        begun.set()
        with pytest.raises(RuntimeError, match="a rank did not come to a sum|caused pair closure"):
            first.sum(torch.ones(4))

    def aborts() -> None:
        assert begun.wait(PATIENCE_S)
        first.abort()

    together([waits, aborts])
    with pytest.raises(RuntimeError):
        first.gather(torch.ones(1, 4), [4, 4])
    del second


def test_a_rank_that_never_comes_ends_the_wait() -> None:
    first, _second = shared(2, timeout_s=0.05)
    with pytest.raises(RuntimeError, match="a rank did not come with its part"):
        first.gather(torch.ones(1, 4), [4, 4])


def test_processes_of_other_code_share_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    here = place()
    monkeypatch.setattr(library, "digest", lambda: "another")
    assert place() != here
    monkeypatch.setattr(library, "digest", lambda: "")
    assert place() == ""


# ---- NCCL, which is not here: what it is asked for ------------------------------------------------------


class Nccl:
    """With the signature that torch gives its own, and gloo's sums."""

    made: list["Nccl"]

    class Options:
        _timeout: timedelta

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self.rank, self.size, self.options = rank, size, options
        self.calls: list[str] = []
        self._gloo = dist.ProcessGroupGloo(store, rank, size, options._timeout)
        self.made.append(self)

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self._gloo, name)

    def abort(self) -> None:
        self.calls.append("abort")


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> type[Nccl]:
    Nccl.made = []
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    return Nccl


def test_devices_sum_up_by_nccl(nccl: type[Nccl]) -> None:
    """In one call, whatever its order; and its own abort ends whoever waits."""
    members = group(3, "cuda")
    asked = sorted(nccl.made, key=lambda one: one.rank)
    assert [(one.rank, one.size, one.options._timeout.total_seconds()) for one in asked] == [
        (rank, 3, PATIENCE_S) for rank in range(3)
    ]
    rows = torch.arange(12.0).view(3, 4)
    summed = together([partial(m.sum, r.clone()) for m, r in zip(members, rows, strict=True)])
    assert all(torch.equal(found, rows.sum(0)) for found in summed)
    parts = [torch.full((2, width), float(width)) for width in (1, 2, 3)]
    found = together([partial(m.gather, p, [1, 2, 3]) for m, p in zip(members, parts, strict=True)])
    assert all(map(torch.equal, found[0], parts))
    members[1].abort()
    assert [one.calls for one in asked] == [
        ["allreduce", "recv", "recv"],
        ["allreduce", "send", "abort"],
        ["allreduce", "send"],
    ]


def test_processors_ask_for_no_nccl(nccl: type[Nccl]) -> None:
    members = group(2)
    together([partial(m.sum, torch.ones(3)) for m in members])
    assert not nccl.made
