"""Turns are taken by whoever is there; noise repeats a round, and in the end nothing is reported."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.load import W4, Workload
from bench.peers import match
from bench.peers.contestants import Peer
from bench.peers.conversation import Failed, Load, Loaded, Ran, Times
from bench.peers.environments import ENVIRONMENTS, Environment, without_paths
from bench.peers.match import Row, Setting, notes_of, quiet_round, take_turn, values_of
from bench.peers.turns import Noisy, Turn
from bench.quiet import Others
from shard_worker.bounds import Bounds

SHARED = Workload("shared", 2, 6, 3, shared_tokens=4)


class Fake:
    """Answers at once, and notes what it was asked."""

    root_pid = 1

    def __init__(self, name: str, short: bool = False) -> None:
        self.name = name
        self.short = short
        self.asked: list[list[list[int]]] = []
        self.running = False

    async def start(self) -> Loaded:
        return Loaded("1", 0.0)

    async def run(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> Ran:
        self.asked.append([list(p) for p in prompts])
        return Ran(1.0, tuple(Times(0.5, 1.0, output_tokens - self.short) for _ in prompts))

    def pause(self) -> None:
        self.running = False

    async def resume(self) -> None:
        self.running = True

    async def stop(self) -> None:
        return None


@pytest.fixture
def noise(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Cores that others use in each turn to come; quiet after that, and between the turns."""
    coming: list[float] = []

    @contextmanager
    def watch(root: int | None = None) -> Iterator[Others]:
        others = Others()
        yield others
        others.cores = coming.pop(0) if coming and root is not None else 0.0

    monkeypatch.setattr(match, "watch_others", watch)
    monkeypatch.setattr(match, "LOOK_S", 0.0)
    return coming


def test_what_is_shared_is_there_before() -> None:
    fake = Fake("a")
    asyncio.run(take_turn(fake, SHARED, 1))
    before, prompts = fake.asked
    assert [p[:4] for p in prompts] == before * 2


def test_short_workloads_are_repeated_with_new_prompts() -> None:
    fake = Fake("a")
    ran = asyncio.run(take_turn(fake, W4, 1))
    assert len(ran.requests) == len(fake.asked) == match.REPEATS["W4"]
    assert len({tuple(prompts[0]) for prompts in fake.asked}) == len(fake.asked)


def test_missing_tokens_are_a_failure(noise: list[float]) -> None:
    with pytest.raises(Failed, match=r"b: shared: \[2, 2\] tokens instead of 3"):
        asyncio.run(quiet_round({"a": Fake("a"), "b": Fake("b", short=True)}, SHARED, 0, 0, 0.0))


def test_all_get_the_same_prompts_and_stand_still_between(noise: list[float]) -> None:
    fakes = {name: Fake(name) for name in "ab"}
    turns, repeated = asyncio.run(quiet_round(fakes, SHARED, 1, 0, 0.0))
    assert list(turns) == ["a", "b"] and repeated == 0
    assert fakes["a"].asked == fakes["b"].asked
    assert not any(f.running for f in fakes.values())


def test_a_noisy_round_is_taken_again_with_new_prompts(noise: list[float]) -> None:
    noise += [0.0, 0.9]
    fakes = {name: Fake(name) for name in "ab"}
    _, repeated = asyncio.run(quiet_round(fakes, SHARED, 0, 3, 0.0))
    assert repeated == 1
    first, second = fakes["a"].asked[1], fakes["a"].asked[3]
    assert first != second, "the first try's prompts may be cached"


def test_noise_without_end_is_refused(noise: list[float]) -> None:
    noise += [0.9] * 100
    with pytest.raises(Noisy, match="in 3 tries of round 1"):
        asyncio.run(quiet_round({name: Fake(name) for name in "ab"}, SHARED, 0, 2, 0.0))


def test_a_round_waits_for_quiet_and_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def busy(root: int | None = None) -> Iterator[Others]:
        yield Others(1.5)

    monkeypatch.setattr(match, "watch_others", busy)
    monkeypatch.setattr(match, "LOOK_S", 0.1)
    fakes = {name: Fake(name) for name in "ab"}
    with pytest.raises(Noisy, match="others use 1.50 cores"):
        asyncio.run(quiet_round(fakes, SHARED, 0, 3, 0.0))
    assert not any(f.asked for f in fakes.values())


def _row(dtype: str) -> Row:
    def turn(name: str, seconds: float) -> Turn:
        return Turn(name, Ran(seconds, (Times(1.0, seconds, 128),)), 0.01)

    one = {"shoal": turn("shoal", 2.0), "vllm": turn("vllm", 4.0), "llamacpp": turn("llamacpp", 3.0)}
    bounds = [Bounds(2, 20e9, {"float32": 100e9})] * 2
    return Row(dtype, bounds=bounds, weights_bytes=200_000_000, rounds={"W1": [one, one]})


def test_quantities_carry_the_names_of_the_targets() -> None:
    values, lines = values_of(_row("bfloat16"))
    assert values["peers.w1.ratio_vllm"].values == (2.0, 2.0)
    assert values["peers.w1.ratio_best"].values == (1.5, 1.5)
    assert values["peers.w1.bandwidth_tokens_per_s"].median == 100.0
    assert values["peers.w1.shoal_bandwidth_ratio"].median == 0.64
    assert values["peers.w1.shoal_decode_tokens_per_s"].median == 127.0
    assert [line[:3] for line in lines][0] == ["bfloat16", "W1", "shoal"]
    assert "peers.int4.w1.ratio_llamacpp" in values_of(_row("int4"))[0]


def test_notes_tell_the_noise_and_who_is_missing() -> None:
    row = _row("bfloat16")
    row.failed["vllm"] = "SIGILL"
    row.loaded["llamacpp"] = Loaded("b1", 2.0, "poll 0")
    notes = notes_of(Setting(rounds=2), row)
    assert notes["failed"] == {"vllm": "SIGILL"} and notes["others_cores_max"] == 0.01
    assert notes["contestants"]["llamacpp"]["note"] == "poll 0; BF16"


def test_a_peer_without_an_environment_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Environment("nowhere", "bench.peers.nowhere", "")
    monkeypatch.setitem(ENVIRONMENTS, "nowhere", missing)
    peer = Peer("nowhere", Load("m", "bfloat16", 2), "passive", tmp_path, {})
    with pytest.raises(Failed, match="make bench-peers"):
        asyncio.run(peer.start())


def test_results_do_not_tell_where_the_sources_lie() -> None:
    from bench.peers.environments import ROOT

    assert without_paths(f"{ROOT}/.peers/vllm: SIGILL") == ".../.peers/vllm: SIGILL"
