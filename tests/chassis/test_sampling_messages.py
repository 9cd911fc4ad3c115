"""Sampling parameters and log probabilities survive the wire, and what no worker could follow is refused."""

import numpy as np
import pytest

from chassis.messages import BadMessage
from chassis.messages import pipeline as p
from chassis.messages import sampling as s
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
    result = p.parse_result(p.build_result(1, 2, np.array([7, 8, 9, 4]), logprobs=told))
    assert result.logprobs == told and result.token_ids.tolist() == [7, 8, 9, 4]
    assert p.parse_result(p.build_result(1, 2, [7])).logprobs == ()


@pytest.mark.parametrize("places", [(0, 0, 1), (1, 0, 2), (0, 1, 4), (0, 1, 3)])
def test_log_probabilities_of_no_token_are_refused(places: tuple[int, ...]) -> None:
    told = tuple(zip(places, ENTRIES, strict=True))
    with pytest.raises(BadMessage):
        p.parse_result(p.build_result(1, 2, [7, 8, 9], logprobs=told))


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
