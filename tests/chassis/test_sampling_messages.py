"""Sampling parameters and log probabilities survive the wire, and what no worker could follow is refused."""

from dataclasses import replace

import numpy as np
import pytest

from chassis.ids import Attempt, BootId, GatewayId, RequestId
from chassis.messages import BadMessage
from chassis.messages import chunk as c
from chassis.messages import gateway as g
from chassis.messages import ownership as o
from chassis.messages import pipeline as p
from chassis.messages import sampling as s
from chassis.messages import step_result as r
from chassis.messages.request import (
    Limits,
    Reason,
    Request,
    Terminal,
    build_record,
    build_request,
    parse_record,
    parse_request,
)
from chassis.wire import gateway_pb2, pipeline_pb2
from chassis.wire import request_pb2 as pb

SHAPING = s.Shaping(
    min_p=0.25,
    typical_p=0.5,
    repetition_penalty=1.25,
    presence_penalty=-0.5,
    frequency_penalty=0.75,
    logit_bias=((3, -1.5), (9, 100.0)),
    allowed_ids=(4, 3, 9),
    bad_words=((5,), (6, 7, 8)),
)
ENTRIES = (
    s.TokenLogprobs(-0.5, 1, (7, 9), (-0.5, -1.0)),
    s.TokenLogprobs(-3.5, 12),
    s.TokenLogprobs(-0.25, 2, (4,), (-0.125,)),
)


@pytest.mark.parametrize("shaping", [None, SHAPING, s.NO_SHAPING])
@pytest.mark.parametrize("logprobs", [None, 0, 20])
def test_sampling_round_trip(shaping: s.Shaping | None, logprobs: int | None) -> None:
    sampling = s.Sampling(0.5, 7, 0.25, shaping, logprobs)
    assert s.parse_sampling(s.build_sampling(sampling)) == sampling


def test_plain_sampling_carries_nothing_of_the_rest() -> None:
    assert s.build_sampling(s.Sampling(0.5, 7, 0.25)).ByteSize() == 5 + 2 + 5


@pytest.mark.parametrize(
    "wrong",
    [
        {"typical_p": 0.0},
        {"typical_p": float("nan")},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": float("inf")},
        {"presence_penalty": float("nan")},
        {"bias_ids": [1]},
        {"bias_ids": [2, 2], "bias": [1.0, 1.0]},
        {"bias_ids": [1], "bias": [float("inf")]},
        {"bad_word_lens": [0]},
        {"bad_word_lens": [2], "bad_word_ids": [1]},
    ],
)
def test_shaping_that_no_worker_follows_is_refused(wrong: dict[str, object]) -> None:
    fine: dict[str, object] = {"typical_p": 1.0, "repetition_penalty": 1.0}
    assert s.parse_sampling(pb.Sampling(shaping=pb.Shaping(**fine))).shaping == s.NO_SHAPING  # type: ignore[arg-type]
    with pytest.raises(BadMessage):
        s.parse_sampling(pb.Sampling(shaping=pb.Shaping(**(fine | wrong))))  # type: ignore[arg-type]


def test_more_log_probabilities_than_there_may_be() -> None:
    with pytest.raises(BadMessage):
        s.parse_sampling(pb.Sampling(logprobs=21))


def test_a_start_carries_what_its_sampling_follows() -> None:
    start = p.SlotStart(s.Sampling(shaping=SHAPING), 9, 3, (1, 2, 3, 4), 5, (0, 6))
    plain = p.SlotStart(s.Sampling(), 8)
    header = p.build_step(
        1,
        1,
        slots=[0, 1],
        num_tokens=[1, 1],
        starts=[4, 0],
        flags=[2, 2],
        output_index=[0, 0],
        token_ids=[5, 1],
        table_lens=[1, 1],
        table=[1, 2],
        fresh=[start, plain],
    )
    assert p.parse_step(header).fresh == (start, plain)


