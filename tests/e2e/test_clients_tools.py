"""Tools and structured output by the openai package, before real processes of three stages."""

import asyncio
from pathlib import Path

import pytest

from tests.e2e.rig import fake_plan, running
from tests.e2e.test_clients_openai import PYTHON, script

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="make .clients/.ready")


def test_tools_and_structured_output_by_the_openai_package(runner: asyncio.Runner, tmp_path: Path) -> None:
    with running(runner, fake_plan(tmp_path, "--fake-step-cost-us", "0", stages=3)) as shoal:
        shoal.run(script("openai_tools.py", f"http://{shoal.deployment.http_addresses[0]}/v1"))
