"""Whatever schemathesis makes of our own description, every answer is as described, none a failure.

What is out of shape is refused. What is in shape may be, too, with 400: fields that contradict each other
(`min_tokens` above `max_tokens`), ids that the model does not have.
"""

import asyncio
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path

import pytest

from tests.gateway.openai.bot import answer_all
from tests.gateway.rig import Rig, byte_card, run

ROOT = Path(__file__).resolve().parents[3]
SCHEMATHESIS = ROOT / ".clients" / "bin" / "schemathesis"
CONFIG = """
[checks.positive_data_acceptance]
expected-statuses = [200, 400, 404]

# an empty list has no part in a form: what arrives is good
[[operations]]
include-name = "POST /v1/files"
[operations.checks.negative_data_rejection]
enabled = false
"""

pytestmark = pytest.mark.skipif(not SCHEMATHESIS.exists(), reason="make .clients/.ready")


async def serve(rig: Rig) -> None:
    """The registry forgets who does not say that he is there."""
    while True:
        await rig.serve_model(byte_card())
        await asyncio.sleep(5)


def fuzz(folder: Path, *words: str, timeout_s: float) -> None:
    async def life() -> None:
        rig = Rig()
        async with (
            rig.standing(http_address="127.0.0.1:0") as (gateway, batcher),
            asyncio.TaskGroup() as group,
        ):
            tasks = [group.create_task(serve(rig)), *answer_all(group, batcher)]
            url = f"http://{gateway.http_address}/openapi.json"
            argv = (
                str(SCHEMATHESIS),
                "--config-file",
                str(config),
                "run",
                url,
                "--checks",
                "all",
                "--no-color",
                "--exclude-path-regex",
                "/stats$",  # which this batcher does not tell
            )
            process = await asyncio.create_subprocess_exec(
                *(*argv, "--generation-database", "none", *words), stdout=PIPE, stderr=STDOUT, cwd=folder
            )
            try:
                said, _ = await process.communicate()
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            assert process.returncode == 0, said.decode(errors="replace")[-6000:]
            assert b"selected / " in said and b" 0 selected" not in said
            for task in tasks:
                task.cancel()

    config = folder / "schemathesis.toml"
    config.write_text(CONFIG)
    run(life(), timeout_s)


def test_every_answer_is_as_described(tmp_path: Path) -> None:
    fuzz(tmp_path, "--phases", "coverage,fuzzing,stateful", "-n", "15", "--seed", "1", timeout_s=90)


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["2", "3", "4"])
def test_every_answer_is_as_described_for_long(tmp_path: Path, seed: str) -> None:
    fuzz(tmp_path, "--phases", "coverage,fuzzing,stateful", "-n", "400", "--seed", seed, timeout_s=600)
