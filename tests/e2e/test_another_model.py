"""A deployment over a bus that remembers another model: entries of the registry outlive who wrote them."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.launcher import Deployment, Plan
from tests.e2e.rig import running


def plan(folder: Path, num_layers: int) -> Plan:
    """By its layers it is another model under the same name."""
    flags = {"shard_worker": ("--fake-layers", str(num_layers))}
    return Plan(model="fake", run_dir=folder, stages=1, flags=flags)


def test_another_model_serves_as_soon_as_the_one_before_has_left(
    runner: asyncio.Runner, tmp_path: Path
) -> None:
    for num_layers in (4, 6):
        with running(runner, plan(tmp_path, num_layers)):
            pass  # it stands


@pytest.mark.slow
def test_what_was_killed_is_forgotten(runner: asyncio.Runner, tmp_path: Path) -> None:
    """Its workers are in the registry until they expire; then the batcher looks for a model anew."""

    async def life() -> None:
        async with Deployment(replace(plan(tmp_path, 4), restart=False)) as first:
            first.kill_all()
        async with Deployment(plan(tmp_path, 6)):
            pass

    runner.run(asyncio.wait_for(life(), 90.0))
