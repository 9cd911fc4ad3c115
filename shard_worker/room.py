"""How much memory a worker's weights take, and so how many layers it has room for."""

from dataclasses import dataclass

import torch

from shard_worker.formats import kept_bytes
from shard_worker.model.families import FAMILIES, stage_weights
from shard_worker.model.layers import DTYPES, precision_of
from shard_worker.torch_executor import EngineConfig, TorchExecutor

DEVICE_SHARE = 0.8  # of a device's memory, for weights: the rest is for KV blocks and steps


@dataclass(frozen=True, slots=True)
class Room:
    """`head_layers`, `ends_layers`: what embedding or head takes (whichever is more), and what both take in
    one stage, where a matrix that is both lies once; in layers."""

    layers_max: int  # 0: as many as there are
    head_layers: float = 0.0
    ends_layers: float = 0.0


def room_of(executor: TorchExecutor, config: EngineConfig, weights_mb: int) -> Room:
    """`weights_mb`: what weights may take; 0: on a device a share of what it has, else no bound."""
    bound = bound_of(executor.device, weights_mb)
    if not bound:
        return Room(0)
    num_layers = executor.facts.num_layers

    def size(first: int, end: int) -> int:
        return weight_bytes(executor, config, first, end)

    inner = range(1, num_layers - 1) if num_layers > 2 else range(num_layers)
    layer = size(inner.start, inner.stop) / len(inner)
    ends = size(0, num_layers) - num_layers * layer
    of_one = ends
    if num_layers > 2:
        of_one = max(size(0, 1), size(num_layers - 1, num_layers)) - layer
    return Room(max(1, int(bound / layer)), max(0.0, of_one) / layer, max(0.0, ends) / layer)


def bound_of(device: torch.device, weights_mb: int) -> int:
    """Bytes; 0: none."""
    if weights_mb or device.type != "cuda":
        return weights_mb << 20
    return int(torch.cuda.get_device_properties(device).total_memory * DEVICE_SHARE)


def held_as(device: torch.device, config: EngineConfig) -> tuple[str, str]:
    """Type and quantisation of weights in memory: a device has them expanded."""
    if device.type == "cpu":
        return config.dtype, config.quantize
    return "float32" if config.dtype == "float32" else "bfloat16", "none"


def weight_bytes(executor: TorchExecutor, config: EngineConfig, first: int, end: int) -> int:
    """Of a layer range with what belongs to it, as held in memory."""
    checkpoint, model = executor.checkpoint, executor.checkpoint.config
    if model.family in FAMILIES:
        weights = stage_weights(checkpoint, first, end)
        return kept_bytes(weights, *held_as(executor.device, config))
    ends = int(first == 0) + int(end == model.num_layers)  # embedding and head
    params = (end - first) * model.layer_params + ends * model.vocab_size * model.hidden_size
    return params * precision_of(DTYPES[config.dtype]).compute.itemsize
