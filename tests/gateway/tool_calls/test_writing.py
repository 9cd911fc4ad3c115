"""Grammars that make an answer call: any walk through them is read again as calls that fit."""

import json
import random

import pytest

from chassis.grammars import Compiled, Vocabulary, refusal_of
from chassis.messages.card import parse_card
from chassis.messages.sampling import Grammar, GrammarKind
from gateway.tool_calls.forms import ToolForm
from gateway.tool_calls.reading import Argued, Called, Said, ToolReader
from gateway.tool_calls.writing import REQUIRED_CALLS_MAX, Function, grammar_of
from shard_worker.fake_model import EOS_ID, TOKEN_BYTES, FakeConfig, card_of

VOCABULARY = Vocabulary(parse_card(card_of(FakeConfig())))
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", 'Ü"\\']}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 7}},
}
FUNCTIONS = (
    Function("get-weather.now", CITY),
    Function("stop", {"type": "object", "additionalProperties": False}),
)


def walk(grammar: Grammar, seed: int) -> str:
    rng, ids = random.Random(seed), list[int]()
    following = Compiled(grammar, VOCABULARY).begin()
    while len(ids) < 4000:
        mask = following.allowed()
        assert not isinstance(mask, str), mask
        choices = mask.nonzero()[0].tolist()
        ids.append(EOS_ID if EOS_ID in choices and rng.random() < 0.3 else rng.choice(choices))
        if ids[-1] == EOS_ID:
            return b"".join(TOKEN_BYTES[i] for i in ids).decode()
        assert following.take(ids[-1:]) is None
    raise AssertionError("no end")


def read(form: ToolForm, text: str) -> tuple[str, list[tuple[str, str]]]:
    reader = ToolReader(form, frozenset(f.name for f in FUNCTIONS))
    said, calls = "", list[tuple[str, str]]()
    for event in (*reader.feed(text), *reader.end()):
        match event:
            case Said(part):
                said += part
            case Called(_, name):
                calls.append((name, ""))
            case Argued(_, part):
                calls[-1] = (calls[-1][0], calls[-1][1] + part)
    return said, calls


def fits(name: str, arguments: str) -> bool:
    value = json.loads(arguments)
    if name == "stop":
        return bool(value == {})
    days = value.pop("days", 1)
    return type(days) is int and 1 <= days <= 7 and value in ({"city": "Rome"}, {"city": 'Ü"\\'})


@pytest.mark.parametrize("form", ToolForm)
@pytest.mark.parametrize("several", [False, True])
def test_what_is_written_is_read_as_calls_that_fit(form: ToolForm, several: bool) -> None:
    grammar = grammar_of(FUNCTIONS, form, several)
    assert refusal_of(grammar) is None
    numbers, names = set(), set()
    for seed in range(25):
        text = walk(grammar, seed)
        said, calls = read(form, text)
        assert not said and calls and all(fits(*call) for call in calls), text
        numbers.add(len(calls))
        names |= {name for name, _ in calls}
    assert names == {"get-weather.now", "stop"} and max(numbers) <= REQUIRED_CALLS_MAX
    assert (max(numbers) > 1) is several


@pytest.mark.parametrize("form", [ToolForm.HERMES, ToolForm.LLAMA, ToolForm.MISTRAL])
def test_an_answer_of_json_may_stand_in_their_place(form: ToolForm) -> None:
    answer = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3}')
    grammar = grammar_of(FUNCTIONS, form, True, answer)
    kinds = set()
    for seed in range(30):
        said, calls = read(form, walk(grammar, seed))
        assert not (said and calls)
        kinds.add(bool(calls))
        if said:
            assert set(json.loads(said)) <= {1, 2}
    assert kinds == {True, False}
