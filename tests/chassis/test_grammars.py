"""Grammars over a small vocabulary: every walk that masks allow is of the grammar, and ends where it may."""

import json
import random
import re
from collections.abc import Callable

import pytest

from chassis.grammars import Compiled, Following, Vocabulary, refusal_of
from chassis.messages.card import parse_card
from chassis.messages.sampling import GRAMMAR_BYTES_MAX, Grammar, GrammarKind
from shard_worker.fake_model import EOS_ID, TOKEN_BYTES, FakeConfig, card_of

VOCABULARY = Vocabulary(parse_card(card_of(FakeConfig())))
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,8}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["x", "yy"]}, "minItems": 1, "maxItems": 3},
        "near": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "tags", "near"],
    "additionalProperties": False,
}


def begun(kind: GrammarKind, text: str) -> Following:
    compiled = Compiled(Grammar(kind, text), VOCABULARY)
    assert compiled.error is None
    return compiled.begin()


def walk(following: Following, seed: int, steps_max: int = 400) -> tuple[list[int], bytes]:
    """Any ids that masks allow, up to the end."""
    rng, ids = random.Random(seed), list[int]()
    while len(ids) < steps_max:
        mask = following.allowed()
        assert not isinstance(mask, str), mask
        ids.append(rng.choice(mask.nonzero()[0].tolist()))
        assert following.take(ids[-1:]) is None
        if ids[-1] == EOS_ID:
            return ids, b"".join(TOKEN_BYTES[i] for i in ids)
    raise AssertionError(f"no end: {b''.join(TOKEN_BYTES[i] for i in ids)[-200:]!r}")


def is_person(value: object) -> bool:
    """By hand, what the schema says."""
    assert isinstance(value, dict)
    name, age, tags, near = value["name"], value["age"], value["tags"], value["near"]
    return (
        list(value) == ["name", "age", "tags", "near"]
        and re.fullmatch("[a-z]{1,8}", name) is not None
        and type(age) is int
        and 0 <= age <= 150
        and 1 <= len(tags) <= 3
        and all(tag in ("x", "yy") for tag in tags)
        and near in (None, True, False)
    )


def is_short(text: str) -> bool:
    return re.fullmatch(r"[a-f]{2,4}-\d+!", text) is not None


CASES: list[tuple[GrammarKind, str, Callable[[str], bool]]] = [
    (GrammarKind.JSON_SCHEMA, json.dumps(PERSON), lambda text: is_person(json.loads(text))),
    (GrammarKind.REGEX, r"[a-f]{2,4}-[0-9]{1,3}!", is_short),
    (
        GrammarKind.CHOICE,
        '["yes", "no", "a \\"b\\" c", "ü/\\n"]',
        lambda t: t in ("yes", "no", 'a "b" c', "ü/\n"),
    ),
    (
        GrammarKind.LARK,
        'start: "<" (word ",")* word ">"\nword: /[a-c]{1,2}/',
        lambda t: t[0] == "<" and t[-1] == ">",
    ),
]


@pytest.mark.parametrize(("kind", "text", "fits"), CASES)
def test_any_walk_is_of_the_grammar(kind: GrammarKind, text: str, fits: Callable[[str], bool]) -> None:
    for seed in range(25):
        _, output = walk(begun(kind, text), seed)
        assert fits(output.decode()), output


def test_json_objects_parse() -> None:
    ended = 0
    for seed in range(20):
        try:
            _, output = walk(begun(GrammarKind.JSON_OBJECT, ""), seed, 2000)
        except AssertionError:
            continue  # nested without end: any object may
        assert isinstance(json.loads(output.decode("utf-8", "replace")), dict)
        ended += 1
    assert ended


def test_an_end_is_allowed_just_where_the_output_may_end() -> None:
    following = begun(GrammarKind.REGEX, "ab?")
    ends = []
    for token in (b"a", b"b"):
        mask = following.allowed()
        assert not isinstance(mask, str)
        ends.append(bool(mask[EOS_ID]))
        assert following.take([token[0]]) is None
    mask = following.allowed()
    assert not isinstance(mask, str)
    assert ends == [False, True] and mask.nonzero()[0].tolist() == [EOS_ID]


