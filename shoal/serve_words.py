"""The words of `shoal serve --single`: everything in one process, in the foreground, until Ctrl-C.

The services log to standard error, a JSON object a line. Where it serves is written into the run folder, as
`shoal up` does it, so that the other commands find it; one of both runs in a folder.
"""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from chassis.service import Stop, loop_factory
from shoal import allocator, door, model_words
from shoal.configured import configured
from shoal.nats_server import is_taken
from shoal.plan import PORT_MAX, LaunchError, Plan
from shoal.run_folder import RunFolder

ANYWHERE = ("0.0.0.0", "[::]")
LOOPBACK = "127.0.0.1"
DOOR = "door"  # a socket in the run folder

Parse = Callable[[list[str]], argparse.Namespace]


def add_words(parser: argparse.ArgumentParser, parse: Parse) -> None:
    """`parse`: of a whole command line, for those that come to its door."""
    parser.add_argument(
        "--single",
        action="store_true",
        required=True,
        help="all services in this process, over memory: nothing outlives it (`up` has a process for each)",
    )
    parser.add_argument(
        "--model",
        default="smollm2",
        help="GGUF file, Hugging Face folder, name[:version], fake or smollm2 (default)",
    )
    model_words.add_repository(parser)
    model_words.add_precision(parser)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--threads", type=int, default=cores, help=f"to compute with (default: as many as cores, {cores})"
    )
    parser.add_argument("--kv-memory-mb", type=int, help="for keys and values (default: 48)")
    parser.add_argument("--port", type=int, help="of gRPC (default: as configured, 50051; 0: a free one)")
    parser.add_argument("--http-port", type=int, help="of HTTP (default: as configured, 8000; 0: a free one)")
    parser.add_argument("--config", type=Path, help="TOML file, a section per service; words here win")
    default = Path(os.environ.get("SHOAL_RUN_DIR", ".shoal"))
    parser.add_argument(
        "--run-dir", type=Path, default=default, help="for state (default: SHOAL_RUN_DIR or .shoal)"
    )
    parser.set_defaults(do=_serve, parse=parse)


def plan_of(arguments: argparse.Namespace) -> Plan:
    """Raises LaunchError."""
    gateway: list[str] = []
    for port, flag, name in (
        (arguments.port, "--port", "--grpc-address"),
        (arguments.http_port, "--http-port", "--http-address"),
    ):
        if port is not None:
            if not 0 <= port <= PORT_MAX:
                raise LaunchError(f"{flag} {port}: 0 to {PORT_MAX}")
            if port and is_taken(port):
                raise LaunchError(f"port {port} is taken: {flag} says another, 0 is any free one")
            gateway += [name, f"{LOOPBACK}:{port}"]
    worker: tuple[str, ...] = ()
    if arguments.kv_memory_mb is not None:
        worker = ("--kv-memory-mb", str(arguments.kv_memory_mb))
    return Plan(
        model=arguments.model,
        model_name=configured(arguments.config, os.environ).model_name,
        repository=arguments.repository,
        dtype=arguments.dtype,
        quantize=arguments.quantize,
        int8_activations=arguments.int8_activations,
        stages=1,
        threads=arguments.threads,
        run_dir=arguments.run_dir,
        config=arguments.config,
        flags={"gateway": tuple(gateway), "shard_worker": worker},
    )


def _serve(arguments: argparse.Namespace) -> int:
    """Raises LaunchError, ConfigError."""
    plan = plan_of(arguments)
    # spinning OpenMP threads on busy cores cost more than they compute; torch reads it when it is imported
    os.environ |= {"OMP_NUM_THREADS": str(plan.threads), "OMP_WAIT_POLICY": "passive"}
    allocator.share_heaps()
    folder = RunFolder(plan.run_dir)
    folder.take()
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_live(plan, folder, arguments.parse))
    finally:
        folder.leave()
    return 0


async def _live(plan: Plan, folder: RunFolder, parse: Parse) -> None:
    stop, loop = Stop(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.ask)
    from shoal.single import Single  # the services, and later torch: nobody else pays for them

    shoal = Single(plan)
    _say(f"starting {plan.model} in this process")

    def standing() -> None:
        state = {
            "nats_url": "",
            "door": str(folder.path / DOOR),
            "addresses": [reached(shoal.address)],
            "http_addresses": [reached(shoal.http_address)],
            "metrics_addresses": {"single": shoal.metrics_address} if shoal.metrics_address else {},
            "secure": str(shoal.secure or ""),
        }
        folder.write(state)
        _say(f"serving gRPC on {shoal.address}, HTTP on http://{shoal.http_address}; Ctrl-C drains and stops")

    async def look(words: list[str]) -> tuple[str, bool]:
        """Raises ValueError, BusError."""
        try:
            arguments = parse(words)
            tell = arguments.tell
        except (SystemExit, AttributeError):
            raise ValueError("not a command that looks") from None
        told: tuple[str, bool] = await tell(shoal.bus, shoal.dial, arguments)
        return told

    async with door.opened(folder.path / DOOR, look):
        await shoal.run(stop, standing)
    _say("drained")


def reached(address: str) -> str:
    """How this machine's commands reach it."""
    host, colon, port = address.rpartition(":")
    return f"{LOOPBACK if host in ANYWHERE else host}{colon}{port}"


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
