"""The words of `shoal up` and `shoal demo`: what they run, and how long."""

import argparse
import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from chassis.config import without_user
from shoal import autoscale_words, model_words
from shoal.autoscale.policy import Rules
from shoal.configured import configured, unheeded
from shoal.control import Control
from shoal.fleet import COUNTED, BadCount, wanted_of
from shoal.joining import check_host, is_guarded
from shoal.launcher import READY_TIMEOUT_S, Deployment, LaunchError, Plan
from shoal.listening import LOOPBACK, NATS_PORT
from shoal.scaling import Scaling

Say = Callable[[str], None]
GRPC_PORT, HTTP_PORT = 50051, 8000
JOIN_TIMEOUT_S = 24 * 3600.0  # for other machines


def _say_nothing(text: str) -> None:
    pass


def add_words(parser: argparse.ArgumentParser) -> None:
    """Of `shoal up`."""
    add_plan(parser)
    for what in ("pipelines", "gateways", "kvstores"):
        parser.add_argument(f"--{what}", type=int, default=1, help="(default: 1)")
    parser.add_argument(
        "--port", type=int, help="of the gateway (default: as configured, 50051; 0: a free one)"
    )
    parser.add_argument(
        "--http-port", type=int, help="of its HTTP (default: as configured, 8000; 0: a free one)"
    )
    _add_hosts(parser)
    autoscale_words.add_words(parser)


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    """What lets services of other machines join: `deploy/HOSTS.md`."""
    parser.add_argument(
        "--listen",
        metavar="ADDRESS",
        help="of this machine, where others join (default: loopback, nobody does)",
    )
    parser.add_argument("--nats-port", type=int, help=f"of the bus (default: {NATS_PORT} with --listen)")
    parser.add_argument(
        "--first-port", type=int, default=0, help="of what other services dial (default: any free ones)"
    )
    parser.add_argument("--workers", type=int, help="of the stages, here: others join (default: all of them)")
    parser.add_argument(
        "--insecure", action="store_true", help="with --listen: serve other machines without keys and TLS too"
    )


def add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        help="GGUF file, Hugging Face folder, name[:version], fake or smollm2 (default: as configured, it)",
    )
    model_words.add_repository(parser)
    model_words.add_precision(parser)
    parser.add_argument(
        "--stages", type=int, help="workers that share the layers (default: as configured, 2)"
    )
    parser.add_argument("--spares", type=int, default=0, help="workers that wait to replace one (default: 0)")
    parser.add_argument(
        "--threads", type=int, help="that each worker computes with (default: as configured, 1)"
    )
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        help="processes that share a worker's layers (default: as configured, 1)",
    )
    parser.add_argument("--config", type=Path, help="TOML file, a section per service; words here win")
    parser.add_argument("--nats", help="URL of an existing server instead of an own one")


def plan_of(arguments: argparse.Namespace) -> Plan:
    """Raises LaunchError."""
    try:
        wanted_of({what: getattr(arguments, what) for what in COUNTED})
    except BadCount as error:
        raise LaunchError(f"--{error}") from None
    return hosted(alone_of(arguments), arguments)


def hosted(plan: Plan, arguments: argparse.Namespace) -> Plan:
    """The plan, listening for other machines as far as that was asked for. Raises LaunchError."""
    host, workers = arguments.listen, arguments.workers
    if workers is not None and not 0 <= workers <= plan.stages:
        raise LaunchError(f"--workers {workers}: 0 to {plan.stages}, the number of stages")
    if host is None:
        if workers is not None or arguments.insecure:
            raise LaunchError("--workers and --insecure want --listen: nobody can join on loopback")
        return replace(plan, first_port=arguments.first_port, nats_port=arguments.nats_port or 0)
    check_host(host, "--listen")
    open_doors = arguments.insecure or is_guarded(plan.config)
    return replace(
        plan,
        host=host,
        clients_host=host if open_doors else LOOPBACK,
        first_port=arguments.first_port,
        nats_port=NATS_PORT if arguments.nats_port is None else arguments.nats_port,
        workers=workers,
        flags={"gateway": ("--insecure",)} if arguments.insecure else {},
    )


