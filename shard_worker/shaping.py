"""Pure. What the last stage knows of the slots whose sampling is more than temperature, top-k and top-p.

Penalties, bad words and grammars are functions of the prompt and output ids alone: they are followed as the
ids come by in steps, and what never comes by (a cached prefix, a sequence started again) comes whole with the
fresh row.
So whoever resumes a sequence, at whatever place, has the same counts. Slots that use none have no entry here.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from chassis.messages import BadMessage
from chassis.messages.pipeline import FLAG_FRESH, LAST_SAMPLED, SlotStart, Step
from chassis.messages.sampling import NO_SHAPING
from shard_worker.executor import F32, I64, U32, GrammarRow, MatcherOf, ShapingColumns

T = TypeVar("T", bound=np.generic)
NO_PLACES: I64 = np.empty(0, np.int64)
NO_VALUES: F32 = np.empty(0, np.float32)


class Seen:
    """Distinct ids, and how often each is in the output."""

    __slots__ = ("_counts", "_ids", "_places")

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._ids = np.empty(256, np.int64)
        self._counts = np.empty(256, np.float32)

    def add(self, token_id: int, times: int) -> None:
        """`times` 0: it is in the prompt."""
        place = self._places.get(token_id)
        if place is None:
            place = self._places[token_id] = len(self._places)
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.empty_like(self._counts)])
            self._ids[place], self._counts[place] = token_id, 0
        self._counts[place] += times

    @property
    def ids(self) -> I64:
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> F32:
        return self._counts[: len(self._places)]


class SlotShape:
    """One slot's. `follow` it with all ids in order."""

    def __init__(self, start: SlotStart, vocab_size: int, matcher_of: MatcherOf | None = None) -> None:
        """Raises BadMessage."""
        self.shaping = shaping = start.sampling.shaping or NO_SHAPING
        self.logprobs = start.sampling.logprobs
        self.length = len(start.before)  # ids followed
        self.follows = start.prompt_len > 0
        self._prompt_len = start.prompt_len
        self._min_tokens = start.min_tokens
        self._stop_ids = start.stop_ids
        self._vocab_size = vocab_size
        self.bias_ids = np.array([token_id for token_id, _ in shaping.logit_bias], np.int64)
        self.bias = np.array([bias for _, bias in shaping.logit_bias], np.float32)
        self.allowed = np.array(sorted(dict.fromkeys(shaping.allowed_ids)), np.int64)
        self._bans = tuple(word[0] for word in shaping.bad_words if len(word) == 1)
        self._words = tuple(word for word in shaping.bad_words if len(word) > 1)
        self._tail_len = max(map(len, self._words), default=1) - 1
        self._tail: tuple[int, ...] = ()  # of the output
        self.seen = Seen()
        self.matcher = None
        self.output: list[int] = []  # of who has a matcher
        if (grammar := start.sampling.grammar) is not None:
            if matcher_of is None:
                raise BadMessage("step: a grammar, and nobody reads it here")
            self.matcher = matcher_of(grammar)
        if start.sampling.follows and not self.follows:
            raise BadMessage("step: a start without the ids so far")
        named = chain(
            shaping.allowed_ids, self.bias_ids.tolist(), *shaping.bad_words, start.stop_ids, start.before
        )
        if max(named, default=0) >= vocab_size:
            raise BadMessage("step: token id out of range")
        self._count(0, start.before)

    def follow(self, ids: Sequence[int]) -> None:
        """The next ids, of prompt or output."""
        if self.follows:
            self._count(self.length, ids)
        self.length += len(ids)

    def follow_open(self) -> None:
        """The next id is sampled by a step that has not run: `learn` it then, before the one behind."""
        self.length += 1

    def learn(self, token_id: int) -> None:
        """An id of the output that was open."""
        self._count(self._prompt_len, (token_id,))

    def _count(self, begin: int, ids: Sequence[int]) -> None:
        border = max(0, min(len(ids), self._prompt_len - begin))
        if self.shaping.repetition_penalty != 1:
            for token_id in ids[:border]:
                self.seen.add(token_id, 0)
        output = ids[border:]
        if self.shaping.penalises:
            for token_id in output:
                self.seen.add(token_id, 1)
        if self._tail_len:
            self._tail = (*self._tail, *output)[-self._tail_len :]
        if self.matcher is not None:
            self.output += output

    def banned(self, output_index: int) -> list[int]:
        """Ids that must not be drawn as the output's next. None, if they would leave nothing to draw."""
        bans = dict.fromkeys(self._bans)
        for word in self._words:
            before = word[:-1]
            if self._tail[-len(before) :] == before:
                bans[word[-1]] = None
        if output_index < self._min_tokens:
            bans |= dict.fromkeys(self._stop_ids)
        if not bans:
            return []
        allowed = self.shaping.allowed_ids
        if allowed:
            whole = all(token_id in bans for token_id in allowed)
        else:
            whole = len(bans) >= self._vocab_size
        return [] if whole else list(bans)


