"""Ratios are of one round's turns, and a round that others disturbed is never reported."""

import pytest

from bench.load import W4, WORKLOADS, Workload
from bench.peers.conversation import Ran, Times
from bench.peers.turns import (
    OTHERS_CORES_MAX,
    Noisy,
    Turn,
    best,
    complete,
    decode_tokens_per_s,
    figures,
    is_noisy,
    joined,
    order,
    tokens_per_s,
    ttft_ms,
)

W = Workload("W", 2, 8, 10)


def ran(seconds: float, tokens: int = 10) -> Ran:
    return Ran(seconds, (Times(0.1, seconds, tokens), Times(0.3, seconds, tokens)))


def turn(who: str, seconds: float, others_cores: float = 0.0) -> Turn:
    return Turn(who, ran(seconds), others_cores)


def test_ratios_are_taken_round_by_round() -> None:
    """Both slow down in the second round: the ratio does not."""
    rounds = [
        {"us": turn("us", 1.0), "them": turn("them", 2.0), "those": turn("those", 4.0)},
        {"us": turn("us", 3.0), "them": turn("them", 6.0), "those": turn("those", 3.0)},
    ]
    found = figures(W, rounds)
    assert found.rates["us"] == (20.0, 20.0 / 3)
    assert found.ratios == {"them": (2.0, 2.0), "those": (4.0, 1.0)}
    assert best(found) == (2.0, 1.0)
    assert found.ttfts_ms["us"] == (200.0, 200.0)


@pytest.mark.parametrize("noisy", ["us", "them"])
def test_a_round_beside_others_is_refused(noisy: str) -> None:
    cores = {"us": 0.0, "them": 0.0} | {noisy: 0.5}
    quiet = {w: turn(w, 2.0) for w in cores}
    loud = {w: turn(w, 2.0, c) for w, c in cores.items()}
    figures(W, [quiet])
    with pytest.raises(Noisy, match=f"round 2: others used 0.50 cores beside {noisy}"):
        figures(W, [quiet, loud])


def test_noise_is_weighed_by_what_can_be_measured() -> None:
    assert not is_noisy(OTHERS_CORES_MAX, 10.0)
    assert is_noisy(2 * OTHERS_CORES_MAX, 10.0)
    assert not is_noisy(2 * OTHERS_CORES_MAX, 0.1)  # half a tick of the clock
    assert is_noisy(1.0, 0.1)


def test_everyone_goes_first_and_follows_everyone() -> None:
    names = ["a", "b", "c"]
    rounds = [order(names, n) for n in range(6)]
    assert all(sorted(r) == names for r in rounds)
    assert sorted(r[0] for r in rounds) == ["a", "a", "b", "b", "c", "c"]
    followed = {(r[i], r[i + 1]) for r in rounds for i in range(2)}
    assert followed == {(a, b) for a in names for b in names if a != b}


def test_short_answers_are_noticed() -> None:
    assert complete(ran(1.0), W, repeats=1)
    assert not complete(ran(1.0, tokens=9), W, repeats=1)
    assert not complete(ran(1.0), W, repeats=2)
    assert complete(joined([ran(1.0), ran(2.0)]), W, repeats=2)


def test_rates() -> None:
    assert tokens_per_s(W, ran(4.0)) == 5.0
    four = joined([Ran(0.5, (Times(0.5, 0.5, 1),))] * 4)
    assert tokens_per_s(W4, four) == 4 * 1024 / 2.0, "a prefill's rate counts prompt tokens"
    assert ttft_ms(four) == 500.0
    assert decode_tokens_per_s(Ran(2.0, (Times(0.5, 2.0, 16),))) == 10.0
    assert decode_tokens_per_s(ran(1.0)) is None and decode_tokens_per_s(four) is None


def test_shared_prefixes_are_shared_and_nothing_else() -> None:
    from bench.load import draw_prompts

    w5 = WORKLOADS["W5"]
    prompts = draw_prompts(w5, 3, 49152)
    assert {len(p) for p in prompts} == {w5.prompt_tokens} and len(prompts) == 16
    assert len({tuple(p[: w5.shared_tokens]) for p in prompts}) == 1
    assert len({tuple(p[w5.shared_tokens :]) for p in prompts}) == 16
    assert draw_prompts(w5, 4, 49152) != prompts
