"""Grammars, and what comes back of those that nothing could be drawn for, through their wire forms."""

import pytest

from chassis.messages import BadMessage
from chassis.messages import pipeline as p
from chassis.messages.gateway import parse_generate
from chassis.messages.sampling import (
    GRAMMAR_BYTES_MAX,
    Grammar,
    GrammarKind,
    Sampling,
    build_sampling,
    parse_sampling,
)
from chassis.messages.step_result import build_result, parse_result
from chassis.wire import gateway_pb2, pipeline_pb2, request_pb2


@pytest.mark.parametrize("kind", GrammarKind)
def test_a_grammar_goes_round_the_ring(kind: GrammarKind) -> None:
    sampling = Sampling(0.5, grammar=Grammar(kind, "x" * GRAMMAR_BYTES_MAX))
    start = p.SlotStart(sampling, 1, prompt_len=2, before=(4,))
    header = p.build_step(
        1,
        1,
        slots=[1],
        num_tokens=[1],
        starts=[1],
        flags=[p.FLAG_SAMPLES | p.FLAG_FRESH],
        output_index=[0],
        token_ids=[3],
        table_lens=[1],
        table=[0],
        fresh=[start],
    )
    assert p.parse_step(header).fresh == (start,)


def test_grammars_that_no_worker_reads_are_refused() -> None:
    for kind, text in (("yaml", "a"), ("regex", "a" * (GRAMMAR_BYTES_MAX + 1))):
        message = build_sampling(Sampling())
        message.grammar.CopyFrom(request_pb2.Grammar(kind=kind, text=text))
        with pytest.raises(BadMessage, match="grammar"):
            parse_sampling(message)


def test_who_waits_and_who_is_refused_ride_with_a_result() -> None:
    result = parse_result(build_result(1, 2, [5, 6, 7], waiting_places=[0, 2], refusals=[(1, "no")]))
    assert (result.waiting_places, result.refusals) == ((0, 2), ((1, "no"),))
    plain = parse_result(build_result(1, 2, [5, 6, 7]))
    assert (plain.waiting_places, plain.refusals) == ((), ())
    assert parse_result(build_result(1, 2, [5], nan_places=[0])).refusals == ()


@pytest.mark.parametrize("places", [(3,), (1, 1), (2, 0)])
def test_places_that_are_none_are_refused(places: tuple[int, ...]) -> None:
    for told in ({"waiting_places": places}, {"refusals": [(place, "") for place in places]}):
        with pytest.raises(BadMessage, match="places out of order"):
            parse_result(build_result(1, 2, [5, 6, 7], **told))


def test_a_half_place_is_refused() -> None:
    with pytest.raises(BadMessage):
        parse_result(pipeline_pb2.StepResult(epoch=1, step=1, waiting_places=b"abc").SerializeToString())


def test_the_public_api_names_grammars_by_kind() -> None:
    named = {
        "json_object": (True, Grammar(GrammarKind.JSON_OBJECT)),
        "json_schema": ("{}", Grammar(GrammarKind.JSON_SCHEMA, "{}")),
        "regex": ("a+", Grammar(GrammarKind.REGEX, "a+")),
        "choice": (gateway_pb2.Choices(texts=["a", "é"]), Grammar(GrammarKind.CHOICE, '["a","é"]')),
        "lark": ('start: "a"', Grammar(GrammarKind.LARK, 'start: "a"')),
    }
    for name, (value, grammar) in named.items():
        message = gateway_pb2.Grammar(**{name: value})  # type: ignore[arg-type]
        call = parse_generate(gateway_pb2.GenerateRequest(prompt="x", grammar=message).SerializeToString())
        assert call.grammar == grammar
    assert parse_generate(gateway_pb2.GenerateRequest(prompt="x").SerializeToString()).grammar is None