def test_log_probabilities_ride_with_a_result() -> None:
    told = tuple(zip((0, 2, 3), ENTRIES, strict=True))
    result = r.parse_result(r.build_result(1, 2, np.array([7, 8, 9, 4]), logprobs=told))
    assert result.logprobs == told and result.token_ids == (7, 8, 9, 4)
    assert r.parse_result(r.build_result(1, 2, [7])).logprobs == ()


@pytest.mark.parametrize("places", [(0, 0, 1), (1, 0, 2), (0, 1, 4), (0, 1, 3)])
def test_log_probabilities_of_no_token_are_refused(places: tuple[int, ...]) -> None:
    told = tuple(zip(places, ENTRIES, strict=True))
    with pytest.raises(BadMessage):
        r.parse_result(r.build_result(1, 2, [7, 8, 9], logprobs=told))


def test_columns_of_log_probabilities_must_add_up() -> None:
    built = s.build_logprobs(ENTRIES)
    assert built is not None and s.parse_logprobs(built) == ENTRIES
    for column in ("logprobs", "ranks", "top_lens", "top_ids", "top_logprobs"):
        broken = pb.Logprobs()
        broken.CopyFrom(built)
        getattr(broken, column).pop()
        with pytest.raises(BadMessage):
            s.parse_logprobs(broken)


def test_a_record_keeps_log_probabilities_up_to_its_limit() -> None:
    one = s.TokenLogprobs(-1.0, 1, tuple(range(15)), (-1.0,) * 15)
    assert len(s.recorded([one] * 5000)) == s.RECORD_LOGPROBS_MAX // 16
    assert s.recorded(ENTRIES) == ENTRIES


# ---- on the bus -------------------------------------------------------------------------------------


def test_parts_carry_the_log_probabilities_of_those_that_ask() -> None:
    parts = (
        c.Part(RequestId("a"), Attempt(1), 0, (1, 2), 5),
        c.Part(RequestId("b"), Attempt(1), 3, (4, 5), 6, ENTRIES[:2]),
        c.Part(RequestId("d"), Attempt(2), 0, (6,), 7, ENTRIES[2:]),
    )
    chunk = c.Chunk(BootId("boot"), 1, parts, ())
    assert c.parse_chunk(c.build_chunk(chunk)) == chunk
    plain = c.Chunk(BootId("boot"), 1, parts[:1], ())
    wire = pb.Chunk.FromString(c.build_chunk(plain)).parts
    assert not wire.told and not wire.HasField("logprobs")


@pytest.mark.parametrize("told", [(0,), (0, 1), (1, 1), (2,)])
def test_log_probabilities_of_other_parts_are_refused(told: tuple[int, ...]) -> None:
    part = c.Part(RequestId("a"), Attempt(1), 0, (1, 2), 5)
    three = c.Part(RequestId("b"), Attempt(1), 0, (4, 5, 6), 6, ENTRIES)
    message = pb.Chunk.FromString(c.build_chunk(c.Chunk(BootId("boot"), 1, (part, three), ())))
    del message.parts.told[:]
    message.parts.told.extend(told)
    with pytest.raises(BadMessage):
        c.parse_chunk(message.SerializeToString())


def test_a_record_tells_log_probabilities() -> None:
    terminal = Terminal(Attempt(1), BootId("boot"), Reason.LENGTH, (7, 8, 9, 4), logprobs=ENTRIES)
    assert parse_record(build_record(terminal)) == terminal
    assert parse_record(build_record(replace(terminal, logprobs=()))) == replace(terminal, logprobs=())


def test_a_takeover_answer_tells_what_its_ids_had() -> None:
    answer = o.TakeoverAnswer(RequestId("r"), GatewayId("g"), Attempt(2), (7, 8, 9), None, ENTRIES)
    assert o.parse_to_batcher(o.build_to_batcher(answer)) == answer
    with pytest.raises(BadMessage):
        o.parse_to_batcher(o.build_to_batcher(replace(answer, logprobs=ENTRIES[:2])))


