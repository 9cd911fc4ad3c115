"""Masks of grammars on every engine: what they let through, whom they leave alone, and who waits for them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from chassis.grammars import Compiled, Vocabulary
from chassis.messages import BadMessage
from chassis.messages import pipeline as p
from chassis.messages.card import parse_card
from chassis.messages.sampling import Grammar, GrammarKind, Sampling, Shaping
from shard_worker import sampler
from shard_worker.executor import Bool, Executor, StageSpec, StepInputs
from shard_worker.fake_model import EOS_ID, FakeConfig, FakeExecutor, card_of
from shard_worker.grammar import Grammars
from shard_worker.grammar_masks import masks_of
from shard_worker.inputs import SlotTables, TableLimits, Tables
from shard_worker.native import library
from shard_worker.native.tables import NativeTables
from shard_worker.sampler import SamplingColumns
from shard_worker.shaping import SlotShape, columns
from tests.shard_worker.test_ahead import BLOCK, CONTEXT, MAKERS, NOTHING, NUM_BLOCKS, SLOTS, executors, step
from tests.shard_worker.tiny_models import make

CARD = card_of(FakeConfig())
WORDS = Grammar(GrammarKind.REGEX, "([a-f]{2} ){3,9}")
JSON = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "array", "items": {"enum": ["x", 12]}, "maxItems": 4}')
NO = Grammar(GrammarKind.CHOICE, '["no"]')


def mask(*ids: int, size: int = 12) -> Bool:
    made = np.zeros(size, np.bool_)
    made[list(ids)] = True
    return made


class Told:
    """A `Matcher` that says what it is told to."""

    def __init__(self, answer: Bool | str | None) -> None:
        self.answer = answer
        self.asked: list[list[int]] = []

    def allowed(self, output_ids: Sequence[int], length: int) -> Bool | str | None:
        self.asked.append(list(output_ids[:length]))
        return self.answer


def shape(matcher: Told, shaping: Shaping | None = None, min_tokens: int = 0) -> SlotShape:
    sampling = Sampling(shaping=shaping, grammar=NO)
    start = p.SlotStart(sampling, 1, prompt_len=2, before=(3, 4, 5), min_tokens=min_tokens, stop_ids=(7,))
    return SlotShape(start, 12, lambda grammar: matcher)


def drawn(shapes: dict[int, SlotShape], num_rows: int, temperature: float) -> tuple[list[int], np.ndarray]:
    """Ids of rows with the same logits, and what became of these."""
    index = np.array([1] * num_rows, np.int32)
    logits = torch.arange(12, dtype=torch.float32).repeat(num_rows, 1)
    found = columns(list(shapes.items()), index)
    made = SamplingColumns(
        np.full(num_rows, temperature, np.float32),
        np.zeros(num_rows, np.int32),
        np.ones(num_rows, np.float32),
        np.arange(num_rows, dtype=np.uint64),
        index,
        found,
    )
    ids, _ = sampler.drawn(logits, made, masks_of(found.grammars))
    return ids.tolist(), logits.numpy()


@pytest.mark.parametrize(
    ("shaping", "min_tokens", "left"),
    [
        (None, 0, [2, 5, 7]),
        (Shaping(allowed_ids=(1, 5, 7)), 0, [5, 7]),
        (Shaping(allowed_ids=(1, 9)), 0, [2, 5, 7]),  # would leave nothing
        (Shaping(bad_words=((5,), (7,))), 0, [2]),
        (Shaping(bad_words=((2,), (5,), (7,))), 0, [2, 5, 7]),
        (None, 9, [2, 5]),
        (Shaping(allowed_ids=(7,)), 9, [7]),
        (Shaping(logit_bias=((1, 100.0), (2, 3.0))), 0, [2, 5, 7]),
        (Shaping(repetition_penalty=1.5, presence_penalty=1.0), 0, [2, 5, 7]),
    ],
)
def test_other_limits_take_their_ids_out_as_long_as_some_are_left(
    shaping: Shaping | None, min_tokens: int, left: list[int]
) -> None:
    _, logits = drawn({0: shape(Told(mask(2, 5, 7)), shaping, min_tokens)}, 1, 1.0)
    assert np.isfinite(logits[0]).nonzero()[0].tolist() == left


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_neighbours_draw_what_they_would_draw_alone(temperature: float) -> None:
    alone, untouched = drawn({}, 4, temperature)
    shapes = {1: shape(Told(mask(3))), 2: shape(Told("no such thing")), 3: shape(Told(None))}
    ids, logits = drawn(shapes, 4, temperature)
    assert ids == [alone[0], 3, alone[2], alone[3]]
    assert (logits[[0, 2, 3]] == untouched[[0, 2, 3]]).all()


def test_who_has_no_mask_is_told_by_place() -> None:
    shapes = [(0, shape(Told(mask(3)))), (2, shape(Told(None))), (3, shape(Told("why")))]
    masks = masks_of(columns(shapes, np.zeros(4, np.int32)).grammars)
    assert [row for row, _ in masks.rows] == [0]
    assert (masks.waiting_rows, masks.refused_rows) == ((2,), ((3, "why"),))


def test_a_matcher_is_asked_for_what_follows_the_output_alone() -> None:
    told = Told(mask(3))
    made = shape(told)  # 3 and 4 are the prompt
    made.follow([6])
    masks_of(columns([(0, made)], np.zeros(1, np.int32)).grammars)
    made.follow_open()
    made.learn(8)
    masks_of(columns([(0, made)], np.zeros(1, np.int32)).grammars)
    assert told.asked == [[5, 6], [5, 6, 8]]


# ---- who waits ---------------------------------------------------------------------------------------


class Later:
    """A `Run` whose work is done when the test says so."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []
        self.now = 0.0

    def __call__(self, work: Callable[[], None]) -> None:
        self.work.append(work)

    def done(self) -> None:
        for work in self.work:
            work()
        self.work.clear()


