"""The words of `shoal bench`."""

import argparse
import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from shoal.launcher import LaunchError, Plan
from shoal.model_words import add_precision
from shoal.step_report import Asked, report, system_times, worker_times


def add_words(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", help="GGUF file, Hugging Face folder or smollm2")
    add_precision(parser)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="of each worker")
    parser.add_argument("--sequences", default="1,16", help="how many decode together: points to measure")
    parser.add_argument("--context-len", type=int, default=128)
    parser.add_argument("--shared-len", type=int, default=0, help="tokens that all contexts begin with")
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--worker-only", action="store_true", help="no deployment: a worker's step alone")
    parser.add_argument("--json", action="store_true", help="numbers instead of a table")
    parser.set_defaults(do=_bench)


def _bench(arguments: argparse.Namespace) -> int:
    try:
        sequences = tuple(int(word) for word in arguments.sequences.split(","))
    except ValueError:
        raise LaunchError(f"--sequences: {arguments.sequences!r} is not numbers with commas") from None
    if min(sequences) < 1 or arguments.context_len < 1 or arguments.output_tokens < 2:
        raise LaunchError("--sequences and --context-len: at least 1, --output-tokens: at least 2")
    if not 0 <= arguments.shared_len <= arguments.context_len:
        raise LaunchError("--shared-len: from 0 to --context-len")
    asked = Asked(sequences, arguments.context_len, arguments.output_tokens, arguments.shared_len)
    plan = Plan(
        model=arguments.model,
        stages=arguments.stages,
        threads=arguments.threads,
        dtype=arguments.dtype,
        quantize=arguments.quantize,
        int8_activations=arguments.int8_activations,
        restart=False,
    )
    told = worker_times(plan, asked)
    with TemporaryDirectory() as folder:
        placed = replace(plan, run_dir=Path(folder))
        outsides = {} if arguments.worker_only else asyncio.run(system_times(placed, asked))
    if arguments.json:
        keys = ("step_us", "compute_us", "wait_us", "ring_us", "between_us")
        told["system"] = {
            count: None if outside is None else {key: getattr(outside, key) for key in keys}
            for count, outside in outsides.items()
        }
    sys.stdout.write((json.dumps(told) if arguments.json else report(told, outsides)) + "\n")
    return 0
