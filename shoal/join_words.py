"""The words of `shoal join`: services of this machine for a deployment that runs elsewhere.

They listen on the address by which the bus is reached, tell it to the registry, are started again when they
die and drained at the end. `deploy/HOSTS.md` walks through it.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from chassis.config import without_user
from shoal import joining, model_words, up_words
from shoal.configured import configured
from shoal.joining import ROLES, SERVICES
from shoal.launcher import Deployment
from shoal.listening import LOOPBACK
from shoal.plan import Plan

Say = Callable[[str], None]
LOAD_TIMEOUT_S = 3600.0  # of the largest model from the slowest disk


def add_words(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="of the bus: nats://HOST:4222, or tls://... with --secure")
    parser.add_argument(
        "--role", action="append", required=True, choices=ROLES, help="what to be; several: say it again"
    )
    parser.add_argument(
        "--layers", default="auto", help="of a worker: auto, or FIRST:END that it prefers (default: auto)"
    )
    parser.add_argument(
        "--host",
        default="",
        metavar="ADDRESS",
        help="of this machine, for others (default: as it reaches the bus)",
    )
    parser.add_argument(
        "--first-port", type=int, default=0, help="to listen on; the others follow (default: any free ones)"
    )
    parser.add_argument("--secure", type=Path, metavar="DIR", help="what this machine got of `shoal init`")
    parser.add_argument("--model", default="smollm2", help="as of `shoal up`; the same as others serve")
    model_words.add_repository(parser)
    model_words.add_precision(parser)
    parser.add_argument("--threads", type=int, default=1, help="that a worker computes with (default: 1)")
    parser.add_argument("--stages", type=int, default=2, help="of a batcher's pipeline (default: 2)")
    parser.add_argument("--config", type=Path, help="TOML file, a section per service; words here win")
    parser.add_argument(
        "--port", type=int, default=50051, help="of a gateway (default: 50051; 0: a free one)"
    )
    parser.add_argument(
        "--http-port", type=int, default=8000, help="of its HTTP (default: 8000; 0: a free one)"
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="a gateway without keys and TLS serves others than this machine",
    )


async def plan_of(arguments: argparse.Namespace) -> tuple[Plan, tuple[str, ...]]:
    """What runs here, and the flags of workers among it. Raises LaunchError, ConfigError."""
    roles: list[str] = arguments.role
    secure = arguments.secure.resolve() if arguments.secure is not None else None
    layers = joining.layers_of(arguments.layers)
    user = SERVICES[roles[0]]
    flags = dict(joining.secure_flags(secure, roles)) if secure is not None else {}
    url = joining.secured_url(arguments.url, secure)
    host = arguments.host or await joining.reached_from(url, user)
    joining.check_host(host, "--host")
    guarded = secure is not None or joining.is_guarded(arguments.config)
    if arguments.insecure:
        flags["gateway"] = (*flags.get("gateway", ()), "--insecure")
    plan = Plan(
        model=arguments.model if "worker" in roles else "fake",  # nobody else needs it
        model_name=configured(arguments.config, os.environ).model_name,
        repository=arguments.repository,
        dtype=arguments.dtype,
        quantize=arguments.quantize,
        int8_activations=arguments.int8_activations,
        stages=arguments.stages,
        pipelines=0,
        gateways=0,
        kvstores=0,
        threads=arguments.threads,
        run_dir=arguments.run_dir,
        config=arguments.config,
        nats_url=url,
        bus_user=user,
        host=host,
        clients_host=host if guarded or arguments.insecure else LOOPBACK,
        first_port=arguments.first_port,
        port=arguments.port,
        http_port=arguments.http_port,
        flags=flags,
    )
    wish = ("--preferred-layers", f"{layers.start}:{layers.stop}") if layers is not None else ()
    return plan, ("--same-model", *wish)


async def stay(arguments: argparse.Namespace, say: Say) -> int:
    """Until Ctrl-C or SIGTERM; 1 when a service cannot be. Raises LaunchError, ConfigError."""
    plan, worker_flags = await plan_of(arguments)
    shoal = Deployment(plan)
    shoal.prepare()
    stopped = up_words.on_signals(shoal)
    bus = without_user(arguments.url.partition("?")[0])
    try:
        if not await up_words.unless(stopped, shoal.start()):
            return 0
        say(f"joining {bus} from {plan.host}; logs in {shoal.run_dir / 'logs'}")
        roles = sorted(arguments.role, key=ROLES.index)
        names = [(await shoal.add(role, worker_flags if role == "worker" else ()))[-1] for role in roles]
        for role, name in zip(roles, names, strict=True):
            if role == "batcher":  # stands when its workers are there
                say(f"{name} forms a pipeline of {plan.stages} stages as soon as it finds workers")
            elif await up_words.unless(stopped, shoal.wait_serving(name, LOAD_TIMEOUT_S)):
                say(f"{name} has joined{_doors(shoal, plan) if role == 'gateway' else ''}")
            else:
                return 0
        say("Ctrl-C drains and leaves")
        if await up_words.unless(stopped, _until_one_ends(shoal, say)):
            return 1
    finally:
        say("draining")
        for name in await shoal.stop():
            say(f"{name} did not drain in time")
    return 0


def _doors(shoal: Deployment, plan: Plan) -> str:
    alone = (
        "; this machine only: --secure, or --insecure, lets others in"
        if plan.clients_host == LOOPBACK
        else ""
    )
    return f": gRPC on {shoal.address}, HTTP on {shoal.http_addresses[0]}{alone}"


async def _until_one_ends(shoal: Deployment, say: Say) -> None:
    """For good, because its configuration cannot be used."""
    name = await shoal.wait_crashed()
    say(f"{name} ended: {shoal.children[name].last_words()}")
