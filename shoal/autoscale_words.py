"""The words of `shoal up` that let it grow and shrink by itself."""

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from chassis import nats_bus
from chassis.bus import Bus
from chassis.errors import BusError
from shoal import readiness
from shoal.autoscale.local import LocalPipelines
from shoal.autoscale.policy import Rules
from shoal.autoscale.scaler import Scaler
from shoal.launcher import Deployment
from shoal.plan import LaunchError

MODEL_WAIT_S = 120.0
_POLL_S = 0.1


def add_words(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--autoscale",
        metavar="MIN:MAX",
        type=_bounds,
        help="as many pipelines as are needed, within these bounds",
    )
    parser.add_argument(
        "--ttft-objective-ms",
        type=int,
        help=f"with it: the first token is meant to come within (default: {Rules().ttft_objective_ms})",
    )
    parser.add_argument(
        "--scale-down-after",
        type=float,
        metavar="SECONDS",
        help="with it: fewer after fewer were enough for so long (default: ten times what a start takes)",
    )


def rules_of(arguments: argparse.Namespace) -> Rules | None:
    """None: not asked for. Raises LaunchError."""
    if arguments.autoscale is None:
        for word in ("ttft_objective_ms", "scale_down_after"):
            if getattr(arguments, word) is not None:
                raise LaunchError(f"--{word.replace('_', '-')}: only with --autoscale MIN:MAX")
        return None
    low, high = arguments.autoscale
    objective_ms = arguments.ttft_objective_ms
    try:
        return Rules(
            pipelines_min=low,
            pipelines_max=high,
            ttft_objective_ms=Rules().ttft_objective_ms if objective_ms is None else objective_ms,
            down_after_s=arguments.scale_down_after,
        )
    except ValueError as error:
        raise LaunchError(f"--autoscale: {error}") from None


def _bounds(text: str) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    if not colon or not (low + high).isascii() or not low.isdigit() or not high.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: MIN:MAX, as in 1:4")
    return int(low), int(high)


@asynccontextmanager
async def autoscaling(
    shoal: Deployment, rules: Rules | None, say: Callable[[str], None]
) -> AsyncIterator[None]:
    """Within it a deployment that stands grows and shrinks by the rules, if any. Raises LaunchError."""
    if rules is None:
        yield
        return
    try:
        bus = await nats_bus.connect(shoal.nats_url, name="autoscale")
    except (BusError, OSError) as error:
        raise LaunchError(f"--autoscale: no bus: {error}") from None
    try:
        model = await model_of(shoal)
        async with asyncio.TaskGroup() as group:
            scaling = group.create_task(_scale(shoal, bus, model, rules, say), name="autoscaler")
            try:
                yield
            finally:
                scaling.cancel()
    finally:
        await bus.close()


async def _scale(shoal: Deployment, bus: Bus, model: str, rules: Rules, say: Callable[[str], None]) -> None:
    """Until cancelled; what comes or leaves then is the deployment's to end."""
    async with asyncio.TaskGroup() as group:
        pipelines = LocalPipelines(shoal, group, say)
        await Scaler(bus, model, rules, lambda _: pipelines, time.time_ns, say).run()


async def model_of(shoal: Deployment) -> str:
    """What its batchers serve, as soon as one says so. Raises LaunchError."""
    try:
        async with asyncio.timeout(MODEL_WAIT_S):
            while True:
                for member in shoal.fleet.of("batcher"):
                    model = await readiness.label_of(
                        shoal.metrics_addresses[member.name], "shoal_requests_waiting", "gen_ai_request_model"
                    )
                    if model is not None:
                        return model
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise LaunchError(f"--autoscale: no batcher tells its model after {MODEL_WAIT_S:g} s") from None
