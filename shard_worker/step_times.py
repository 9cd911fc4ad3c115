"""Where a decode step's time goes in a worker, beside what the machine allows.

A whole model as one stage, with a worker's own code from the step's bytes to the token ids: parsing and
laying out, the layers by part as the compiled code counts them, head, sampling. The answer is one JSON
object; `shoal bench` sets it beside what the rest of the system takes.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

import numpy as np

from chassis.messages.pipeline import FLAG_FRESH, FLAG_SAMPLES, SlotStart, build_step, parse_step
from chassis.messages.request import Sampling
from shard_worker import sampler
from shard_worker.bounds import Bounds
from shard_worker.bounds import measure as measure_bounds
from shard_worker.executor import LoadFailed, StageSpec, StepInputs
from shard_worker.formats import bits_per_weight, is_packed
from shard_worker.inputs import SlotTables, TableLimits
from shard_worker.model.families import stage_weights
from shard_worker.model.stage_weights import Linear, StageWeights
from shard_worker.torch_executor import NO_BYTES, EngineConfig, TorchExecutor

BLOCK_SIZE_TOKENS = 16
DTYPE_BITS = {"float32": 32.0, "bfloat16": 16.0}
QUANTIZED_BITS = {"int8": 8.5, "int4": 5.0}  # with their scales
HEAD_BITS_MIN = 8.5
WARM_STEPS = 3
PYTHON, SAMPLING, COMPUTE = "python", "sampling", "compute"


@dataclass(frozen=True, slots=True)
class Point:
    """Medians of the steps, in microseconds; the parts add up to the step."""

    sequences: int
    context_len: int
    step_us: float
    parts_us: dict[str, float]
    bounds_us: dict[str, float]  # of some parts


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a step must read and multiply."""

    layer_weights: dict[str, int]  # by the arithmetic of their products
    layer_bytes: int
    head_weights: dict[str, int]
    head_bytes: int
    kv_token_bytes: int


def sizes_of(weights: StageWeights, dtype: str, quantize: str, int8_activations: bool = False) -> Sizes:
    def stored(linears: Sequence[Linear], least: float) -> tuple[dict[str, int], int]:
        counts: dict[str, int] = {}
        bits = 0.0
        for matrix in (matrix for linear in linears for matrix in linear.matrices):
            some = matrix.outputs * matrix.inputs
            each = DTYPE_BITS[dtype]
            packed = quantize in QUANTIZED_BITS or (quantize != "none" and is_packed(matrix.format))
            if quantize != "none" and is_packed(matrix.format):
                each = bits_per_weight(matrix.format)
            if quantize in QUANTIZED_BITS:
                each = min(each, max(least, QUANTIZED_BITS[quantize]))
            arithmetic = "int8" if packed and int8_activations else dtype
            counts[arithmetic] = counts.get(arithmetic, 0) + some
            bits += some * each
        return counts, round(bits / 8)

    layers = [
        linear for layer in weights.layers for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)
    ]
    assert weights.head is not None, "a whole model has a head"
    head = stored([weights.head.linear], HEAD_BITS_MIN)
    kv = 2 * len(weights.layers) * weights.num_kv_heads * weights.head_dim * DTYPE_BITS[dtype] / 8
    return Sizes(*stored(layers, 0.0), *head, round(kv))


def bounds_us(
    sizes: Sizes, bounds: Bounds, sequences: int, context_len: int, shared_len: int = 0
) -> dict[str, float]:
    """The longer of reading what a part needs once and of multiplying by it."""

    def part(weights: Mapping[str, int], stored_bytes: int) -> float:
        read_s, multiply_s = stored_bytes / bounds.read_bytes_per_s, 0.0
        for arithmetic, count in weights.items():
            if rate := bounds.products_per_s(arithmetic):
                multiply_s += 2 * count * sequences / rate
        return 1e6 * max(read_s, multiply_s)

    kv_bytes = sizes.kv_token_bytes * (shared_len + (context_len - shared_len) * sequences)
    return {
        "products": part(sizes.layer_weights, sizes.layer_bytes),
        "head": part(sizes.head_weights, sizes.head_bytes),
        "attention": 1e6 * kv_bytes / bounds.read_bytes_per_s,
    }


def header(number: int, sequences: int, position: int, blocks: int, shared: int = 0) -> bytes:
    """A step as a batcher sends it: a token of every row, with the first one the blocks before it too,
    the first `shared` of them the same for all."""
    fresh = number == 1
    table = np.empty((sequences, blocks), np.uint32)
    table[:, :shared] = np.arange(shared)
    table[:, shared:] = shared + np.arange(sequences * (blocks - shared)).reshape(sequences, -1)
    flags = FLAG_SAMPLES | (FLAG_FRESH if fresh else 0)
    return build_step(
        1, number,
        slots=list(range(sequences)),
        num_tokens=[1] * sequences,
        starts=[position] * sequences,
        flags=[flags] * sequences,
        output_index=[number] * sequences,
        table_lens=[blocks if fresh else 0] * sequences,
        token_ids=[(97 + i) % 256 for i in range(sequences)],
        table=table.ravel().tolist() if fresh else [],
        fresh=[SlotStart(Sampling(0.0), 5)] * sequences if fresh else [],
        trace_parent=bytes(25),
    )  # fmt: skip