# ---- from and to clients ----------------------------------------------------------------------------


def test_every_parameter_of_a_call_arrives() -> None:
    m = gateway_pb2.GenerateRequest(
        prompt="x",
        min_p=0.25,
        typical_p=0.5,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=0,
        logit_bias={9: 1.5, 3: -100},
        allowed_token_ids=[5, 4],
        bad_words=["no", "never"],
        top_logprobs=0,
        n=3,
        best_of=5,
    )
    call = g.parse_generate(m.SerializeToString())
    assert (call.min_p, call.typical_p, call.repetition_penalty) == (0.25, 0.5, 1.5)
    assert (call.presence_penalty, call.frequency_penalty) == (-1.0, 0.0)
    assert call.logit_bias == ((3, -100.0), (9, 1.5)) and call.allowed_token_ids == (5, 4)
    assert call.bad_words == ("no", "never") and (call.top_logprobs, call.n, call.best_of) == (0, 3, 5)
    plain = g.parse_generate(gateway_pb2.GenerateRequest(prompt="x").SerializeToString())
    assert plain == g.GenerateCall(prompt="x")


def test_text_that_is_none_is_found_beside_a_map() -> None:
    m = gateway_pb2.GenerateRequest(logit_bias={9: 1.5}, bad_words=["aa", "bb"])
    data = m.SerializeToString().replace(b"bb", b"b\xff")
    with pytest.raises(BadMessage, match=r"bad_words\[1\]"):
        g.parse_generate(data)


def test_a_delta_carries_log_probabilities_and_its_choice() -> None:
    entry = g.IdLogprobs(-0.5, 2, b"a", (g.TopLogprob(7, -0.25, b"b"),))
    m = gateway_pb2.GenerateEvent.FromString(g.build_event(g.Delta("a", (3,), 4, (entry,), 2)))
    assert m.choice == 2 and list(m.delta.ids) == [3] and m.delta.first_index == 4
    (told,) = m.delta.logprobs
    assert (told.logprob, told.rank, told.token) == (-0.5, 2, b"a")
    assert [(t.id, t.logprob, t.token) for t in told.top] == [(7, -0.25, b"b")]


PROMPT = s.PromptTold((7, 8, 9), ENTRIES)


def test_what_is_told_of_a_prompt_survives_parts_answers_and_records() -> None:
    request_id, attempt, boot = RequestId("r"), Attempt(1), BootId("b")
    parts = (
        c.Part(request_id, attempt, 4, (1,), 5),
        c.Part(RequestId("q"), attempt, 0, (1, 2), 5, (), PROMPT),
        c.Part(RequestId("p"), attempt, 0, (3,), 5, ENTRIES[:1], PROMPT),
    )
    chunk = c.Chunk(boot, 1, parts, ())
    assert c.parse_chunk(c.build_chunk(chunk)) == chunk
    answer = o.TakeoverAnswer(request_id, GatewayId("g"), attempt, (1, 2), None, ENTRIES[:2], PROMPT)
    assert o.parse_to_batcher(o.build_to_batcher(answer)) == answer
    record = Terminal(attempt, boot, Reason.STOP, (1, 2), prompt=PROMPT)
    assert parse_record(build_record(record)) == record


def test_a_prompt_is_told_of_with_the_first_id_alone() -> None:
    chunk = c.Chunk(BootId("b"), 1, (c.Part(RequestId("r"), Attempt(1), 1, (1,), 5, (), PROMPT),), ())
    with pytest.raises(BadMessage, match="told of no prompt"):
        c.parse_chunk(c.build_chunk(chunk))
    with pytest.raises(BadMessage, match="do not add up"):
        s.parse_prompt_told(pb.PromptTold(ids=[1, 2], logprobs=s.build_logprobs(ENTRIES)))