def test_who_begins_anew_and_replays_stands_where_the_other_does() -> None:
    compiled = Compiled(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PERSON)), VOCABULARY)
    ids, _ = walk(compiled.begin(), 5)
    step_by_step = compiled.begin()
    for i in range(len(ids)):
        replayed = compiled.begin()
        assert replayed.take(ids[:i]) is None
        one, other = step_by_step.allowed(), replayed.allowed()
        assert not isinstance(one, str) and not isinstance(other, str) and (one == other).all()
        assert step_by_step.take([ids[i]]) is None


def test_what_goes_on_behind_an_end_says_so_and_breaks_nothing() -> None:
    """Rows that are sent ahead of an end are computed for nobody."""
    compiled = Compiled(Grammar(GrammarKind.CHOICE, '["no"]'), VOCABULARY)
    following = compiled.begin()
    assert following.take([ord("n"), ord("o"), EOS_ID]) is None
    assert isinstance(following.allowed(), str)
    assert isinstance(following.take([ord("x")]), str)
    assert isinstance(compiled.begin().take([ord("n"), EOS_ID]), str)
    walk(compiled.begin(), 1)


BAD: list[tuple[GrammarKind, str, str]] = [
    (GrammarKind.REGEX, "(a", "unclosed group"),
    (GrammarKind.REGEX, "(?=a)b", "look-around"),
    (GrammarKind.REGEX, "(" * 5000 + "a" + ")" * 5000, "nest"),
    (GrammarKind.JSON_SCHEMA, '{"type": "strin"}', "strin"),
    (GrammarKind.JSON_SCHEMA, '{"not": {"type": "string"}}', "not"),
    (GrammarKind.JSON_SCHEMA, '{"$ref": "http://example.com/schema"}', "example.com"),
    (GrammarKind.JSON_SCHEMA, '{"a": ' * 300 + "1" + "}" * 300, "recursion"),
    (GrammarKind.JSON_SCHEMA, "{", ""),
    (GrammarKind.CHOICE, "{", ""),
    (GrammarKind.LARK, "start: nowhere", "nowhere"),
    (GrammarKind.LARK, "start: " + "(" * 30000 + '"a"' + ")" * 30000, "nested"),
    (GrammarKind.LARK, 'start: "a"\n' * 5000, ""),
]


@pytest.mark.parametrize(("kind", "text", "says"), BAD)
def test_what_can_not_be_compiled_says_why_and_is_bounded(kind: GrammarKind, text: str, says: str) -> None:
    for error in (refusal_of(Grammar(kind, text)), Compiled(Grammar(kind, text), VOCABULARY).error):
        assert error is not None and says in error and len(error) < 400


DEAR = [
    Grammar(GrammarKind.REGEX, "(.*a.{200}b|.*c.{200}d|.*e.{300}f)"),
    Grammar(GrammarKind.REGEX, "(a{1,1000}){1,1000}"),
    Grammar(GrammarKind.REGEX, "((a{1,100}){1,100}){1,100}c"),
    Grammar(GrammarKind.LARK, 'start: "a" start'),
    Grammar(
        GrammarKind.JSON_SCHEMA,
        json.dumps({"anyOf": [{"type": "object", "properties": {f"k{i}": {}}} for i in range(900)]}),
    ),
    Grammar(
        GrammarKind.JSON_SCHEMA, json.dumps({"type": "string", "minLength": 10_000, "maxLength": 1_000_000})
    ),
]


@pytest.mark.parametrize("grammar", DEAR)
def test_what_is_dear_goes_on_or_says_that_it_does_not(grammar: Grammar) -> None:
    assert len(grammar.text) <= GRAMMAR_BYTES_MAX
    compiled = Compiled(grammar, VOCABULARY)
    if compiled.error is not None:
        return
    following, rng = compiled.begin(), random.Random(1)
    for _ in range(30):
        mask = following.allowed()
        if isinstance(mask, str):
            return
        token_id = rng.choice(mask.nonzero()[0].tolist())
        if token_id == EOS_ID or following.take([token_id]) is not None:
            return


def test_what_is_forced_is_written_as_the_model_would() -> None:
    """The pair ` a` is one token here, and `an` another."""
    following = begun(GrammarKind.CHOICE, '[" an"]')
    ids, _ = walk(following, 1)
    pairs = {TOKEN_BYTES[i]: i for i in range(EOS_ID + 1, len(TOKEN_BYTES))}
    assert ids == [pairs[b" a"], ord("n"), EOS_ID]