class SlotShapes:
    """The shapes of one epoch's slots; only the last stage `samples`, others keep none."""

    def __init__(self, vocab_size: int, samples: bool, matcher_of: MatcherOf | None = None) -> None:
        self._vocab_size = vocab_size
        self._matcher_of = matcher_of
        self._samples = samples
        self.by_slot: dict[int, SlotShape] = {}

    def concerned(self, fresh: Sequence[SlotStart]) -> bool:
        """A step with these starts has something to `check` here."""
        return bool(self.by_slot) or (self._samples and any(map(_wants, fresh)))

    def check(self, step: Step) -> Callable[[], None] | None:
        """Of a step that is fine otherwise; changes nothing. Returns what takes it in. Raises BadMessage."""
        if not self.concerned(step.fresh):
            return None
        fresh = (step.flags & FLAG_FRESH) != 0
        begun = self._begun(step, fresh)
        for row, slot in enumerate(step.slots.tolist()):  # who follows the ids sees each once, in order
            shape = self.by_slot.get(slot)
            if shape is not None and shape.follows and not fresh[row] and shape.length != step.starts[row]:
                raise BadMessage("step: a row goes back")
        return partial(self._follow, step, fresh, begun)

    def _begun(self, step: Step, fresh: NDArray[np.bool_]) -> dict[int, SlotShape]:
        begun = {}
        for start, row in zip(step.fresh, fresh.nonzero()[0].tolist(), strict=True):
            if self._samples and _wants(start):
                begun[int(step.slots[row])] = SlotShape(start, self._vocab_size, self._matcher_of)
                if start.prompt_len and len(start.before) != step.starts[row]:
                    raise BadMessage("step: a start without the ids so far")
        return begun

    def _follow(self, step: Step, fresh: NDArray[np.bool_], begun: dict[int, SlotShape]) -> None:
        for slot in (*step.freed_slots.tolist(), *step.slots[fresh].tolist()):
            self.by_slot.pop(slot, None)
        self.by_slot |= begun
        end = 0
        for slot, count in zip(step.slots.tolist(), step.num_tokens.tolist(), strict=True):
            first, end = end, end + count
            shape = self.by_slot.get(slot)
            if shape is None or not shape.follows:
                continue
            ids = step.token_ids[first:end].tolist()
            if ids == [LAST_SAMPLED]:
                shape.follow_open()
            else:
                shape.follow(ids)

    def columns(self, sampling: I64, output_index: NDArray[np.int32]) -> ShapingColumns | None:
        """`sampling`: slots of the rows that sample."""
        shaped = self._shaped(sampling)
        return columns(shaped, output_index) if shaped else None

    def columns_later(
        self, sampling: I64, output_index: NDArray[np.int32], open_slots: I64
    ) -> Callable[[U32], ShapingColumns] | None:
        """The same of a step whose ids at `open_slots` are not known; None: no row's sampling follows them.
        It has the shapes that the slots have now, and may be called from another thread: before it was, none
        of them is followed further but by the next one of these."""
        following = [(place, shape) for place, shape in self._shaped(open_slots) if shape.follows]
        if not following:
            return None
        return partial(_columns_of, following, self._shaped(sampling), output_index)

    def _shaped(self, slots: I64) -> list[tuple[int, SlotShape]]:
        if not self.by_slot:
            return []
        return [
            (place, shape)
            for place, slot in enumerate(slots.tolist())
            if (shape := self.by_slot.get(slot)) is not None
        ]


