"""Tokens that depend on what was said are the same alone, in company, in stages, in chunks, preempted.

On the same small models as test_exactness; a repetition penalty is also held against transformers' own.
"""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chassis.messages.sampling import Shaping
from shard_worker.torch_executor import EngineConfig, TorchExecutor
from tests.shard_worker import tiny_models
from tests.shard_worker.driver import Driver, Sequence

NUM_OUTPUT = 14
SHAPINGS = [
    None,
    Shaping(repetition_penalty=1.4),
    Shaping(presence_penalty=1.0, frequency_penalty=0.7),
    Shaping(min_p=0.02, typical_p=0.9, logit_bias=((7, 3.0), (9, -2.0))),
    Shaping(bad_words=((7,), (9, 11)), allowed_ids=tuple(range(0, 256, 3)), frequency_penalty=0.5),
    Shaping(repetition_penalty=0.8, typical_p=0.7),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return tiny_models.make(folder)


def sequences() -> list[Sequence]:
    draw = np.random.default_rng(8)
    return [
        Sequence(
            draw.integers(0, 256, n).tolist(),
            NUM_OUTPUT,
            temperature=(0.0, 0.9, 1.2)[i % 3],
            top_k=(0, 40)[i % 2],
            top_p=(1.0, 0.95)[i % 2],
            seed=i,
            shaping=SHAPINGS[i % len(SHAPINGS)],
        )
        for i, n in enumerate([33, 1, 9, 17, 4, 40, 2, 16, 25, 8, 3, 12])
    ]


def driver(folder: Path, ends: tuple[int, ...], **settings: int) -> Driver:
    config = EngineConfig(str(folder), num_blocks=400, digest_cache_dir=str(folder / "digests"))
    return Driver([TorchExecutor(config) for _ in ends], ends, **settings)


def test_shaped_output_depends_on_its_own_request_only(folder: Path, model: Any) -> None:
    alone = [driver(folder, (6,)).run([s])[0] for s in sequences()]
    assert driver(folder, (6,), step_tokens=1024).run(sequences(), chunk=1024) == alone
    assert driver(folder, (1, 4, 6), step_tokens=32).run(sequences()[::-1], chunk=7)[::-1] == alone
    plain = [Sequence(s.prompt, NUM_OUTPUT, s.temperature, s.top_k, s.top_p, s.seed) for s in sequences()]
    told = driver(folder, (6,)).run(plain)
    differs = [i for i, (a, b) in enumerate(zip(told, alone, strict=True)) if a != b]
    assert len(differs) >= 8 and not any(i % len(SHAPINGS) == 0 for i in differs)


def test_after_preemption(folder: Path, model: Any) -> None:
    alone = [driver(folder, (6,)).run([s])[0] for s in sequences()]
    pipeline = driver(folder, (2, 6))
    together = sequences()
    victims = {5: 1, 8: 5, 10: 4, 13: 2}
    while rows := pipeline.plan(together, 10):
        pipeline.step(rows)
        if (victim := victims.pop(pipeline.steps, None)) is not None:
            assert together[victim].output and not together[victim].done
            pipeline.preempt(together[victim])
    assert not victims
    assert [s.output for s in together] == alone


def test_a_repetition_penalty_is_the_one_of_transformers(folder: Path, model: Any) -> None:
    prompts = [s.prompt for s in sequences()[:6]]
    asked = [Sequence(p, NUM_OUTPUT, shaping=Shaping(repetition_penalty=1.4)) for p in prompts]
    for prompt, output in zip(prompts, driver(folder, (2, 6)).run(asked), strict=True):
        ids = torch.tensor([prompt])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NUM_OUTPUT,
                do_sample=False,
                eos_token_id=None,
                repetition_penalty=1.4,
            )
        assert output == result[0, len(prompt) :].tolist()
