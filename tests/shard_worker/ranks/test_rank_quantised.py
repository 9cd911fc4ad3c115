"""Quantised weights over ranks: every weight is the number that it is to one rank, wherever it is cut.

So answers differ by the order of float32 sums alone, and by the rounding of activations where that is on.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES

from shard_worker.executor import LoadFailed, StageSpec
from shard_worker.formats import KIND_OF, QUANTIZE, dequantize, kept_bytes, prepared, stored
from shard_worker.model.families import stage_weights
from shard_worker.model.stage_weights import Linear, StoredMatrix, WeightFormat
from shard_worker.native import library
from shard_worker.probe import ProbeRow, probe_inputs
from shard_worker.ranks.room import room_of_share, share_bytes
from shard_worker.ranks.shares import inner_unit, shares
from shard_worker.ranks.split import columns, packed_unit, rank_weights
from shard_worker.room import Room
from shard_worker.torch_executor import EngineConfig, TorchExecutor
from shard_worker.weights import open_checkpoint
from tests.shard_worker import tiny_gguf, tiny_models
from tests.shard_worker.driver import NOTHING, Driver, Sequence
from tests.shard_worker.native.test_linear import stored as made_of
from tests.shard_worker.ranks_rig import Ranks

INPUTS = 512
CUTS = {"blocks": (0, 256, 512), "groups": (0, 64, 352, 512), "through": (0, 24, 300, 512)}
LAYERS = 2
PROMPT = [7, 99, 3, 250, 41, 12, 12, 8, 160, 77]
NUM_PROMPTS, NUM_OUTPUT = 8, 8
# Two orders of a sum of n products differ by up to n roundings: here 512 * 2^-24, in each of two sums a
# layer. One weight in 8 bits that is rounded with others than to one rank is off by a hundred times that.
ORDERS_OFF = INPUTS * 2**-24 * 2 * LAYERS


# ---- the numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", list(WeightFormat))
@pytest.mark.parametrize("quantize", QUANTIZE)
@pytest.mark.parametrize("cut", CUTS)
def test_a_cut_changes_no_weight(format: WeightFormat, quantize: str, cut: str) -> None:
    rows, _ = made_of(format, 5, INPUTS)
    whole = StoredMatrix(format, rows, INPUTS)
    alone = prepared(whole, "float32", quantize)
    wanted, (block, _) = dequantize(alone), GGML_QUANT_SIZES[KIND_OF[alone.format]]
    ends = CUTS[cut]
    for first, end in zip(ends, ends[1:], strict=False):
        (part,) = columns(Linear((whole,)), range(first, end), False, ("float32", quantize)).matrices
        assert part.inputs == end - first
        kept = prepared(part, "float32", quantize)
        assert (dequantize(kept) == wanted[:, first:end]).all()
        assert kept.format is alone.format or first % block or end % block, "it takes more memory"


def test_what_no_integers_can_stand_for_is_refused_where_it_is() -> None:
    numbers = np.ones((3, 64), np.float32)
    numbers[1, 40] = 1e9
    whole = Linear((stored(numbers, WeightFormat.F32),))
    assert columns(whole, range(32), False, ("float32", "int8")).inputs == 32
    with pytest.raises(LoadFailed, match="too large to be quantised"):
        columns(whole, range(32, 64), False, ("float32", "int8"))


# ---- answers ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cut:
    """Sizes of a model, and on how many ranks; `files`: how its weights are stored and kept."""

    ranks: int
    sizes: dict[str, int]
    files: tuple[tuple[str, str], ...]


SMALL_GROUPS = (("F32", "int8"), ("F32", "int4"), ("Q4_0", "keep"), ("Q8_0", "keep"), ("Q8_0", "int4"))
ANSWERS = {
    "groups": Cut(3, {"head_dim": 32, "hidden_size": 64, "intermediate_size": 96}, SMALL_GROUPS),
    "through": Cut(2, {"head_dim": 24, "hidden_size": 96, "intermediate_size": 80}, SMALL_GROUPS[:2]),
    "through packed": Cut(3, {"head_dim": 24, "hidden_size": 96, "intermediate_size": 64}, SMALL_GROUPS[2:]),
    "blocks": Cut(2, {"head_dim": 128, "hidden_size": 256, "intermediate_size": INPUTS}, (("Q4_K", "keep"),)),
    "through blocks": Cut(
        3,
        {"head_dim": 64, "hidden_size": 256, "intermediate_size": INPUTS},
        (("Q4_K", "keep"), ("Q4_K", "int8")),
    ),
}


@pytest.fixture(scope="module", params=ANSWERS)
def cut(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Cut, Path]:
    found = ANSWERS[request.param]
    folder = tmp_path_factory.mktemp("cut")
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": LAYERS}
    model = tiny_models.make(folder, **(heads | found.sizes))
    for kind in {kind for kind, _ in found.files} - {"F32"}:
        tiny_gguf.write(model, folder / f"{kind}.gguf", GGMLQuantizationType[kind], folder / "tokenizer.json")
    return found, folder


def config(folder: Path, kind: str, quantize: str, engine: str, rounds: bool) -> EngineConfig:
    return EngineConfig(
        str(folder if kind == "F32" else folder / f"{kind}.gguf"),
        quantize=quantize,
        engine=engine,
        int8_activations=rounds,
        num_blocks=80,
        digest_cache_dir=str(folder / "digests"),
    )


def logits(executor: TorchExecutor, ids: Items[int]) -> np.ndarray:
    """[tokens, vocabulary]."""
    executor.load(StageSpec(0, 1, 0, LAYERS, 4, 8, 64))
    assert executor.stage is not None
    blocks = range(-(-len(ids) // 4))
    executor.stage.run(probe_inputs([ProbeRow(ids, 0, blocks)], 4), NOTHING)
    found: np.ndarray = executor.logits(np.arange(len(ids), dtype=np.int64)).float().numpy().copy()
    return found


def off(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def outputs(executor: TorchExecutor, prompts: Items[list[int]]) -> list[list[int]]:
    return Driver([executor], (LAYERS,)).run([Sequence(list(p), NUM_OUTPUT) for p in prompts], chunk=4)


def sure(executor: TorchExecutor) -> dict[tuple[int, ...], list[int]]:
    """Prompts and their greedy answers, on the way to which no two logits are too near to each other."""
    draw = np.random.default_rng(1)
    prompts = [draw.integers(0, 250, n).tolist() for n in range(1, 2 * NUM_PROMPTS, 2)]
    found = {}
    for prompt, answer in zip(prompts, outputs(executor, prompts), strict=True):
        largest = np.sort(logits(executor, [*prompt, *answer[:-1]])[len(prompt) - 1 :])
        if (largest[:, -1] - largest[:, -2]).min() > tiny_models.MARGIN_MIN:
            found[tuple(prompt)] = answer
    assert len(found) >= NUM_PROMPTS // 2
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_room_is_reckoned_as_it_is_taken(cut: tuple[Cut, Path], dtype: str) -> None:
    shape, folder = cut
    for kind, quantize in shape.files:
        path = folder if kind == "F32" else folder / f"{kind}.gguf"
        whole = stage_weights(open_checkpoint(path, 0), 0, LAYERS)
        of_ranks = shares(whole, shape.ranks, inner_unit(whole, shape.ranks, packed_unit(whole)))
        for rank, share in enumerate(of_ranks):
            layers, head = share_bytes(whole, share, dtype, quantize)
            own = rank_weights(whole, share, rank == 0, dtype, quantize)
            assert layers + head == kept_bytes(own, dtype, quantize)
            assert layers == kept_bytes(replace(own, head=None), dtype, quantize)
            assert room_of_share(whole, share, dtype, quantize, 3 << 20) == Room(
                int((3 << 20) * LAYERS / layers), head * LAYERS / layers, head * LAYERS / layers
            )
            assert room_of_share(whole, share, dtype, quantize, 0) == Room(0)


@pytest.mark.parametrize("engine", ["native", "torch", "device"])
def test_answers_are_those_of_one_rank(cut: tuple[Cut, Path], engine: str) -> None:
    if engine == "native" and library.native() is None:
        pytest.skip("no compiler here")
    shape, folder = cut
    for kind, quantize in shape.files:
        settings = config(folder, kind, quantize, engine, rounds=False)
        alone = TorchExecutor(settings)
        wanted, answers = logits(alone, PROMPT), sure(alone)
        with Ranks(settings, shape.ranks) as ranks:
            assert off(logits(ranks.leader, PROMPT), wanted) < ORDERS_OFF
            found = outputs(ranks.leader, list(map(list, answers)))
            assert found == list(answers.values()), (kind, quantize)


@pytest.mark.skipif(library.native() is None, reason="no compiler here")
def test_rounded_activations_lose_no_more_over_ranks(cut: tuple[Cut, Path]) -> None:
    """What goes into a part that is kept expanded is not rounded, and a last bit may move a code by one."""
    shape, folder = cut
    for kind, quantize in shape.files:
        exact = logits(TorchExecutor(config(folder, kind, quantize, "native", False)), PROMPT)
        settings: Any = config(folder, kind, quantize, "native", True)
        lost = off(logits(TorchExecutor(settings), PROMPT), exact)
        with Ranks(settings, shape.ranks) as ranks:
            assert off(logits(ranks.leader, PROMPT), exact) < 1.5 * lost < 0.2, (kind, quantize)
