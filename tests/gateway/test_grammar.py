"""What a gateway does with grammars: bad ones are the caller's alone, good ones travel whole."""

import threading
from dataclasses import replace

import orjson
import pytest

import chassis.grammars
from chassis.errors import Code, Status
from chassis.messages.request import PROMPT_ERROR, Reason
from chassis.messages.sampling import Grammar, GrammarKind
from gateway.grammar import KNOWN_LEN_MAX, WAITING_LEN_MAX, Grammars
from gateway.models import Model
from gateway.sampling import nesting_of
from tests.gateway.rig import Reader, Rig, byte_card, call, run
from tests.gateway.test_sampling import admitted

MODEL = Model("bytes", "d", byte_card(), None, None)
ENDLESS = replace(MODEL, card=byte_card(eos_ids=()))
DIGITS = Grammar(GrammarKind.REGEX, "[0-9]+")


def of(kind: GrammarKind, text: str) -> Grammar:
    return Grammar(kind, text)


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (of(GrammarKind.JSON_SCHEMA, "[" * 5), "grammar.json_schema: not JSON"),
        (of(GrammarKind.JSON_SCHEMA, "[]"), "grammar.json_schema: not a JSON object"),
        (of(GrammarKind.JSON_SCHEMA, '{"a":' * 65 + "1" + "}" * 65), "nested 65 deep; at most 64"),
        (of(GrammarKind.JSON_SCHEMA, '{"a":' * 2000 + "1" + "}" * 2000), "grammar.json_schema: n"),
        (of(GrammarKind.JSON_SCHEMA, ""), "grammar.json_schema: 0 bytes; 1 to 65536"),
        (of(GrammarKind.CHOICE, '["a", ""]'), "grammar.choice: strings, none empty"),
        (of(GrammarKind.CHOICE, '["a", 1]'), "grammar.choice: strings, none empty"),
        (of(GrammarKind.CHOICE, "[]"), "grammar.choice: 0; 1 to 1024"),
        (of(GrammarKind.CHOICE, str(["a"] * 1025).replace("'", '"')), "grammar.choice: 1025; 1 to 1024"),
        (of(GrammarKind.REGEX, "\ud800"), "grammar.regex: not valid Unicode"),
        (of(GrammarKind.REGEX, "é" * 32769), "grammar.regex: 65538 bytes"),
    ],
)
def test_forms_and_sizes_are_refused_by_field(grammar: Grammar, says: str) -> None:
    with pytest.raises(Status) as refused:
        admitted(replace(call(), grammar=grammar, max_tokens=8))
    assert refused.value.code is Code.INVALID_ARGUMENT and says in refused.value.message


def test_an_output_that_must_end_can_not_ignore_ends() -> None:
    with pytest.raises(Status, match="ignore_eos: not with a grammar"):
        admitted(replace(call(), grammar=DIGITS, ignore_eos=True))


def test_how_deep_a_value_is() -> None:
    values = {"1": 0, "[]": 1, "[[]]": 2, '{"a": {"b": [1]}}': 3, "[{}, [[2]]]": 3}
    assert [nesting_of(orjson.loads(value)) for value in values] == list(values.values())


def test_a_grammar_travels_with_its_request() -> None:
    request = admitted(replace(call(), grammar=DIGITS, max_tokens=8))
    assert request.sampling.grammar == DIGITS and request.sampling.shaping is None


def test_bad_grammars_are_refused_and_good_ones_accepted() -> None:
    async def main() -> None:
        async with Rig().standing() as (gateway, batcher):
            for text, says in (("(", "unclosed"), ("(?=a)", "look-around")):
                with pytest.raises(Status) as refused:
                    reader = Reader(gateway.generate(call(grammar=of(GrammarKind.REGEX, text))))
                    await reader.done()
                assert refused.value.code is Code.INVALID_ARGUMENT
                assert refused.value.message.startswith("grammar.regex: ") and says in refused.value.message
            reader = Reader(gateway.generate(call(grammar=DIGITS)))
            await reader.accepted()
            job = await batcher.take()
            assert job.request.sampling.grammar == DIGITS
            batcher.send(job, ord("1"))
            await batcher.end(job, Reason.FAILED, error="grammar: too complex")
            with pytest.raises(Status) as refused:
                await reader.done()
            assert refused.value.code is Code.INVALID_ARGUMENT and "too complex" in refused.value.message

    run(main())


def test_what_has_no_room_in_the_pool_is_the_callers_doing() -> None:
    async def main() -> None:
        async with Rig().standing() as (gateway, batcher):
            reader = Reader(gateway.generate(call()))
            await reader.accepted()
            await batcher.end(await batcher.take(), Reason.FAILED, error=f"{PROMPT_ERROR}9 tokens, at most 7")
            with pytest.raises(Status, match="9 tokens, at most 7") as refused:
                await reader.done()
            assert refused.value.code is Code.INVALID_ARGUMENT

    run(main())


def test_each_is_compiled_once_and_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Grammar] = []

    def refusal_of(grammar: Grammar) -> str | None:
        seen.append(grammar)
        return "no" if grammar.text == "bad" else None

    monkeypatch.setattr(chassis.grammars, "refusal_of", refusal_of)

    async def main() -> None:
        grammars = Grammars(5.0)
        for _ in range(2):
            await grammars.check(DIGITS, MODEL)
            with pytest.raises(Status, match="grammar.lark: no"):
                await grammars.check(of(GrammarKind.LARK, "bad"), MODEL)
        assert len(seen) == 2
        for i in range(KNOWN_LEN_MAX + 10):
            await grammars.check(of(GrammarKind.REGEX, str(i)), MODEL)
        assert len(grammars._known) == KNOWN_LEN_MAX
        with pytest.raises(Status, match="no token that ends"):
            await grammars.check(DIGITS, ENDLESS)
        grammars.close()

    run(main())


def test_one_that_never_ends_is_given_up_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def refusal_of(grammar: Grammar) -> str | None:
        if grammar.text == "slow":
            release.wait(10)
        return None

    monkeypatch.setattr(chassis.grammars, "refusal_of", refusal_of)

    async def main() -> None:
        grammars = Grammars(0.05)
        try:
            with pytest.raises(Status, match="not compiled within 0.05 s"):
                await grammars.check(of(GrammarKind.REGEX, "slow"), MODEL)
            await grammars.check(DIGITS, MODEL)
            grammars._waiting = WAITING_LEN_MAX
            with pytest.raises(Status) as refused:
                await grammars.check(of(GrammarKind.REGEX, "a"), MODEL)
            assert refused.value.code is Code.UNAVAILABLE and refused.value.retry_ms
        finally:
            release.set()
            grammars.close()

    run(main())