def alone_of(arguments: argparse.Namespace) -> Plan:
    """On loopback. What no word says is as configured. Raises LaunchError."""
    file = configured(arguments.config, os.environ)
    return Plan(
        model=_first(arguments.model, file.model, "smollm2"),
        model_name=file.model_name,
        repository=_first(arguments.repository, file.repository, None),
        dtype=arguments.dtype,
        quantize=arguments.quantize,
        int8_activations=arguments.int8_activations,
        stages=_first(arguments.stages, file.stages, 2),
        spares=arguments.spares,
        pipelines=arguments.pipelines,
        gateways=arguments.gateways,
        kvstores=arguments.kvstores,
        threads=_first(arguments.threads, file.threads, 1),
        tensor_parallel=_first(arguments.tensor_parallel, file.tensor_parallel, 1),
        run_dir=arguments.run_dir,
        config=arguments.config,
        nats_url=arguments.nats or os.environ.get("SHOAL_NATS_URL"),
        port=_first(arguments.port, file.port, GRPC_PORT),
        http_port=_first(arguments.http_port, file.http_port, HTTP_PORT),
    )


def _first(*told: Any) -> Any:
    """What is said by the first that says something."""
    return next((value for value in told if value is not None), None)


async def stay_up(plan: Plan, say: Say, rules: Rules | None = None) -> None:
    """Until Ctrl-C or SIGTERM; `shoal scale` is heard once it serves. With `rules` it grows and shrinks by
    itself. Raises LaunchError."""
    if rules is not None:  # one at least, or nobody would know the model
        least = max(1, rules.pipelines_min)
        plan = replace(plan, pipelines=min(max(plan.pipelines, least), rules.pipelines_max))
    shoal = Deployment(plan)
    notes = unheeded(plan, os.environ)
    shoal.prepare()
    stopped = on_signals(shoal)
    say(f"starting {plan.model} in {plan.stages} stages; logs in {shoal.run_dir / 'logs'}")
    for line in notes:
        say(line)
    try:
        if not await started(shoal, stopped, say):
            return
        async with Control(Scaling(shoal)).listening(shoal.run_dir):
            say(f"serving gRPC on {shoal.address}, HTTP on http://{shoal.http_addresses[0]}")
            say(f"bus at {shoal.nats_url}; Ctrl-C drains and stops")
            async with autoscale_words.autoscaling(shoal, rules, say):
                await stopped.wait()
    finally:
        if shoal.pids():
            say("draining")
        for name in await shoal.stop():
            say(f"{name} did not drain in time")


async def started(shoal: Deployment, stopped: asyncio.Event, say: Say = _say_nothing) -> bool:
    """Whether it stands before somebody said stop. Raises LaunchError."""
    if not await unless(stopped, shoal.start()):
        return False
    if shoal.plan.host == LOOPBACK:
        return await unless(stopped, shoal.wait_ready())
    url = without_user(shoal.nats_url.partition("?")[0])
    say(f"others join with: shoal join {url} --role worker")
    missing = shoal.plan.workers is not None and shoal.plan.workers < shoal.plan.stages
    return await unless(stopped, shoal.wait_ready(JOIN_TIMEOUT_S if missing else READY_TIMEOUT_S))


def on_signals(shoal: Deployment) -> asyncio.Event:
    """Set by the first Ctrl-C or SIGTERM; the second kills what has not drained."""
    stopped = asyncio.Event()

    def on_signal() -> None:
        if stopped.is_set():
            shoal.kill_all()
        stopped.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    return stopped


async def unless(stopped: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Whether `work` came to its end before somebody said stop."""
    try:
        async with asyncio.TaskGroup() as group:
            working = group.create_task(work)
            waiting = group.create_task(stopped.wait())
            await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            working.cancel()
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None  # only `work` can fail
    return not working.cancelled()
