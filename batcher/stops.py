"""Pure. The one place that ends a request: eos, stop ids, stop strings on token bytes, lengths.

Text is the concatenated bytes of the output ids. Rules, per output id in order:
- an eos or stop id ends (STOP); it stays in the output, its bytes do not count;
- else the stop string that completes earliest in the text ends (STOP), ties by list order; the text
  stays up to where it begins;
- else a full output or context ends (LENGTH).
The first `min_tokens` ids end nothing but by length, or where a grammar can only end.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from chassis.messages.request import Limits, Reason


@dataclass(frozen=True, slots=True)
class End:
    reason: Reason
    length: int  # output ids that stay
    byte_cut: int | None  # bytes of their text that stay; None = all


class Watch:
    """The ends of one output as it grows. Work per id is bounded by the id's bytes and the stops' lengths."""

    __slots__ = (
        "_bound",
        "_stop",
        "_stop_ids",
        "_tail",
        "_tail_len_max",
        "_text_len",
        "_token_bytes",
        "length",
        "length_max",
        "min_tokens",
    )

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        stop_ids: frozenset[int],
        limits: Limits,
        length_max: int,
        bound: bool = False,
    ) -> None:
        self._token_bytes = token_bytes
        self._stop_ids = stop_ids
        self._stop = limits.stop
        self._tail = b""
        self._tail_len_max = max(map(len, limits.stop), default=1) - 1
        self._text_len = 0
        self.length = 0
        self.length_max = length_max
        self.min_tokens = limits.min_tokens
        self._bound = bound

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end it, once it has min_tokens."""
        return tuple(sorted(self._stop_ids))

    def push(self, token_id: int) -> End | None:
        """Judge the next output id. After an End, push no more."""
        self.length = length = self.length + 1
        table = self._token_bytes
        text = table[token_id] if token_id < len(table) else b""  # ids beyond the table have no bytes
        late = length > self.min_tokens
        if token_id in self._stop_ids and (late or self._bound):
            return End(Reason.STOP, length, self._text_len if text else None)
        before = self._text_len
        self._text_len = before + len(text)
        if self._stop:
            window = self._tail + text
            if late:
                found = self._find(window, len(self._tail))
                if found is not None:
                    return End(Reason.STOP, length, before - len(self._tail) + found)
            self._tail = window[-self._tail_len_max :] if self._tail_len_max else b""
        if length >= self.length_max:
            return End(Reason.LENGTH, length, None)
        return None

    def _find(self, window: bytes, old_len: int) -> int | None:
        """Start of the match that completes earliest and after the first `old_len` bytes."""
        best_end, best_start = len(window) + 1, None
        for stop in self._stop:
            at = old_len - len(stop) + 1
            start = window.find(stop, at if at > 0 else 0)
            if start >= 0 and start + len(stop) < best_end:
                best_end, best_start = start + len(stop), start
        return best_start

    def check(self) -> None:
        assert len(self._tail) <= max(self._tail_len_max, 0)
        assert self._text_len >= len(self._tail)
        assert 0 <= self.length <= max(self.length_max, 0)


class Stops:
    """What is known of a model's tokens; makes the watches of its outputs."""

    def __init__(self, token_bytes: Sequence[bytes], eos_ids: Iterable[int]) -> None:
        self._token_bytes = token_bytes
        self._eos_ids = frozenset(eos_ids)

    def watch(self, limits: Limits, prompt_len: int, context_len_max: int, bound: bool = False) -> Watch:
        """For an output that is still empty. `bound`: to a grammar, which draws what ends it
        before min_tokens only where nothing else is left."""
        stop_ids = frozenset(limits.stop_token_ids)
        if not limits.ignore_eos:
            stop_ids |= self._eos_ids
        return Watch(
            self._token_bytes, stop_ids, limits, min(limits.max_tokens, context_len_max - prompt_len), bound
        )

    def judge(
        self, limits: Limits, prompt_len: int, output_ids: Sequence[int], context_len_max: int
    ) -> End | None:
        """The end of a whole output, if it has one; ids after `End.length` are beyond it."""
        return advance(self.watch(limits, prompt_len, context_len_max), output_ids)

    def check(self) -> None:
        assert all(0 <= token_id for token_id in sorted(self._eos_ids))


def advance(watch: Watch, output_ids: Iterable[int]) -> End | None:
    """Push ids until the output ends."""
    if watch.length >= watch.length_max:
        return End(Reason.LENGTH, watch.length, None)
    for token_id in output_ids:
        end = watch.push(token_id)
        if end is not None:
            return end
    return None