def test_a_prompt_asks_for_no_more_than_messages_hold() -> None:
    def asking(length: int, top: int) -> Request:
        sampling = s.Sampling(prompt_logprobs=top)
        ids = (5,) * length
        return Request(RequestId("r"), "t", GatewayId("g"), "m", ids, 1, sampling, Limits(8))

    most = s.PROMPT_LOGPROBS_MAX // 21 + 1
    assert parse_request(build_request(asking(most, 20))) == asking(most, 20)
    with pytest.raises(BadMessage, match="prompt_logprobs"):
        parse_request(build_request(asking(most + 1, 20)))


def test_the_largest_record_fits_into_a_message_of_the_bus() -> None:
    """With a vocabulary of 21 bits, both kinds of log probabilities, and what is left of the context."""
    top = s.TokenLogprobs(-0.5, 150_000, (150_000,) * 20, (-0.5,) * 20)
    told = (top,) * (s.PROMPT_LOGPROBS_MAX // 21)
    one = (s.TokenLogprobs(-0.5, 150_000),)
    for prompt in (told, one * s.PROMPT_LOGPROBS_MAX):
        ids = (150_000,) * (131_072 - len(prompt))
        record = Terminal(
            Attempt(1),
            BootId("b"),
            Reason.LENGTH,
            ids,
            logprobs=s.recorded(one * len(ids)),
            prompt=s.PromptTold((150_000,) * len(prompt), prompt),
        )
        assert len(build_record(record)) < 1 << 20


def test_asks_and_answers_of_prompts_survive_the_ring() -> None:
    asks = (p.PromptAsk(0, 3, 2, 9, 5), p.PromptAsk(1, 0, 1, 4, 0))
    header = p.build_step(
        3, 1, slots=(1, 2), num_tokens=(5, 1), starts=(0, 0), flags=(2, 0), output_index=(0, 0),
        token_ids=range(6), table_lens=(0, 0), prompt_asks=asks, fresh=[p.SlotStart(s.Sampling(), 1)],
    )  # fmt: skip
    passed_on = p.add_timing(header, p.StageTiming(0, 1, 2, 3, 4))
    assert p.read_step(passed_on).prompt_asks == p.parse_step(header).prompt_asks == asks
    answers = (r.PromptAnswer(0, 4, ENTRIES[:2]), r.PromptAnswer(1, 1, ENTRIES[2:]))
    result = r.parse_result(r.build_result(3, 1, [7, 8, 9], prompts=answers, nan_places=(0, 2)))
    assert (result.prompts, result.nan_places, result.logprobs) == (answers, (0, 2), ())
    with pytest.raises(BadMessage, match="places"):
        r.parse_result(r.build_result(3, 1, [7], nan_places=(1,)))
    with pytest.raises(BadMessage, match="first id"):
        r.parse_result(r.build_result(3, 1, [7], prompts=[r.PromptAnswer(0, 0, ENTRIES)]))


def test_steps_and_results_without_them_are_as_they_were() -> None:
    """Not a byte is added where nobody asks."""
    step = p.build_step(3, 1, slots=(1,), num_tokens=(1,), starts=(4,), flags=(1,), token_ids=(7,))
    known = {field.number for field, _ in pipeline_pb2.Step.FromString(step).ListFields()}
    assert known <= set(range(1, 15))
    result = pipeline_pb2.StepResult.FromString(r.build_result(3, 1, [7]))
    assert {field.number for field, _ in result.ListFields()} == {1, 2, 3}


def test_the_front_tells_of_prompts_in_pieces() -> None:
    piece = g.PromptLogprobs((7,), 3, (g.IdLogprobs(-0.5, 2, b"x", (g.TopLogprob(9, -0.25, b"y"),)),), 1)
    m = gateway_pb2.GenerateEvent.FromString(g.build_event(piece))
    told = m.prompt_logprobs
    assert (m.choice, list(told.ids), told.first_index) == (1, [7], 3)
    assert (told.logprobs[0].rank, told.logprobs[0].top[0].token) == (2, b"y")
