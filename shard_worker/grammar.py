"""The grammars of a worker's outputs: compiled beside the steps, kept for whoever brings them again.

Rules: nobody waits for a compilation, who samples before it is over is told so; one that takes too long or
fails is its own requests' trouble. Matchers are used on the compute thread, each by one sequence; their state
is a function of the grammar and the output's ids.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from chassis import log
from chassis.messages.card import parse_card
from chassis.messages.sampling import GRAMMAR_ERROR, Grammar
from shard_worker.executor import Bool, Matcher

if TYPE_CHECKING:
    from chassis.grammars import Compiled, Following, Vocabulary

COMPILED_LEN_MAX = 128
COMPILE_S_MAX = 10.0
Run = Callable[[Callable[[], None]], None]


def inline(work: Callable[[], None]) -> None:
    """A `Run` for the simulation and tests."""
    work()


class Grammars:
    """Of one model. `run` runs what it is given soon, on a thread of its own; `clock` in seconds."""

    def __init__(self, card: bytes, run: Run = inline, clock: Callable[[], float] = lambda: 0.0) -> None:
        self._card = parse_card(card)
        self.vocab_size = self._card.vocab_size
        self._run = run
        self._clock = clock
        self._vocabulary: Vocabulary | None = None
        self._known: OrderedDict[Grammar, _Entry] = OrderedDict()  # the one used last is last

    def matcher(self, grammar: Grammar) -> Matcher:
        """For an output that is empty. Compiles what is not known."""
        entry = self._known.get(grammar)
        if entry is None:
            entry = self._known[grammar] = _Entry(self._clock())
            while len(self._known) > COMPILED_LEN_MAX:
                self._known.popitem(last=False)
            self._run(lambda: self._compile(grammar, entry))
        else:
            self._known.move_to_end(grammar)
        return OutputMatcher(entry, self._clock)

    def _compile(self, grammar: Grammar, entry: "_Entry") -> None:
        from chassis.grammars import Compiled, Vocabulary  # of no use to those who are never asked

        try:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._card)
            entry.compiled = Compiled(grammar, self._vocabulary)
        except ValueError as error:
            entry.error = str(error)
        except BaseException as error:  # a panic of the library is no Exception: this grammar fails, no other
            log.exception("grammar not compiled", error, kind=grammar.kind.value)
            entry.error = f"{type(error).__name__}: {error}"


class _Entry:
    """Of one grammar: on its way, compiled, or refused. Written by the thread that compiles it."""

    __slots__ = ("begun_at", "compiled", "error")

    def __init__(self, begun_at: float) -> None:
        self.begun_at = begun_at
        self.compiled: Compiled | None = None
        self.error: str | None = None


class OutputMatcher:
    """`Matcher`."""

    __slots__ = ("_clock", "_entry", "_error", "_following", "taken")

    def __init__(self, entry: _Entry, clock: Callable[[], float]) -> None:
        self._entry = entry
        self._clock = clock
        self._following: Following | None = None
        self.taken = 0  # ids of the output
        self._error: str | None = None

    def allowed(self, output_ids: Sequence[int], length: int) -> Bool | str | None:
        if self._error is None and self._following is None:
            self._begin()
        if self._error is None and self._following is not None:
            self._error = self._following.take(output_ids[self.taken : length])
            self.taken = length
        if self._error is not None:
            return GRAMMAR_ERROR + self._error
        if self._following is None:
            return None
        mask = self._following.allowed()
        if isinstance(mask, str):
            self._error = mask
            return GRAMMAR_ERROR + mask
        return mask

    def _begin(self) -> None:
        entry = self._entry
        if entry.error is not None:
            self._error = entry.error
        elif entry.compiled is None:
            if self._clock() - entry.begun_at > COMPILE_S_MAX:
                self._error = f"not compiled within {COMPILE_S_MAX:g} s"
        elif entry.compiled.error is not None:
            self._error = entry.compiled.error
        else:
            self._following = entry.compiled.begin()