def test_nobody_waits_for_a_compilation_and_it_is_done_once() -> None:
    later = Later()
    grammars = Grammars(CARD, later, lambda: later.now)
    one, other = grammars.matcher(NO), grammars.matcher(NO)
    assert len(later.work) == 1
    assert one.allowed([], 0) is None
    later.done()
    for matcher in (one, other, grammars.matcher(NO)):
        found = matcher.allowed([], 0)
        assert not isinstance(found, str) and found is not None and found.nonzero()[0].tolist() == [ord("n")]
    assert not later.work


def test_what_takes_too_long_or_fails_says_so() -> None:
    later = Later()
    grammars = Grammars(CARD, later, lambda: later.now)
    slow, bad = grammars.matcher(NO), grammars.matcher(Grammar(GrammarKind.REGEX, "(["))
    later.work.pop(0)
    later.done()
    later.now = 11.0
    found = slow.allowed([], 0), bad.allowed([], 0)
    assert found[0] == "grammar: not compiled within 10 s"
    assert isinstance(found[1], str) and found[1].startswith("grammar: ") and "unclosed" in found[1]


def test_a_model_whose_outputs_nothing_ends_has_no_grammars(tmp_path: Path) -> None:
    from chassis.messages.card import build_card

    endless = build_card(replace(parse_card(CARD), eos_ids=()))
    found = Grammars(endless).matcher(NO).allowed([], 0)
    assert isinstance(found, str) and "no token that ends" in found


def test_so_many_are_kept() -> None:
    later = Later()
    grammars = Grammars(CARD, later)
    for i in range(300):
        grammars.matcher(Grammar(GrammarKind.REGEX, f"a{i}"))
    assert len(grammars._known) == 128


# ---- through tables and engines ---------------------------------------------------------------------


def tables_for(kind: str, card: bytes, whole: bool = True) -> Tables:
    vocab_size = parse_card(card).vocab_size
    limits = TableLimits(SLOTS, BLOCK, NUM_BLOCKS, CONTEXT, 128, vocab_size, whole, Grammars(card).matcher)
    if kind == "portable":
        return SlotTables(limits)
    found = library.native()
    if found is None:
        pytest.skip("there is no compiled code")
    return NativeTables(limits, found)


def test_tables_without_a_reader_refuse_grammars() -> None:
    limits = TableLimits(SLOTS, BLOCK, NUM_BLOCKS, CONTEXT, 128, 512)
    start = p.SlotStart(Sampling(grammar=NO), 1, prompt_len=3)
    row = {"slot": 1, "start": 0, "ids": [5, 6, 7], "blocks": [2], "fresh": start}
    with pytest.raises(BadMessage, match="grammar"):
        SlotTables(limits).take(step(1, row))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make(path)
    return path


def asks() -> list[Sampling]:
    return [
        Sampling(1.0, grammar=WORDS),
        Sampling(1.0),
        Sampling(0.0, grammar=JSON),
        Sampling(0.7, 40, 0.9, Shaping(presence_penalty=0.5), logprobs=2, grammar=JSON),
        Sampling(0.0),
    ]


def outputs(
    made: Executor, tables: Tables, samplings: Sequence[Sampling | None], ahead: bool, steps: int = 20
) -> list[list[int]]:
    """None: that slot has no row. `ahead`: each step is laid out before the last one's ids are there."""
    made.load(StageSpec(0, 1, 0, made.facts.num_layers, BLOCK, SLOTS, 128))
    found: list[list[int]] = [[] for _ in samplings]
    waiting: list[StepInputs] = []

    def run(inputs: StepInputs) -> None:
        slots = [slot for slot, s in enumerate(samplings) if s is not None]
        for slot, token_id in zip(slots, made.run(inputs, NOTHING).token_ids.tolist(), strict=True):
            found[slot].append(token_id)

    for index in range(steps):
        rows = []
        for slot, sampling in enumerate(samplings):
            prompt = [slot * 7 + 11 * i for i in range(3 + slot)]
            if sampling is None:
                continue
            if not index:
                start = p.SlotStart(sampling, slot, prompt_len=len(prompt) if sampling.follows else 0)
                blocks = list(range(slot * 13, slot * 13 + 13))
                rows.append({"slot": slot, "start": 0, "ids": prompt, "blocks": blocks, "fresh": start})
            else:
                token_id = p.LAST_SAMPLED if ahead else found[slot][-1]
                at = len(prompt) + index - 1
                rows.append({"slot": slot, "start": at, "ids": [token_id], "index": index})
        waiting.append(tables.take(step(index + 1, *rows)))
        if len(waiting) > ahead:
            run(waiting.pop(0))
    for inputs in waiting:
        run(inputs)
    return found


