"""`python -m shard_worker`: one stage as a process."""

import time
from pathlib import Path

from chassis.ports import Ports
from chassis.service import main
from chassis.user_folders import cache_folder
from shard_worker.compute import ComputeThread
from shard_worker.config import Config
from shard_worker.executor import Executor
from shard_worker.inputs import MakeTables, portable_tables
from shard_worker.native.library import native, native_if_built
from shard_worker.native.tables import native_tables
from shard_worker.service import ShardWorker


def build_executor(config: Config) -> Executor:
    """torch is imported only by those who need it. Raises LoadFailed."""
    if config.executor == "fake":
        from shard_worker.fake_model import FakeConfig, FakeExecutor

        return FakeExecutor(
            FakeConfig(
                num_layers=config.fake_layers,
                num_blocks=config.num_blocks or 4096,
                step_cost_s=config.fake_step_cost_us / 1e6,
                token_cost_s=config.fake_token_cost_us / 1e6,
            )
        )
    from shard_worker.costs import known_or_measured
    from shard_worker.device.choice import chosen
    from shard_worker.device.executor import DeviceExecutor
    from shard_worker.torch_executor import EngineConfig, TorchExecutor

    on_device = config.engine == "device" or chosen(config.device).type != "cpu"
    executor = (DeviceExecutor if on_device else TorchExecutor)(
        EngineConfig(
            model=config.model,
            model_name=config.model_name,
            repository=config.repository,
            dtype=config.dtype,
            quantize=config.quantize,
            int8_activations=config.int8_activations,
            engine=config.engine,
            threads=config.threads,
            context_len=config.context_len,
            kv_memory_mb=config.kv_memory_mb,
            num_blocks=config.num_blocks,
            device=config.device,
            device_memory=config.device_memory,
            digest_cache_dir=config.digest_cache_dir,
        )
    )
    if config.measure_costs:
        folder = Path(config.digest_cache_dir) if config.digest_cache_dir else cache_folder() / "costs"
        conditions: tuple[object, ...] = (config.dtype, config.threads, config.engine)
        clock = time.process_time
        if executor.device.type != "cpu":  # which works while the processor does nothing
            conditions, clock = (*conditions, executor.device_name), time.perf_counter
        costs = known_or_measured(executor, executor.checkpoint, conditions, folder, clock)
        executor.take_costs(costs.head_cost_layers)
    return executor


def tables_for(config: Config) -> MakeTables:
    """In compiled code, where the executor has it, or for the fake one, where somebody has built it."""
    if config.executor == "fake":
        library = native_if_built()
    else:
        library = native() if config.engine != "torch" else None
    return portable_tables if library is None else native_tables(library)


def build(config: Config, ports: Ports) -> ShardWorker:
    return ShardWorker(config, ports, build_executor(config), ComputeThread(), tables_for(config))


if __name__ == "__main__":
    main("shard_worker", Config, build)
