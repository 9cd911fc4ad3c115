"""Pure. Who of the running gives way when the pool is dry.

Only who is behind the requester in the order, so the best of the running never does; the batch class before
all others. Among the last few of those the one whose blocks come cheapest: what it would compute again for
each block that is of use soon. What others hold too stays, and counts neither as lost nor as freed; and who
frees far more than is needed soon loses that for nothing.
"""

from collections.abc import Callable, Iterable
from heapq import nlargest

from batcher.sequence import Sequence
from chassis.ids import BlockId

LOOKED_AT = 16
AGAIN_TOKENS = 16  # what giving way and coming back costs at least, as if so many were computed


def choose_victim(
    running: Iterable[Sequence], requester: Sequence, num_own: Callable[[list[BlockId]], int], wanted: int
) -> Sequence | None:
    """`num_own`: how many blocks of a table nobody else holds. `wanted`: blocks that are needed soon."""
    behind = [s for s in running if s.order > requester.order and s.blocks]
    behind = [s for s in behind if s.place.batch] or behind
    if not behind:
        return None

    def cost(sequence: Sequence) -> float:
        own = num_own(sequence.blocks)
        size = sequence.hasher.block_size_tokens
        lost = max(0, sequence.num_computed - size * (len(sequence.blocks) - own))
        return (lost + AGAIN_TOKENS) / min(own, max(1, wanted)) if own else float("inf")

    last = nlargest(LOOKED_AT, behind, key=lambda sequence: sequence.order)
    return min(last, key=cost)