class Steps:
    """A worker without its links: steps of `sequences` rows that all are at the same position."""

    def __init__(
        self, executor: TorchExecutor, sequences: int, context_len: int, steps: int, shared_len: int = 0
    ) -> None:
        self._executor = executor
        self._sequences = sequences
        self._shared = min(shared_len, context_len) // BLOCK_SIZE_TOKENS
        self._blocks = -(-(context_len + steps + WARM_STEPS + 1) // BLOCK_SIZE_TOKENS)
        layers = executor.facts.num_layers
        spec = StageSpec(0, 1, 0, layers, BLOCK_SIZE_TOKENS, sequences, sequences)
        loaded = executor.load(spec)
        if loaded.num_blocks < self._shared + sequences * (self._blocks - self._shared):
            raise LoadFailed(f"{loaded.num_blocks} KV blocks are too few for {sequences} sequences")
        limits = TableLimits(
            slots_max=sequences,
            block_size_tokens=BLOCK_SIZE_TOKENS,
            num_blocks=loaded.num_blocks,
            context_len_max=self._blocks * BLOCK_SIZE_TOKENS,
            step_tokens_max=sequences,
        )
        self._tables = SlotTables(limits)
        self._number = 0
        self._position = context_len  # what lies before it is not looked at
        self.layout_us = 0.0
        self._inputs: StepInputs | None = None

    def take(self) -> float:
        """One step; its seconds from header to ids."""
        self._number += 1
        data = header(self._number, self._sequences, self._position, self._blocks, self._shared)
        begun = time.perf_counter()
        self._inputs = self._tables.apply(parse_step(data))
        laid_out = time.perf_counter()
        self._executor.run(self._inputs, NO_BYTES)
        ended = time.perf_counter()
        self._position += 1
        self.layout_us = 1e6 * (laid_out - begun)
        return ended - begun

    def sampling_us(self, repeats: int) -> float:
        """Of the last step's rows, alone."""
        inputs = self._inputs
        assert inputs is not None
        last = inputs.row_offsets[inputs.sample_rows + 1].astype(np.int64) - 1
        logits = self._executor.logits(last)
        return 1e6 * _median(repeats, lambda: sampler.output(logits.clone(), inputs))


def _median(times: int, what: Callable[[], object]) -> float:
    taken = []
    for _ in range(times):
        begun = time.perf_counter()
        what()
        taken.append(time.perf_counter() - begun)
    return median(taken)


def measure(
    executor: TorchExecutor,
    sizes: Sizes,
    bounds: Bounds,
    sequences: int,
    context_len: int,
    steps: int,
    shared_len: int = 0,
) -> Point:
    """`shared_len`: tokens that all contexts begin with, whole blocks of them. Raises LoadFailed."""
    worker = Steps(executor, sequences, context_len, steps, shared_len)
    for _ in range(WARM_STEPS):
        worker.take()
    taken_us: list[float] = []
    parts: dict[str, list[float]] = {}
    for _ in range(steps):
        before = executor.times_ns()
        taken_us.append(1e6 * worker.take())
        after = executor.times_ns()
        for name, ns in (after or {}).items():
            parts.setdefault(name, []).append((ns - (before or {}).get(name, 0)) / 1000)
        parts.setdefault(PYTHON, []).append(worker.layout_us)
    step_us = median(taken_us)
    parts_us = {name: median(values) for name, values in parts.items()}
    parts_us[SAMPLING] = worker.sampling_us(steps)
    left_us = max(0.0, step_us - sum(parts_us.values()))
    rest = PYTHON if executor.times_ns() is not None else COMPUTE
    parts_us[rest] = parts_us.get(rest, 0.0) + left_us
    limits = bounds_us(sizes, bounds, sequences, context_len, min(shared_len, context_len))
    return Point(sequences, context_len, step_us, parts_us, limits)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shard_worker.step_times", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32", choices=tuple(DTYPE_BITS))
    parser.add_argument("--quantize", default="none", choices=("none", "keep", *QUANTIZED_BITS))
    parser.add_argument("--int8-activations", action=argparse.BooleanOptionalAction)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sequences", default="1,16,64", help="how many decode together: points to measure")
    parser.add_argument("--context-len", type=int, default=128)
    parser.add_argument("--shared-len", type=int, default=0, help="tokens that all contexts begin with")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kv-memory-mb", type=int, default=1024)
    args = parser.parse_args(argv)
    try:
        executor = TorchExecutor(
            EngineConfig(
                model=args.model,
                dtype=args.dtype,
                quantize=args.quantize,
                int8_activations=args.int8_activations,
                threads=args.threads,
                kv_memory_mb=args.kv_memory_mb,
            )
        )
        weights = stage_weights(executor.checkpoint, 0, executor.facts.num_layers)
        sizes = sizes_of(weights, args.dtype, args.quantize, executor.int8_activations)
        bounds = measure_bounds(args.threads)
        points = [
            measure(executor, sizes, bounds, int(count), args.context_len, args.steps, args.shared_len)
            for count in args.sequences.split(",")
        ]
    except LoadFailed as error:
        sys.stdout.write(json.dumps({"error": str(error)}) + "\n")
        return 1
    told = {"bounds": asdict(bounds), "sizes": asdict(sizes), "points": [asdict(p) for p in points]}
    sys.stdout.write(json.dumps(told) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
