"""W1 to W5 through gRPC with one stage on a device: the row `device`, for a machine that has one.

Rates are Shoal's alone: other engines on the same device would be contestants of `peers`. `--device cpu` runs
the device's stage on the processor, which shows that the row works and nothing else.
"""

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from bench.load import WORKLOADS
from bench.peers.contestants import Shoal, ShoalSetting
from bench.peers.conversation import Failed, Loaded
from bench.peers.match import take_turn
from bench.peers.turns import Turn, figures
from bench.results_file import Sample, table, write
from shard_worker.device.choice import chosen
from shard_worker.executor import LoadFailed

WARM_UP_SEED = 999_999


@dataclass(frozen=True, slots=True)
class Setting:
    device: str = "cuda"
    model: str = "smollm2"
    stages: int = 1
    rounds: int = 5
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    workloads: tuple[str, ...] = tuple(WORKLOADS)


def _flags(setting: Setting, dtype: str) -> tuple[str, ...]:
    engine = ("--engine", "device") if setting.device == "cpu" else ()
    share = ("--device-memory", f"{0.8 / setting.stages:.2f}")  # stages of one machine share its device
    return ("--device", setting.device, "--dtype", dtype, *engine, *share)


async def measure(setting: Setting, dtype: str) -> tuple[dict[str, list[dict[str, Turn]]], Loaded]:
    """Rounds by workload. Raises Failed."""
    shoal = Shoal(
        ShoalSetting(setting.model, setting.stages, 1, worker_flags=_flags(setting, dtype)), "shoal"
    )
    found: dict[str, list[dict[str, Turn]]] = {}
    try:
        loaded = await shoal.start()
        for name in setting.workloads:  # every shape once: some are recorded when they first come
            await take_turn(shoal, WORKLOADS[name], WARM_UP_SEED)
        for number in range(setting.rounds):
            for name in setting.workloads:
                ran = await take_turn(shoal, WORKLOADS[name], number)
                found.setdefault(name, []).append({"shoal": Turn("shoal", ran, 0.0)})
            sys.stderr.write(f"{dtype}: round {number + 1} of {setting.rounds}\n")
    finally:
        await shoal.stop()
    return found, loaded


def values_of(
    dtype: str, found: Mapping[str, list[dict[str, Turn]]]
) -> tuple[dict[str, Sample], list[list[str]]]:
    values: dict[str, Sample] = {}
    rows = []
    for name, rounds in found.items():
        figure = figures(WORKLOADS[name], rounds)
        key = f"device.{dtype}.{name.lower()}"
        some = {
            f"{key}.tokens_per_s": Sample(figure.rates["shoal"], "tokens/s"),
            f"{key}.ttft_ms": Sample(figure.ttfts_ms["shoal"], "ms"),
        }
        values |= some
        rows.append([dtype, name, *map(str, some.values())])
    return values, rows


def main(setting: Setting) -> int:
    try:
        device = chosen(setting.device)
    except LoadFailed as error:
        sys.stdout.write(f"nothing to report: {error}\n")
        return 1
    name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
    dtypes = [d for d in setting.dtypes if device.type != "cpu" or d != "float16"]
    for dtype in dtypes:
        try:
            found, loaded = asyncio.run(measure(setting, dtype))
        except Failed as error:
            sys.stdout.write(f"{dtype}: nothing to report: {error}\n")
            return 1
        values, rows = values_of(dtype, found)
        sys.stdout.write(table([["dtype", "workload", "tokens/s", "first token"], *rows]) + "\n")
        notes = {
            "device": name,
            "torch": torch.__version__,
            "dtype": dtype,
            "stages": setting.stages,
            "rounds": setting.rounds,
            "load_s": round(loaded.seconds, 1),
        }
        if device.type == "cuda":
            write("device", values, notes)
    return 0
