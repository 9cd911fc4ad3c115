"""Pure. Which workers serve which layers.

Layers that workers wish for are theirs, if the wishes fit together. Else, where workers are about as quick
and have memory enough, layers are split evenly, and each stage gets whoever fits it best: who holds the
layers, then who is meant for it. Else by measured time (`shares`), but layers that lie where they would do
nearly as well stay there: loading them costs more than a little time a step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from batcher.layer_wishes import wished_split
from batcher.shares import ROOM_MAX, Server, Share, quickest, slowest
from chassis.ids import BootId
from chassis.messages.registry import WorkerEntry

ALIKE = 1.25  # by so much measurements of the same machine differ
SLACK = 0.1  # a stage may be so much slower than it must be, if layers stay where they are

Fitness = Callable[[WorkerEntry, int, tuple[int, int]], int]
Ranges = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Stage:
    worker: WorkerEntry
    first_layer: int
    end_layer: int


def split_layers(num_layers: int, head_cost_layers: float, num_stages: int) -> list[tuple[int, int]]:
    """Layer ranges whose costliest stage is as cheap as can be; the last stage also pays for the head."""
    assert 1 <= num_stages <= num_layers, "a stage needs a layer"
    best: list[tuple[int, int]] = []
    best_cost = float("inf")
    for last in range(1, num_layers - num_stages + 2):
        rest, others = num_layers - last, num_stages - 1
        if others == 0 and rest:
            continue
        sizes = [rest // others + (i < rest % others) for i in range(others)] + [last]
        cost = max(*sizes[:-1], last + head_cost_layers) if others else last + head_cost_layers
        if cost < best_cost:
            best_cost, first = cost, 0
            best = []
            for size in sizes:
                best.append((first, first + size))
                first += size
    return best


def arrange(workers: Sequence[WorkerEntry], num_stages: int, fitness: Fitness) -> tuple[Stage, ...] | None:
    """A worker for every stage; None: there are too few, or they have too little memory."""
    if len(workers) < num_stages:
        return None
    num_layers = workers[0].num_layers
    even = split_layers(num_layers, workers[0].head_cost_layers, num_stages)
    servers = servers_of(workers)

    def holds(worker: WorkerEntry, stage: int, ranges: Ranges) -> bool:
        size = ranges[stage][1] - ranges[stage][0]
        return servers[worker.boot].holds(size, stage == 0, stage + 1 == num_stages)

    wished = wished_split(num_layers, num_stages, (w.wish for w in workers))
    if wished is not None:
        stages = _matched(workers, wished, fitness, lambda w, i: holds(w, i, wished))
        if stages is not None:
            return stages
    if _alike(workers, servers, even):
        return _matched(workers, even, fitness, lambda worker, stage: True)
    ordered = sorted(workers, key=lambda w: (w.preferred_stage is None, w.preferred_stage or 0, w.boot))
    best = quickest([servers[w.boot] for w in ordered], num_layers, num_stages)
    if best is None:
        return None
    limit = slowest(best) * (1 + SLACK)
    for ranges in (_loaded(workers, num_layers, num_stages), even):
        if ranges is None:
            continue

        def serves(worker: WorkerEntry, stage: int, ranges: Ranges = ranges) -> bool:
            time = servers[worker.boot].time(ranges[stage][1] - ranges[stage][0], stage + 1 == num_stages)
            return time <= limit and holds(worker, stage, ranges)

        stages = _matched(workers, ranges, fitness, serves)
        if stages is not None:
            return stages
    by_boot = {w.boot: w for w in workers}
    return tuple(Stage(by_boot[BootId(s.server.name)], s.first_layer, s.end_layer) for s in best)


def servers_of(workers: Sequence[WorkerEntry]) -> dict[str, Server]:
    """Whose speed is not known counts as one in the middle."""
    known = [w.layer_us for w in workers if w.layer_us > 0]
    middle = median(known) if known else 1.0
    return {
        w.boot: Server(
            w.boot,
            layer=w.layer_us or middle,
            head=w.head_cost_layers * (w.layer_us or middle),
            room=w.layers_max or ROOM_MAX,
            head_room=w.head_layers,
            ends_room=w.ends_layers,
        )
        for w in workers
    }


def gain(stages: Sequence[Stage], workers: Sequence[WorkerEntry], fitness: Fitness) -> float:
    """The share of the slowest stage's time that these workers would save, as they would be arranged; those
    of the stages are among them."""
    other = arrange(workers, len(stages), fitness)
    if other is None:
        return 0.0
    servers = servers_of(workers)
    return 1.0 - _slowest(other, servers) / _slowest(stages, servers)


def _slowest(stages: Sequence[Stage], servers: dict[str, Server]) -> float:
    return slowest([Share(servers[s.worker.boot], s.first_layer, s.end_layer) for s in stages])


def _alike(workers: Sequence[WorkerEntry], servers: dict[str, Server], even: Ranges) -> bool:
    times = [server.layer for server in servers.values()]
    if max(times) > ALIKE * min(times):
        return False
    last = len(even) - 1
    return all(
        server.holds(end - first, i == 0, i == last)
        for server in servers.values()
        for i, (first, end) in enumerate(even)
    )


def _matched(
    workers: Sequence[WorkerEntry],
    ranges: Ranges,
    fitness: Fitness,
    serves: Callable[[WorkerEntry, int], bool],
) -> tuple[Stage, ...] | None:
    """A worker for each range out of those that may serve it: the fittest first, who then makes room for a
    stage that nobody else may serve."""
    by_boot = {w.boot: w for w in sorted(workers, key=lambda w: w.boot)}
    scored = sorted(
        (-fitness(w, i, r), i, w.boot) for i, r in enumerate(ranges) for w in workers if serves(w, i)
    )
    stage_of: dict[str, int] = {}
    chosen: dict[int, str] = {}
    for _, index, boot in scored:
        if index not in chosen and boot not in stage_of:
            chosen[index], stage_of[boot] = boot, index

    def placed(index: int, tried: dict[str, None]) -> bool:
        for _, i, boot in scored:
            if i != index or boot in tried:
                continue
            tried[boot] = None
            if boot not in stage_of or placed(stage_of[boot], tried):
                chosen[index], stage_of[boot] = boot, index
                return True
        return False

    for index in range(len(ranges)):
        if index not in chosen and not placed(index, {}):
            return None
    return tuple(Stage(by_boot[BootId(chosen[i])], *r) for i, r in enumerate(ranges))


def _loaded(workers: Sequence[WorkerEntry], num_layers: int, num_stages: int) -> Ranges | None:
    """Ranges of which as many as can be lie at a worker already; None: no worker has any."""
    starts: dict[int, list[int]] = {}
    for w in workers:
        if w.loaded:
            starts.setdefault(w.loaded.start, []).append(w.loaded.stop)
    if not starts:
        return None
    stops = [stop for some in starts.values() for stop in some]
    borders = sorted({*starts, *stops, num_layers})
    best: dict[tuple[int, int], tuple[int, tuple[tuple[int, int], ...]]] = {(num_layers, 0): (0, ())}
    for left in range(1, num_stages + 1):
        for first in [0, *borders[:-1]] if borders[0] else borders[:-1]:
            ends = sorted(set(starts.get(first, [])) | {b for b in borders if b > first})
            found = [
                (rest[0] + (end in starts.get(first, [])), ((first, end), *rest[1]))
                for end in ends
                if (rest := best.get((end, left - 1))) is not None
            ]
            if found:
                best[first, left] = max(found, key=lambda f: (f[0], [-e for _, e in f[1]]))
    whole = best.get((0, num_stages))
    return whole[1] if whole is not None and whole[0] else None


def pair(one: Stage, other: Stage) -> tuple[str, str]:
    """Their boots, whichever comes first."""
    a, b = sorted((one.worker.boot, other.worker.boot))
    return a, b


def neighbours(stages: tuple[Stage, ...]) -> list[tuple[str, str]]:
    return [pair(one, other) for one, other in pairwise(stages)]
