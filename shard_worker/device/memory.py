"""How many KV blocks a device has room for: a share of what its weights and its largest step leave free."""

import torch

from shard_worker.device.stage import DeviceStage
from shard_worker.executor import LoadFailed, StageSpec


def blocks_that_fit(free_bytes: int, share: float, working_bytes: int, block_bytes: int) -> int:
    """One less than there is room for: a stage takes one more, for scrap."""
    return max(0, (int(free_bytes * share) - working_bytes) // block_bytes - 1)


def num_blocks_of(
    stage: DeviceStage, spec: StageSpec, num_blocks: int | None, share: float, kv_memory_mb: int
) -> int:
    """`num_blocks` as configured, if it is; `kv_memory_mb` counts on the processor. Raises LoadFailed."""
    stage.release()
    block_bytes = stage.block_bytes(spec.block_size_tokens)
    if stage.device.type == "cpu":
        return num_blocks or (kv_memory_mb << 20) // block_bytes
    torch.cuda.synchronize(stage.device)
    torch.cuda.empty_cache()  # what an earlier formation left
    free_bytes, _ = torch.cuda.mem_get_info(stage.device)
    working_bytes = stage.working_bytes(spec.step_tokens_max)
    fit = blocks_that_fit(free_bytes, share, working_bytes, block_bytes)
    if num_blocks is None and fit:
        return fit
    if num_blocks is not None and (num_blocks + 1) * block_bytes <= free_bytes:
        return num_blocks
    raise LoadFailed(
        f"{stage.device}: no room for {num_blocks or 1} KV blocks of {block_bytes} bytes: {free_bytes >> 20} "
        f"MB are free beside the weights, of which steps take {working_bytes >> 20} MB"
    )
