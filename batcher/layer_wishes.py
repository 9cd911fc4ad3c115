"""Pure. The split of layers that workers wish for, where their wishes fit together.

A worker may prefer one range (`preferred_layers`). Ranges that do not overlap are stages as they are; what
they leave open goes to the other stages, evenly. Wishes that overlap an earlier one, or leave more gaps than
there are stages left or a stage without a layer, are not followed: then layers are split as without them.
"""

from collections.abc import Iterable


def wished_split(num_layers: int, num_stages: int, wishes: Iterable[range]) -> list[tuple[int, int]] | None:
    """Layer ranges in order, so many as stages; None: nobody wishes, or it cannot be."""
    kept: list[tuple[int, int]] = []
    for first, end in sorted({(wish.start, wish.stop) for wish in wishes}):
        if first < end <= num_layers and (not kept or first >= kept[-1][1]):
            kept.append((first, end))
    others = num_stages - len(kept)
    gaps = _gaps(num_layers, kept)
    if not kept or len(gaps) > others or (others and not gaps) or others > sum(e - f for f, e in gaps):
        return None
    return sorted(kept + [part for gap, parts in _shared(gaps, others) for part in _divided(gap, parts)])


def _gaps(num_layers: int, kept: list[tuple[int, int]]) -> list[tuple[int, int]]:
    edges = [0, *(edge for wish in kept for edge in wish), num_layers]
    return [(first, end) for first, end in zip(edges[::2], edges[1::2], strict=True) if first < end]


def _shared(gaps: list[tuple[int, int]], stages: int) -> list[tuple[tuple[int, int], int]]:
    """How many stages each gap gets: one, and then whichever has most layers a stage."""
    parts = [1] * len(gaps)
    for _ in range(stages - len(gaps)):
        layers = [(end - first) / count for (first, end), count in zip(gaps, parts, strict=True)]
        parts[layers.index(max(layers))] += 1
    return list(zip(gaps, parts, strict=True))


def _divided(gap: tuple[int, int], parts: int) -> list[tuple[int, int]]:
    first, end = gap
    edges = [first + (end - first) * part // parts for part in range(parts + 1)]
    return list(zip(edges, edges[1:], strict=False))
