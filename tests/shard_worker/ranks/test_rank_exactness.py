"""Ranks and stages answer as one process does: float32, greedy and drawn, with every family's options.

On models whose two largest logits are asserted to differ by more than rounding at every step.
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
from tests.shard_worker.ranks_rig import apart, stages

NUM_OUTPUT = 8
GEMMA: dict[str, Any] = {"query_pre_attn_scalar": 8, "sliding_window": 8, "num_hidden_layers": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48},
    "qwen3": {"num_key_value_heads": 1, "tie_word_embeddings": False},  # a KV head on several
    "gemma3_text": GEMMA,
}
DRAWN = [(0.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 5, 1.0), (1.3, 0, 0.8)]


@dataclass(frozen=True)
class Model:
    folder: Path
    reference: Any  # transformers' own

    def config(self, engine: str, **changes: Any) -> EngineConfig:
        return EngineConfig(
            str(self.folder),
            engine=engine,
            num_blocks=200,
            digest_cache_dir=str(self.folder / "digests"),
            **changes,
        )


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp(request.param)
    changes = FAMILIES[request.param]
    reference = tiny_models.make_small(folder, request.param, vocab_size=81, intermediate_size=48, **changes)
    tiny_models.save_tokenizer(folder, 81)
    return Model(folder, reference)


@pytest.fixture(params=["native", "torch", "device"])
def engine(request: pytest.FixtureRequest) -> str:
    if request.param == "native" and library.native() is None:
        pytest.skip("no compiler here")
    return str(request.param)


def prompts() -> list[list[int]]:
    draw = np.random.default_rng(3)
    return [draw.integers(0, 81, n).tolist() for n in (21, 1, 7, 40, 16)]


def sequences() -> list[Sequence]:
    return [Sequence(p, NUM_OUTPUT, *DRAWN[i % 4], seed=50 + i) for i, p in enumerate(prompts())]


@pytest.mark.parametrize(("ranks", "ends"), [(2, (2, 4)), (3, (4,))])
@pytest.mark.parametrize("way", ["shared", "group"])
def test_as_one(
    model: Model, engine: str, ranks: int, ends: tuple[int, ...], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "group":
        apart(monkeypatch)
    elif library.native() is None:
        pytest.skip("no compiler here")
    config = model.config(engine)
    alone = Driver([TorchExecutor(config)], (4,), step_tokens=40).run(sequences(), chunk=17)
    expected = [tiny_models.greedy(model.reference, p, NUM_OUTPUT) for p in prompts()]
    assert min(margin for _, margin in expected) > tiny_models.MARGIN_MIN
    with stages(config, ranks, len(ends)) as leaders:
        assert Driver(leaders, ends, step_tokens=40).run(sequences(), chunk=17) == alone
        greedy = [Sequence(p, NUM_OUTPUT) for p in prompts()]
        assert Driver(leaders, ends, step_tokens=200).run(greedy, 200) == [ids for ids, _ in expected]
