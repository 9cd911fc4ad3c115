"""`python -m shard_worker`: one stage as a process."""

import platform
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from chassis.ports import Ports
from chassis.service import Observed, main
from chassis.user_folders import cache_folder
from shard_worker.compute import ComputeThread
from shard_worker.config import Config
from shard_worker.executor import Executor, LoadFailed
from shard_worker.grammar import Grammars
from shard_worker.inputs import MakeTables, portable_tables
from shard_worker.meters import ObservedWorker
from shard_worker.native.library import digest, native, native_if_built
from shard_worker.native.stamps import native_stamps
from shard_worker.native.tables import native_tables
from shard_worker.stamps import MakeStamps, Stamps

if TYPE_CHECKING:
    from shard_worker.ranks.executor import LeaderExecutor, RankExecutor
    from shard_worker.torch_executor import EngineConfig, TorchExecutor


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
                layer_cost_s=config.fake_layer_cost_us / 1e6,
                layers_max=config.fake_layers_max,
            )
        )
    from shard_worker.device.choice import chosen
    from shard_worker.device.executor import DeviceExecutor
    from shard_worker.room import room_of
    from shard_worker.torch_executor import TorchExecutor

    on_device = config.engine == "device" or chosen(config.device).type != "cpu"
    engine = engine_config(config)
    executor = (DeviceExecutor if on_device else TorchExecutor)(engine)
    room = room_of(executor, engine, config.weights_mb)
    executor.take_room(room.layers_max, room.head_layers, room.ends_layers)
    if executor.device.type == "cpu":
        measure(config, executor, (), time.process_time, config.threads)  # it is all threads' time
    else:  # which works while the processor does nothing
        measure(config, executor, (executor.device_name,), time.perf_counter)
    return executor


def measure(
    config: Config,
    executor: "TorchExecutor",
    more: Sequence[object],
    clock: Callable[[], float],
    threads: int = 1,
) -> None:
    """What layers and head take, if it is wanted. `more`: what that depends on beside the configuration;
    `threads`: that `clock` counts. Raises LoadFailed."""
    if not config.measure_costs:
        return
    from shard_worker.costs import known_or_measured

    folder = Path(config.digest_cache_dir) if config.digest_cache_dir else cache_folder() / "costs"
    machine = platform.node()  # the folder may be shared
    conditions = (config.dtype, config.threads, config.engine, _kernels(config), machine, *more)
    costs = known_or_measured(executor, executor.checkpoint, conditions, folder, clock)
    executor.take_costs(costs.head_cost_layers, fmean(costs.layer_us) / threads)


def measure_ranks(config: Config, executor: "LeaderExecutor", hosts: Sequence[str]) -> None:
    """By the clock on the wall: a step waits for the other ranks. Raises LoadFailed."""
    measure(config, executor, (f"{executor.ranks} ranks", *hosts), time.perf_counter)


def engine_config(config: Config) -> "EngineConfig":
    from shard_worker.torch_executor import EngineConfig

    return EngineConfig(
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


def _kernels(config: Config) -> str:
    """What times hold for; with another library they are measured anew."""
    return "" if config.engine == "torch" else digest()


def columns_for(config: Config) -> tuple[MakeTables, MakeStamps]:
    """In compiled code, where the executor has it, or for the fake one, where somebody has built it."""
    if config.executor == "fake":
        library = native_if_built()
    else:
        library = native() if config.engine != "torch" else None
    if library is None:
        return portable_tables, Stamps
    return native_tables(library), native_stamps(library)


def build(config: Config, ports: Ports, words: Sequence[str] | None = None) -> Observed:
    """`words`: how this process was called, if it is a worker's alone. Raises LoadFailed."""
    if config.rank:
        return build_follower(config)
    if config.tensor_parallel > 1:
        return build_leader(config, ports, words)
    return ObservedWorker(config, ports, *_parts(config, build_executor(config)))


def build_leader(config: Config, ports: Ports, words: Sequence[str] | None) -> Observed:
    """Raises LoadFailed."""
    from shard_worker.ranks.processes import RankProcesses, listening

    ranks = config.tensor_parallel
    if words is None and not config.ranks_listen:
        raise LoadFailed("tensor_parallel: here no processes are started; ranks_listen says where ranks join")
    try:
        listener = listening(config.ranks_listen, ranks)
    except OSError as error:
        raise LoadFailed(f"ranks_listen {config.ranks_listen}: {error}") from None
    processes = None  # they take as long to begin as what follows
    if words is not None and not config.ranks_listen:
        processes = RankProcesses(ranks, listener, words, gpu_of(config.device))
    from shard_worker.ranks.executor import LeaderExecutor
    from shard_worker.ranks.leader import Followers
    from shard_worker.ranks.worker import LeaderWorker

    followers = Followers(ranks, listener, config.rank_silence_ms / 1000)
    executor = LeaderExecutor(engine_config(config), followers)
    take_room(config, executor)
    return LeaderWorker(
        config,
        ports,
        executor,
        *_parts(config, executor)[1:],
        followers=followers,
        processes=processes,
        measure=partial(measure_ranks, config),
    )


def gpu_of(device: str) -> int | None:
    """None: it is the processor. Raises LoadFailed."""
    if device == "cpu":
        return None  # without torch, which takes a second
    from shard_worker.device.choice import chosen

    found = chosen(device)
    return None if found.type == "cpu" else found.index or 0


def take_room(config: Config, executor: "RankExecutor") -> None:
    room = executor.room(config.weights_mb)
    executor.take_room(room.layers_max, room.head_layers, room.ends_layers)


def build_follower(config: Config) -> Observed:
    """Raises LoadFailed."""
    from shard_worker.ranks.executor import RankExecutor
    from shard_worker.ranks.follower import Follower
    from shard_worker.ranks.worker import FollowerService

    executor = RankExecutor(engine_config(config), config.rank, config.tensor_parallel)
    take_room(config, executor)
    silence_s, join_s = config.rank_silence_ms / 1000, config.rank_join_ms / 1000
    return FollowerService(Follower(executor, config.leader, silence_s, join_s))


def _parts(
    config: Config, executor: Executor
) -> tuple[Executor, ComputeThread, MakeTables, MakeStamps, ComputeThread, Grammars]:
    compute, copies = ComputeThread(), ComputeThread("copies")
    threads = ThreadPoolExecutor(2, "grammars")  # a grammar that takes long leaves one to the others
    grammars = Grammars(executor.facts.card, lambda work: (threads.submit(work), None)[1], time.monotonic)
    return executor, compute, *columns_for(config), copies, grammars


if __name__ == "__main__":
    main("shard_worker", Config, partial(build, words=sys.argv[1:]))
