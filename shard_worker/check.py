"""`python -m shard_worker.check`: whether a model can be served here, and what it takes; as one line of JSON.

Everything goes the way that serving goes: the same loader, the same executor. `--only files` looks at the
files alone. The line is `{"error": ...}` when something is wrong, and the exit code 1.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from shard_worker.costs import ROWS, Costs, measure, split_by_time
from shard_worker.executor import LoadFailed, StageSpec
from shard_worker.model.families import FAMILIES, stage_weights
from shard_worker.probe import ProbeRow, probe_inputs
from shard_worker.room import weight_bytes
from shard_worker.torch_executor import EngineConfig, TorchExecutor
from shard_worker.weights import digest_of

BLOCK_SIZE_TOKENS = 16
PROMPT_LEN, OUTPUT_LEN = 24, 8
NUM_BLOCKS = ROWS * 8
NOTHING = memoryview(b"")


@dataclass(frozen=True, slots=True)
class ProposedStage:
    first_layer: int
    end_layer: int
    step_us: float  # with `costs.ROWS` sequences
    weight_bytes: int  # as held in memory
    kv_bytes_per_token: int


@dataclass(frozen=True, slots=True)
class Files:
    """What the files say; nothing has run."""

    path: str
    weights: tuple[str, ...]  # files the weights are made of
    family: str
    digest: str
    num_layers: int
    vocab_size: int
    context_len_max: int
    formats: dict[str, int]  # matrices by format, as they are stored
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class Run:
    """What came of running it."""

    dtype: str
    quantize: str
    int8_activations: bool
    ids: tuple[int, ...]  # greedy, the same twice
    layer_us: tuple[float, ...]
    head_us: float
    rows: int  # sequences of the step that was timed
    stages: tuple[ProposedStage, ...]


def look(executor: TorchExecutor) -> Files:
    """Raises LoadFailed."""
    checkpoint = executor.checkpoint
    config = checkpoint.config
    formats: Counter[str] = Counter()
    for i in range(config.num_layers if config.family in FAMILIES else 0):
        layer = stage_weights(checkpoint, i, i + 1).layers[0]
        for linear in (layer.qkv, layer.out, layer.gate_up, layer.down):
            formats.update(matrix.format.value for matrix in linear.matrices)
    return Files(
        path=str(checkpoint.path),
        weights=tuple(map(str, checkpoint.content_paths)),
        family=config.family,
        digest=digest_of(checkpoint),
        num_layers=config.num_layers,
        vocab_size=config.vocab_size,
        context_len_max=config.context_len_max,
        formats=dict(sorted(formats.items())),
        stored_bytes=sum(path.stat().st_size for path in checkpoint.content_paths),
    )


def try_out(executor: TorchExecutor, config: EngineConfig, num_stages: int) -> Run:
    """Raises LoadFailed: also when the model's numbers are none, or differ from run to run."""
    executor.load(_whole(executor))
    first, second = (_greedy(executor, range(start, start + 2)) for start in (0, 2))
    if first != second:
        raise LoadFailed(f"self-test: two greedy runs differ: {first} and {second}")
    # a device works while the processor does nothing
    clock = time.process_time if executor.device.type == "cpu" else time.perf_counter
    costs = measure(executor, executor.checkpoint, clock)
    num_stages = min(num_stages, executor.facts.num_layers)
    stages = tuple(
        _proposed(executor, config, costs, r, num_stages) for r in split_by_time(costs, num_stages)
    )
    return Run(
        config.dtype,
        config.quantize,
        executor.int8_activations,
        tuple(first),
        costs.layer_us,
        costs.head_us,
        ROWS,
        stages,
    )


def _whole(executor: TorchExecutor) -> StageSpec:
    return StageSpec(0, 1, 0, executor.facts.num_layers, BLOCK_SIZE_TOKENS, ROWS, 64)


def _greedy(executor: TorchExecutor, blocks: Sequence[int]) -> list[int]:
    """A prompt of ids from all over the vocabulary, then what is likeliest. Raises LoadFailed."""
    vocab_size = executor.checkpoint.config.vocab_size
    ids = [(i * 7919 + 13) % vocab_size for i in range(PROMPT_LEN)]
    output: list[int] = []
    start = 0
    while len(output) < OUTPUT_LEN:
        inputs = probe_inputs([ProbeRow(ids, start, blocks)], BLOCK_SIZE_TOKENS)
        (token,) = executor.run(inputs, NOTHING).token_ids.tolist()
        logits = executor.logits(np.array([len(ids) - 1], np.int64))
        if not bool(logits.isfinite().all()):
            raise LoadFailed(f"self-test: logits after {start + len(ids)} tokens are not finite")
        output.append(token)
        start, ids = start + len(ids), [token]
    return output


def _proposed(
    executor: TorchExecutor, config: EngineConfig, costs: Costs, layers: tuple[int, int], num_stages: int
) -> ProposedStage:
    first, end = layers
    model = executor.checkpoint.config
    head_us = costs.head_us if end == model.num_layers else 0.0
    kv_bytes = 2 * (end - first) * model.num_kv_heads * model.head_dim * (4 if _is_wide(config) else 2)
    return ProposedStage(
        first,
        end,
        sum(costs.layer_us[first:end]) + head_us,
        weight_bytes(executor, config, first, end),
        kv_bytes,
    )


def _is_wide(config: EngineConfig) -> bool:
    return config.dtype == "float32"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shard_worker.check", description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--repository", default="")
    parser.add_argument("--only", choices=["files"])
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quantize", default="none")
    parser.add_argument("--int8-activations", action=argparse.BooleanOptionalAction)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args(argv)
    config = EngineConfig(
        model=given.model,
        repository=given.repository,
        dtype=given.dtype,
        quantize=given.quantize,
        int8_activations=given.int8_activations,
        device=given.device,
        threads=given.threads,
        num_blocks=NUM_BLOCKS,
    )
    try:
        executor = TorchExecutor(config)
        found = asdict(look(executor))
        if given.only is None:
            found |= asdict(try_out(executor, config, max(1, given.stages)))
    except LoadFailed as error:
        found = {"error": str(error)}
    sys.stdout.write(json.dumps(found) + "\n")
    return 1 if "error" in found else 0


if __name__ == "__main__":
    sys.exit(main())