def _columns_of(
    following: Sequence[tuple[int, SlotShape]],
    shaped: Sequence[tuple[int, SlotShape]],
    output_index: NDArray[np.int32],
    ids: U32,
) -> ShapingColumns:
    for place, shape in following:
        shape.learn(int(ids[place]))
    return columns(shaped, output_index)


def _wants(start: SlotStart) -> bool:
    """More than the sampling columns hold."""
    s = start.sampling
    return bool(s.shaping is not None or s.grammar is not None or s.logprobs is not None or start.min_tokens)


def columns(shapes: Sequence[tuple[int, SlotShape]], output_index: NDArray[np.int32]) -> ShapingColumns:
    """Of the sampling rows that have a shape, with their places, ascending."""
    bound = [(row, s) for row, s in shapes if s.matcher is not None]
    grammars = tuple([_grammar_row(row, s, int(output_index[row])) for row, s in bound])
    bans = [(row, [] if s.matcher else s.banned(int(output_index[row]))) for row, s in shapes]
    allowed = tuple((row, s.allowed) for row, s in shapes if len(s.allowed) and not s.matcher)
    biased = [(row, s) for row, s in shapes if len(s.bias_ids)]
    penal = [(row, s) for row, s in shapes if s.shaping.penalises and len(s.seen.ids)]
    min_p = [(row, s.shaping.min_p) for row, s in shapes if s.shaping.min_p > 0]
    typical = [(row, s.shaping.typical_p) for row, s in shapes if s.shaping.typical_p < 1]
    changed = [
        row
        for (row, s), (_, ids) in zip(shapes, bans, strict=True)
        if ids or s.matcher or len(s.bias_ids) or len(s.allowed) or (s.shaping.penalises and len(s.seen.ids))
    ]
    told = [(row, s.logprobs) for row, s in shapes if s.logprobs is not None]
    return ShapingColumns(
        rows=_places(changed),
        bias_rows=_repeat([(row, len(s.bias_ids)) for row, s in biased]),
        bias_ids=_joined([s.bias_ids for _, s in biased], NO_PLACES),
        bias=_joined([s.bias for _, s in biased], NO_VALUES),
        allowed=allowed,
        banned_rows=_repeat([(row, len(ids)) for row, ids in bans]),
        banned_ids=_places([token_id for _, ids in bans for token_id in ids]),
        penalty_rows=_places([row for row, _ in penal]),
        repetition=_values([s.shaping.repetition_penalty for _, s in penal]),
        frequency=_values([s.shaping.frequency_penalty for _, s in penal]),
        presence=_values([s.shaping.presence_penalty for _, s in penal]),
        seen_lens=_places([len(s.seen.ids) for _, s in penal]),
        seen_ids=_joined([s.seen.ids for _, s in penal], NO_PLACES),
        seen_counts=_joined([s.seen.counts for _, s in penal], NO_VALUES),
        min_p_rows=_places([row for row, _ in min_p]),
        min_p=_values([value for _, value in min_p]),
        typical_rows=_places([row for row, _ in typical]),
        typical_p=_values([value for _, value in typical]),
        logprob_rows=_places([row for row, _ in told]),
        top_logprobs=_places([number for _, number in told]),
        grammars=grammars,
    )


def _grammar_row(row: int, shape: SlotShape, output_index: int) -> GrammarRow:
    assert shape.matcher is not None
    banned = _places(shape.banned(output_index))
    return GrammarRow(row, shape.matcher, shape.output, len(shape.output), shape.allowed, banned)


def _places(values: list[int]) -> I64:
    return np.array(values, np.int64)


def _values(values: list[float]) -> F32:
    return np.array(values, np.float32)


def _repeat(lens: list[tuple[int, int]]) -> I64:
    return np.repeat(_places([row for row, _ in lens]), _places([n for _, n in lens]))


def _joined(columns: list[NDArray[T]], nothing: NDArray[T]) -> NDArray[T]:
    return np.concatenate(columns) if columns else nothing
