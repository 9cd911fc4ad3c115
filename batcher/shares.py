"""Pure. Who should serve how many layers, so that the slowest stage is as quick as can be.

A stage takes as long as its layers take its worker, the last one the head beside them; no worker gets more
layers than it has memory for (first and last stage also keep embedding or head there; a matrix that is both
lies once in a stage that is both). Found by looking for the least time within which enough layers fit: the
stages between first and last are those that fit most, and for first and last it is enough to try as many of
the best as there are stages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

EPSILON = 1e-9  # of a layer, lost in divisions
ROOM_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Server:
    """`layer`, `head`: time that they take it, in any unit; `room`: layers that it has memory for."""

    name: str
    layer: float
    head: float = 0.0
    room: int = ROOM_MAX
    head_room: float = 0.0  # of that, what embedding or head takes
    ends_room: float = 0.0  # what both take in one stage; 0: twice as much

    def time(self, num_layers: int, last: bool) -> float:
        return num_layers * self.layer + (self.head if last else 0.0)

    def holds(self, num_layers: int, first: bool, last: bool) -> bool:
        return num_layers <= self.rooms(first, last)

    def rooms(self, first: bool, last: bool) -> int:
        taken = (first + last) * self.head_room
        if first and last and self.ends_room:
            taken = self.ends_room
        return max(0, int(self.room - taken + EPSILON))

    def fits(self, time: float, first: bool, last: bool) -> int:
        """Layers that it can serve within `time`."""
        left = time - (self.head if last else 0.0)
        return max(0, min(self.rooms(first, last), int(left / self.layer + EPSILON)))


@dataclass(frozen=True, slots=True)
class Share:
    server: Server
    first_layer: int
    end_layer: int


def slowest(shares: Sequence[Share]) -> float:
    """The time of the slowest stage."""
    last = len(shares) - 1
    return max(s.server.time(s.end_layer - s.first_layer, i == last) for i, s in enumerate(shares))


def quickest(servers: Sequence[Server], num_layers: int, num_stages: int) -> tuple[Share, ...] | None:
    """Servers and layers of each stage, in order; None: too few of them, or too little memory.

    Every stage has a layer. Of several that are as quick, the first in the list serve the first layers."""
    assert 1 <= num_stages <= num_layers, "a stage needs a layer"
    assert all(server.layer > 0 for server in servers)
    counts = range(1, num_layers + 1)
    times = sorted({s.time(n, last) for s in servers for n in counts for last in (False, True)})
    low, high = 0, len(times)
    while low < high:
        middle = (low + high) // 2
        if _chosen(servers, num_layers, num_stages, times[middle]) is None:
            low = middle + 1
        else:
            high = middle
    if low == len(times):
        return None
    chosen = _chosen(servers, num_layers, num_stages, times[low])
    assert chosen is not None
    return _filled(chosen, num_layers, times[low])


def _chosen(servers: Sequence[Server], num_layers: int, num_stages: int, time: float) -> list[Server] | None:
    """Servers in the order of stages that fit all layers within `time`, each at least one."""
    if num_stages == 1:
        alone = [s for s in servers if s.fits(time, True, True) >= num_layers]
        return alone[:1] or None
    inner = {s.name: s.fits(time, False, False) for s in servers}
    ranked = sorted((s for s in servers if inner[s.name]), key=lambda s: -inner[s.name])
    for first, last, fitted in _ends(servers, num_stages, time):
        between = [s for s in ranked if s is not first and s is not last][: num_stages - 2]
        if len(between) < num_stages - 2:
            continue
        if fitted + sum(inner[s.name] for s in between) >= num_layers:
            return [first, *(s for s in servers if s in between), last]
    return None


def _ends(servers: Sequence[Server], num_stages: int, time: float) -> Iterator[tuple[Server, Server, int]]:
    """Pairs for the first and the last stage, and how many layers they fit together."""
    firsts = [(s.fits(time, True, False), s) for s in servers]
    lasts = [(s.fits(time, False, True), s) for s in servers]
    for fits_first, first in _most(firsts, num_stages):
        for fits_last, last in _most(lasts, num_stages):
            if first is not last:
                yield first, last, fits_first + fits_last


def _most(fits: Sequence[tuple[int, Server]], count: int) -> list[tuple[int, Server]]:
    """Those that fit most, in their own order."""
    ranked = sorted(range(len(fits)), key=lambda i: -fits[i][0])[:count]
    return [fits[i] for i in sorted(ranked) if fits[i][0]]


def _filled(chosen: Sequence[Server], num_layers: int, time: float) -> tuple[Share, ...]:
    """One layer after another to the stage that is quickest with it."""
    last = len(chosen) - 1
    sizes = [1] * len(chosen)
    for _ in range(num_layers - len(chosen)):
        fitting = [
            (server.time(sizes[i] + 1, i == last), i)
            for i, server in enumerate(chosen)
            if sizes[i] < server.fits(time, i == 0, i == last)
        ]
        sizes[min(fitting)[1]] += 1
    shares, end = [], 0
    for server, size in zip(chosen, sizes, strict=True):
        shares.append(Share(server, end, end + size))
        end += size
    return tuple(shares)
