"""Pure. Copy-on-write: blocks of others that become a sequence's own in the step that first writes them.

The step copies before its rows are computed, and stages take steps in order: so the source may go on being
written by whoever has it, and what the copy has beyond the sequence's own tokens is written before it is
read. The source stays held until that step has come back, because a free block may be filled from
elsewhere.
"""

from batcher.lease import Lease
from batcher.sequence import Sequence
from chassis.ids import BlockId


class BlockCopies:
    """Of the step that is being made."""

    def __init__(self, lease: Lease, block_size_tokens: int) -> None:
        self._lease = lease
        self._block_size_tokens = block_size_tokens
        self._made: list[tuple[Sequence, int, BlockId, BlockId]] = []  # for whom, and its incarnation

    @property
    def pairs(self) -> tuple[tuple[BlockId, BlockId], ...]:
        """From, to; not of those who lost their place meanwhile."""
        return tuple([(source, to) for who, began, source, to in self._made if who.incarnation == began])

    def begin(self) -> None:
        """A new step."""
        self._made.clear()

    def replace_last(self, sequence: Sequence, own: BlockId) -> None:
        """`own` takes the place of the block that it borrowed, with what it has of it."""
        source = sequence.blocks[-1]
        if sequence.num_computed % self._block_size_tokens:
            self._made.append((sequence, sequence.incarnation, source, own))
        self._lease.give_up(source, sequence.keep)
        sequence.blocks[-1] = own
        sequence.borrowed = False
