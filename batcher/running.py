"""Pure. The sequences that run: their slots, and the lines they wait in for their next step.

A running sequence stands in exactly one line while it has tokens to compute; those of the batch class in
`spare`. While a step that samples for it is in flight it stands in `ahead` if the next one can be sent behind
that, and in none once it was.
"""

from collections import deque
from collections.abc import Iterator

from batcher.sequence import Sequence, Status
from batcher.siblings import Siblings
from chassis.ids import RequestId, Slot


class Lines:
    def __init__(self) -> None:
        self.decoding: deque[Sequence] = deque()  # one token to compute
        self.prefilling: dict[RequestId, Sequence] = {}  # several, in the order they were seated

    def clear(self) -> None:
        self.decoding.clear()
        self.prefilling.clear()


class Running:
    def __init__(self, sequences_max: int, shares_prompts: bool = True) -> None:
        assert sequences_max >= 1
        self._sequences: dict[RequestId, Sequence] = {}
        self._sequences_max = sequences_max
        self._slots = [Slot(slot) for slot in reversed(range(sequences_max))]
        self._freed: list[Slot] = []
        self.lines = Lines()
        self.spare = Lines()  # of the batch class
        self.alone: deque[Sequence] = deque()  # any number, in steps of their own
        self.batch: dict[RequestId, Sequence] = {}  # the batch class: it gives its places to others
        self.ahead: dict[RequestId, Sequence] = {}  # the one in flight, if it does not end the output
        self.runs_ahead = False  # steps are sent ahead at all
        self.growth_tokens = 0  # that they may still write
        self.siblings = Siblings(shares_prompts)  # those that wait for a prompt stand in no line

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    @property
    def places(self) -> int:
        return len(self._slots)

    def seat(self, sequence: Sequence, waits: bool = False) -> None:
        """`waits`: for a prompt that another computes."""
        sequence.status = Status.RUNNING
        sequence.slot = self._slots.pop()
        sequence.fresh = True
        self._sequences[sequence.request.id] = sequence
        if sequence.place.batch:
            self.batch[sequence.request.id] = sequence
        self.growth_tokens += sequence.growth_tokens
        if waits:
            self.siblings.waits(sequence)
        else:
            self.siblings.seated(sequence)
            self.line_up(sequence)

    def begin(self, sequence: Sequence) -> None:
        """It waited for a prompt, and has it, or computes it."""
        self.siblings.begins(sequence)
        self.siblings.seated(sequence)
        self.line_up(sequence)

    def unseat(self, sequence: Sequence) -> None:
        """Its next status is the caller's to set."""
        del self._sequences[sequence.request.id]
        self.siblings.left(sequence)
        self.batch.pop(sequence.request.id, None)
        self.growth_tokens -= sequence.growth_tokens
        self.withdraw(sequence)
        assert sequence.slot is not None
        self._slots.append(sequence.slot)
        self._freed.append(sequence.slot)
        sequence.slot = None

    def withdraw(self, sequence: Sequence) -> None:
        """Out of the line it stands in, if it does."""
        lines = self._lines(sequence)
        lines.prefilling.pop(sequence.request.id, None)
        self.ahead.pop(sequence.request.id, None)
        for line in (lines.decoding, self.alone):
            if sequence in line:
                line.remove(sequence)

    def prompts(self) -> Iterator[Sequence]:
        """Those whose tables have not grown to what they have to compute."""
        yield from self.lines.prefilling.values()
        yield from self.spare.prefilling.values()
        yield from self.alone

    def _lines(self, sequence: Sequence) -> Lines:
        return self.spare if sequence.place.batch else self.lines

    def line_up(self, sequence: Sequence) -> None:
        """It needs steps, or may be sent ahead."""
        left = len(sequence.ids) - sequence.num_computed
        if left <= 0:
            if self._may_go_ahead(sequence, left):
                self.ahead[sequence.request.id] = sequence
        elif sequence.alone:
            self.alone.append(sequence)
        elif left == 1:
            self._lines(sequence).decoding.append(sequence)
        else:
            self._lines(sequence).prefilling[sequence.request.id] = sequence

    def told(self, sequence: Sequence) -> None:
        """The token that it sampled is known, and does not end it."""
        self.ahead.pop(sequence.request.id, None)
        self.line_up(sequence)

    def _may_go_ahead(self, sequence: Sequence, left: int) -> bool:
        """One unknown token at most, not the last by length; who is alone has the whole ring, and the batch
        class waits for its tokens, so that little of it lies in front of others."""
        may = self.runs_ahead and not sequence.alone and not sequence.place.batch
        return may and left == 0 and sequence.growth_tokens > 1

    def line_up_all(self) -> None:
        """Nothing is in flight: all need steps. In order."""
        self.ahead.clear()
        self.lines.clear()
        self.spare.clear()
        self.alone.clear()
        for sequence in sorted(self, key=lambda sequence: sequence.order):
            if sequence not in self.siblings:
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
        assert list(self.batch) == [s.request.id for s in self if s.place.batch]
        decoding = [*self.lines.decoding, *self.spare.decoding]
        lined = [*decoding, *self.prompts()]
        for lines in (self.lines, self.spare):
            mine = [*lines.decoding, *lines.prefilling.values()]
            assert all(self._lines(sequence) is lines for sequence in mine)
        self.siblings.check(self._sequences)
        needing = [s for s in self if s.num_computed < s.num_tokens and s not in self.siblings]
        assert len(needing) == len(lined) == len({sequence.request.id: None for sequence in lined})
        for sequence in lined:
            assert self._sequences[sequence.request.id] is sequence
            assert sequence.status is Status.RUNNING and sequence.num_computed < sequence.num_tokens
        for sequence in self.ahead.values():
            assert self._sequences[sequence.request.id] is sequence
            assert self._may_go_ahead(sequence, sequence.num_tokens - sequence.num_computed)
        for sequence in decoding:
            assert sequence.num_tokens - sequence.num_computed == 1 and not sequence.alone