def follows(card: bytes, grammar: Grammar, ids: Sequence[int]) -> bool:
    """Whether each id up to an end was allowed."""
    ends = parse_card(card).eos_ids
    following = Compiled(grammar, Vocabulary(parse_card(card))).begin()
    for token_id in ids:
        allowed = following.allowed()
        assert not isinstance(allowed, str)
        if not allowed[token_id]:
            return False
        if token_id in ends:
            return True
        following.take([token_id])
    return True


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("engine", ["fake", "native", "torch", "device"])
def test_outputs_are_of_their_grammars_on_every_engine(folder: Path, engine: str, kind: str) -> None:
    made, _ = executors(folder, engine)
    card = made.facts.card
    known = outputs(made, tables_for(kind, card), asks(), ahead=False)
    ahead = outputs(made, tables_for(kind, card), asks(), ahead=True)
    for sampling, ids, other in zip(asks(), known, ahead, strict=True):
        ends = [i + 1 for i, token_id in enumerate(ids) if token_id in parse_card(card).eos_ids]
        until = ends[0] if ends and sampling.grammar else len(ids)  # rows behind an end are nobody's
        assert ids[:until] == other[:until]
        if sampling.grammar is not None:
            assert follows(card, sampling.grammar, ids[:until])
    free = outputs(
        made, tables_for(kind, card), [s if s.grammar is None else None for s in asks()], ahead=False
    )
    if engine != "device":  # whose last bits depend on who shares a step
        assert [known[1], known[4]] == [free[1], free[4]]


def test_the_fake_model_draws_what_it_may() -> None:
    made = FakeExecutor(FakeConfig(num_blocks=NUM_BLOCKS))
    found = outputs(made, tables_for("portable", CARD), [Sampling(0.0, grammar=NO)], ahead=False, steps=3)
    assert found == [[ord("n"), ord("o"), EOS_ID]]


PERSON = Grammar(
    GrammarKind.LARK,
    "start: %json "
    + json.dumps(
        {
            "x-guidance": {"whitespace_flexible": False},
            "type": "object",
            "properties": {"name": {"type": "string", "pattern": "^[a-z]{1,6}$"}, "old": {"type": "boolean"}},
            "required": ["name", "old"],
            "additionalProperties": False,
        }
    ),
)


@pytest.mark.parametrize("engine", ["fake", "native", "torch"])
def test_answers_of_a_random_model_are_what_the_schema_says(folder: Path, engine: str) -> None:
    made, _ = executors(folder, engine)
    card = parse_card(made.facts.card)
    asked = [Sampling(1.0, grammar=PERSON)] * 5  # a seed each
    answers = outputs(made, tables_for("portable", made.facts.card), asked, False, 40)
    for ids in answers:
        end = next(i for i, token_id in enumerate(ids) if token_id in card.eos_ids)
        value = json.loads(card.token_bytes.join(ids[:end]))
        assert list(value) == ["name", "old"] and type(value["old"]) is bool
        assert value["name"].isalpha() and value["name"].islower() and len(value["name"]) <= 6
    assert len({tuple(ids) for ids in answers}) > 1


@pytest.mark.parametrize("engine", ["fake", "native", "torch"])
def test_who_begins_anew_in_the_middle_goes_on_the_same(folder: Path, engine: str) -> None:
    """After a preemption, on another worker: all ids come with a fresh row, or all behind a cached prefix."""
    made, _ = executors(folder, engine)
    sampling, prompt, blocks = Sampling(1.0, grammar=PERSON), [0, 11, 22], list(range(13))
    (whole,) = outputs(made, tables_for("portable", made.facts.card), [sampling], ahead=False, steps=20)
    for kept in (1, 6, 13):
        made.load(StageSpec(0, 1, 0, made.facts.num_layers, BLOCK, SLOTS, 128))
        tables = tables_for("portable", made.facts.card)
        ids = [*prompt, *whole[:kept]]
        cached = (len(ids) - 1) // BLOCK * BLOCK if kept == 13 else 0  # its content is there
        start = p.SlotStart(sampling, 0, prompt_len=3, before=tuple(ids[:cached]))
        row = {
            "slot": 0,
            "start": cached,
            "ids": ids[cached:],
            "blocks": blocks,
            "fresh": start,
            "index": kept,
        }
        found: list[int] = []
        for number in range(1, len(whole) - kept + 1):
            found.append(int(made.run(tables.take(step(number, row)), NOTHING).token_ids[0]))
            at = len(ids) + len(found) - 1
            row = {"slot": 0, "start": at, "ids": found[-1:], "index": kept + len(found)}
        ends = parse_card(made.facts.card).eos_ids
        until = next((i + 1 for i, token_id in enumerate(whole) if token_id in ends), len(whole))
        assert found[: until - kept] == whole[kept:until]
