"""The tokens are transformers' tokens, however the model is split, batched, chunked, preempted or cached.

In float32, on models whose two largest logits are asserted to differ by more than rounding at every step.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shard_worker.native import library
from shard_worker.torch_executor import EngineConfig, TorchExecutor
from tests.shard_worker import tiny_models
from tests.shard_worker.driver import Driver, Sequence

NUM_OUTPUT = 12
SPLITS = [(6,), (2, 6), (1, 4, 6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return tiny_models.make(folder)


@dataclass(frozen=True)
class Setting:
    folder: Path
    engine: str


@pytest.fixture(scope="module", params=["native", "torch"])
def setting(request: pytest.FixtureRequest, folder: Path) -> Setting:
    if request.param == "native" and library.native() is None:
        pytest.skip("no compiler here")
    return Setting(folder, request.param)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """16 of mixed lengths; the first two begin alike."""
    draw = np.random.default_rng(3)
    lengths = [41, 37, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 23, 30, 60]
    made = [draw.integers(0, 256, n).tolist() for n in lengths]
    made[1][:22] = made[0][:22]
    return made


@pytest.fixture(scope="module")
def expected(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    answers = [tiny_models.greedy(model, prompt, NUM_OUTPUT) for prompt in prompts]
    assert min(margin for _, margin in answers) > tiny_models.MARGIN_MIN
    return [output for output, _ in answers]


def driver(setting: Setting, ends: tuple[int, ...], num_blocks: int = 400, **settings: int) -> Driver:
    config = EngineConfig(
        str(setting.folder),
        engine=setting.engine,
        num_blocks=num_blocks,
        digest_cache_dir=str(setting.folder / "digests"),
    )
    return Driver([TorchExecutor(config) for _ in ends], ends, **settings)


def greedy(prompts: list[list[int]]) -> list[Sequence]:
    return [Sequence(prompt, NUM_OUTPUT) for prompt in prompts]


@pytest.mark.parametrize("ends", SPLITS)
def test_alone(
    setting: Setting, prompts: list[list[int]], expected: list[list[int]], ends: tuple[int, ...]
) -> None:
    pipeline = driver(setting, ends)
    assert [pipeline.run(greedy([p]))[0] for p in prompts] == expected


@pytest.mark.parametrize("ends", SPLITS)
def test_together(
    setting: Setting, prompts: list[list[int]], expected: list[list[int]], ends: tuple[int, ...]
) -> None:
    pipeline = driver(setting, ends, step_tokens=1024)
    assert pipeline.run(greedy(prompts), chunk=1024) == expected
    assert pipeline.steps == NUM_OUTPUT


@pytest.mark.parametrize(("chunk", "block_size"), [(1, 4), (3, 1), (5, 16), (16, 8)])
def test_in_chunks_mixed_with_decodes(
    setting: Setting, prompts: list[list[int]], expected: list[list[int]], chunk: int, block_size: int
) -> None:
    pipeline = driver(setting, (2, 6), num_blocks=1000, block_size=block_size, step_tokens=40)
    assert pipeline.run(greedy(prompts), chunk=chunk) == expected


def test_after_preemption(setting: Setting, prompts: list[list[int]], expected: list[list[int]]) -> None:
    pipeline = driver(setting, (1, 4, 6))
    sequences = greedy(prompts)
    victims = {4: 0, 6: 15, 9: 14, 11: 1, 13: 15}
    while rows := pipeline.plan(sequences, 10):
        pipeline.step(rows)
        if (victim := victims.pop(pipeline.steps, None)) is not None:
            assert not sequences[victim].done
            pipeline.preempt(sequences[victim])
    assert not victims
    assert [s.output for s in sequences] == expected


def test_with_prefix_hits(setting: Setting, prompts: list[list[int]], expected: list[list[int]]) -> None:
    pipeline = driver(setting, (2, 6))
    first, second, again = greedy([prompts[0], prompts[1], prompts[0]])
    pipeline.run([first])
    assert pipeline.share(first, second) == 20
    assert pipeline.share(first, again) == 40
    assert pipeline.run([second, again]) == [expected[1], expected[0]]


def test_reformation_keeps_weights_and_cache(
    setting: Setting, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    first = driver(setting, (2, 6), num_blocks=60)
    started = Sequence(prompts[0], NUM_OUTPUT)
    for _ in range(6):
        first.step(first.plan([started], 16))
    second = Driver(first.executors, (2, 6))
    second.free = first.free
    assert second.run([started]) == [expected[0]]


SAMPLED = [(0.7, 0, 1.0), (1.0, 5, 1.0), (1.3, 0, 0.8), (0.9, 40, 0.95)]


def sampled(prompts: list[list[int]]) -> list[Sequence]:
    return [Sequence(prompt, NUM_OUTPUT, *SAMPLED[i % 4], seed=1000 + i) for i, prompt in enumerate(prompts)]


def test_sampled_output_depends_on_its_own_request_only(setting: Setting, prompts: list[list[int]]) -> None:
    alone = [driver(setting, (6,)).run([s])[0] for s in sampled(prompts)]
    assert driver(setting, (6,), step_tokens=1024).run(sampled(prompts), chunk=1024) == alone
    assert driver(setting, (1, 4, 6), step_tokens=32).run(sampled(prompts)[::-1], chunk=7)[::-1] == alone
    mixed = driver(setting, (2, 6)).run(sampled(prompts[:8]) + greedy(prompts[8:]))
    assert mixed[:8] == alone[:8]
    other_seeds = [
        Sequence(s.prompt, NUM_OUTPUT, *SAMPLED[i % 4], seed=5) for i, s in enumerate(sampled(prompts))
    ]
    assert driver(setting, (6,)).run(other_seeds) != alone
