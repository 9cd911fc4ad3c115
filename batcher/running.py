"""Pure. The sequences that run: their slots, and the lines they wait in for their next step.

A running sequence stands in exactly one line while it has tokens to compute. While a step that samples for it
is in flight it stands in `ahead` if the next one can be sent behind that, and in none once it was.
"""

from collections import deque
from collections.abc import Iterator

from batcher.sequence import Sequence, Status
from chassis.ids import RequestId, Slot


class Running:
    def __init__(self, sequences_max: int) -> None:
        assert sequences_max >= 1
        self._sequences: dict[RequestId, Sequence] = {}
        self._sequences_max = sequences_max
        self._slots = [Slot(slot) for slot in reversed(range(sequences_max))]
        self._freed: list[Slot] = []
        self.decoding: deque[Sequence] = deque()  # one token to compute
        self.prefilling: dict[RequestId, Sequence] = {}  # several, in the order they were seated
        self.alone: deque[Sequence] = deque()  # any number, in steps of their own
        self.ahead: dict[RequestId, Sequence] = {}  # the one in flight, if it does not end the output
        self.runs_ahead = False  # steps are sent ahead at all
        self.growth_tokens = 0  # that they may still write

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    @property
    def places(self) -> int:
        return len(self._slots)

    def seat(self, sequence: Sequence) -> None:
        sequence.status = Status.RUNNING
        sequence.slot = self._slots.pop()
        sequence.fresh = True
        self._sequences[sequence.request.id] = sequence
        self.growth_tokens += sequence.growth_tokens
        self.line_up(sequence)

    def unseat(self, sequence: Sequence) -> None:
        """Its next status is the caller's to set."""
        del self._sequences[sequence.request.id]
        self.growth_tokens -= sequence.growth_tokens
        self.prefilling.pop(sequence.request.id, None)
        self.ahead.pop(sequence.request.id, None)
        for line in (self.decoding, self.alone):
            if sequence in line:
                line.remove(sequence)
        assert sequence.slot is not None
        self._slots.append(sequence.slot)
        self._freed.append(sequence.slot)
        sequence.slot = None

    def line_up(self, sequence: Sequence) -> None:
        """It needs steps, or may be sent ahead."""
        left = len(sequence.ids) - sequence.num_computed
        if left <= 0:
            if self._may_go_ahead(sequence, left):
                self.ahead[sequence.request.id] = sequence
        elif sequence.alone:
            self.alone.append(sequence)
        elif left == 1:
            self.decoding.append(sequence)
        else:
            self.prefilling[sequence.request.id] = sequence

    def told(self, sequence: Sequence) -> None:
        """The token that it sampled is known, and does not end it."""
        self.ahead.pop(sequence.request.id, None)
        self.line_up(sequence)

    def _may_go_ahead(self, sequence: Sequence, left: int) -> bool:
        """One unknown token at most, not the last by length; who is alone has the whole ring."""
        return self.runs_ahead and left == 0 and sequence.growth_tokens > 1 and not sequence.alone

    def line_up_all(self) -> None:
        """Nothing is in flight: all need steps. In order."""
        self.ahead.clear()
        self.decoding.clear()
        self.prefilling.clear()
        self.alone.clear()
        for sequence in sorted(self, key=lambda sequence: sequence.order):
            self.line_up(sequence)

    def take_freed(self) -> tuple[Slot, ...]:
        """Slots given up since the last step that said so."""
        freed = tuple(self._freed)
        self._freed.clear()
        return freed

    def check(self) -> None:
        slots = [sequence.slot for sequence in self] + self._slots
        assert len(slots) == self._sequences_max == len(dict.fromkeys(slots))
        assert sum(sequence.growth_tokens for sequence in self) == self.growth_tokens
        lined = [*self.decoding, *self.prefilling.values(), *self.alone]
        needing = [sequence for sequence in self if sequence.num_computed < sequence.num_tokens]
        assert len(needing) == len(lined) == len({sequence.request.id: None for sequence in lined})
        for sequence in lined:
            assert self._sequences[sequence.request.id] is sequence
            assert sequence.status is Status.RUNNING and sequence.num_computed < sequence.num_tokens
        for sequence in self.ahead.values():
            assert self._sequences[sequence.request.id] is sequence
            assert self._may_go_ahead(sequence, sequence.num_tokens - sequence.num_computed)
        for sequence in self.decoding:
            assert sequence.num_tokens - sequence.num_computed == 1 and not sequence.alone
