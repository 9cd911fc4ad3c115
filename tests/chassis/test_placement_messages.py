"""What batchers of a model tell and give each other survives the wire, and garbage is named."""

from dataclasses import replace

import pytest

from chassis.ids import BootId, GatewayId, RequestId
from chassis.messages import BadMessage
from chassis.messages.load import PipelineLoad, build_load, parse_load
from chassis.messages.ownership import Take, build_to_batcher, parse_to_batcher
from chassis.messages.request import Limits, Request, Sampling

REQUEST = Request(
    id=RequestId("r1"),
    tenant="t",
    gateway=GatewayId("g"),
    model="fake",
    prompt_ids=(1, 2, 3),
    seed=7,
    sampling=Sampling(temperature=0.5),
    limits=Limits(max_tokens=4, stop=(b"x",)),
    body_digest=b"d" * 32,
)
TAKE = Take(REQUEST, "$JS.ACK.REQUESTS.b-fake-5.1.2.3.4.0", 1_250_000)


def test_a_load_survives() -> None:
    load = PipelineLoad(
        BootId("b1"), "g", True, 1.5, 3, 0.25, 0.00032, 0.012, 4, 5, 600, 0.75, 86400.5, 1 << 40
    )
    assert parse_load(build_load(load)) == load
    assert parse_load(build_load(replace(load, accepting=False))) == replace(load, accepting=False)


def test_a_given_request_survives() -> None:
    assert parse_to_batcher(build_to_batcher(TAKE)) == TAKE


@pytest.mark.parametrize(
    ("take", "words"),
    [
        (replace(TAKE, ack_token="a b"), "take: ack token"),
        (replace(TAKE, request=replace(REQUEST, body_digest=b"")), "take: no digest"),
        (replace(TAKE, request=replace(REQUEST, prompt_ids=())), "prompt_ids"),
    ],
)
def test_garbage_is_named(take: Take, words: str) -> None:
    with pytest.raises(BadMessage, match=words):
        parse_to_batcher(build_to_batcher(take))
