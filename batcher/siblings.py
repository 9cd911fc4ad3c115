"""Pure. Prompts that several of the running share: computed once, by whoever came first.

Who is seated while another computes the same prompt (of the same tenant, if tenants are kept apart) waits for
it, in no line. When the prompt has come back it begins there: it names the first's blocks, and the last one,
if its end is still written, becomes a copy before it writes itself (`Composer`). If the first leaves before,
the next takes its place. Whoever is told of its prompt, or runs alone, computes it itself; so does who would
wait for the batch class, which computes in spare room only.
"""

from collections.abc import Iterator

from batcher.sequence import Sequence
from chassis.ids import RequestId

Key = tuple[int, bytes, tuple[int, ...]]


class Siblings:
    def __init__(self, enabled: bool = True) -> None:
        self._first: dict[Key, Sequence] = {}
        self._keys: dict[RequestId, Key] = {}  # of those that run
        self._waiting: dict[RequestId, Sequence] = {}  # in the order they were seated
        self.num_batch = 0  # of these, the batch class
        self._enabled = enabled

    def __len__(self) -> int:
        """How many wait for a prompt."""
        return len(self._waiting)

    def __contains__(self, sequence: Sequence) -> bool:
        """Whether it waits for its prompt."""
        return sequence.request.id in self._waiting

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting.values())

    def first_of(self, sequence: Sequence) -> Sequence | None:
        """Whose prompt it may begin from, now or later. None: it computes its own."""
        if not self._first or sequence.alone or sequence.uncached or sequence.prompt is not None:
            return None
        first = self._first.get(self._key(sequence))
        if first is None or sequence.num_computed >= shared_len(sequence) or _keeps(first, sequence):
            return None
        return first

    def seated(self, sequence: Sequence) -> None:
        """It runs, and computes its own prompt or has it."""
        if sequence.alone or sequence.uncached or not self._enabled:
            return
        key = self._keys[sequence.request.id] = self._key(sequence)
        if (first := self._first.get(key)) is None or _keeps(first, sequence):
            self._first[key] = sequence

    def waits(self, sequence: Sequence) -> None:
        self._waiting[sequence.request.id] = sequence
        self.num_batch += sequence.place.batch

    def begins(self, sequence: Sequence) -> None:
        """It waits no longer."""
        del self._waiting[sequence.request.id]
        self.num_batch -= sequence.place.batch

    def left(self, sequence: Sequence) -> None:
        """It does not run any more."""
        if sequence in self:
            self.begins(sequence)
        key = self._keys.pop(sequence.request.id, None)
        if key is not None and self._first.get(key) is sequence:
            del self._first[key]

    def ready(self) -> list[tuple[Sequence, Sequence | None]]:
        """Who waits no longer, and whose prompt it begins from; None: it has to compute it."""
        found: list[tuple[Sequence, Sequence | None]] = []
        for sequence in self._waiting.values():
            first = self._first.get(self._key(sequence))
            if first is None or has_prompt(first):
                found.append((sequence, first))
        return found

    def _key(self, sequence: Sequence) -> Key:
        full = shared_len(sequence) // sequence.hasher.block_size_tokens
        last = sequence.chain(full)[full - 1] if full else b""
        rest = sequence.ids[full * sequence.hasher.block_size_tokens : sequence.prompt_len]
        return sequence.hasher.root, last, tuple(rest)

    def check(self, running: dict[RequestId, Sequence]) -> None:
        assert self.num_batch == sum(sequence.place.batch for sequence in self)
        for request_id, sequence in self._waiting.items():
            assert running[request_id] is sequence and not sequence.blocks and not sequence.num_computed
            first = self._first[self._key(sequence)]
            assert running[first.request.id] is first and first is not sequence
        for key, first in self._first.items():
            assert running[first.request.id] is first and self._keys[first.request.id] == key


def shared_len(sequence: Sequence) -> int:
    """Tokens of its prompt that another's blocks may hold: the last is always computed."""
    return sequence.prompt_len - 1


def has_prompt(sequence: Sequence) -> bool:
    """Its blocks hold its whole prompt, and the full ones have known content."""
    full = shared_len(sequence) // sequence.hasher.block_size_tokens
    return sequence.num_proven >= sequence.prompt_len and sequence.num_committed >= full


def _keeps(first: Sequence, sequence: Sequence) -> bool:
    """Whether `sequence` would wait for what has no claim to be computed while it waits."""
    return first.place.batch and not sequence.place.batch and not has_prompt(first)
