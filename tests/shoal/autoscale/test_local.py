"""Pipelines of a launcher: what comes, what leaves, and what does not come."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from shoal.autoscale.local import LocalPipelines
from shoal.plan import LaunchError
from tests.sim.loop import run


class Launcher:
    """As much of a deployment as is asked for. A start takes 5 s, a drain 3 s."""

    def __init__(self) -> None:
        self.names = ["batcher"]
        self.fails = False
        self.asked = 0
        self.fleet = self

    def of(self, kind: str) -> list[Any]:
        assert kind == "pipeline"
        return [SimpleNamespace(name=name) for name in self.names]

    def __contains__(self, name: str) -> bool:
        return name in self.names

    async def add(self, kind: str) -> list[str]:
        await asyncio.sleep(0)
        self.asked += 1
        self.names.append(f"batcher-{self.asked}")
        return ["worker", self.names[-1]]

    async def wait_serving(self, name: str, timeout_s: float) -> None:
        await asyncio.sleep(5)
        if self.fails:
            raise LaunchError(f"{name} keeps dying")

    async def remove(self, name: str, grace_s: float) -> list[str]:
        await asyncio.sleep(3)
        if name not in self.names:
            raise LaunchError(f"no process {name}")
        self.names.remove(name)
        return []


def scene(play: Callable[[Launcher, LocalPipelines, list[str]], Awaitable[None]]) -> None:
    async def main() -> None:
        launcher, said = Launcher(), list[str]()
        async with asyncio.TaskGroup() as group:
            await play(launcher, LocalPipelines(launcher, group, said.append), said)  # type: ignore[arg-type]

    run(main())


def test_what_is_asked_for_counts_at_once() -> None:
    async def play(launcher: Launcher, pipelines: LocalPipelines, said: list[str]) -> None:
        assert pipelines.count == 1 and pipelines.settled
        pipelines.grow(2)
        assert pipelines.count == 3 and not pipelines.settled
        await asyncio.sleep(1)
        assert pipelines.count == 3 and len(launcher.names) == 3 and not pipelines.settled
        await asyncio.sleep(5)
        assert pipelines.settled
        pipelines.shrink()
        assert pipelines.count == 2 and not pipelines.settled
        await asyncio.sleep(4)
        assert launcher.names == ["batcher", "batcher-1"] and pipelines.settled and not said

    scene(play)


def test_one_that_does_not_come_is_taken_away_and_not_tried_at_once() -> None:
    async def play(launcher: Launcher, pipelines: LocalPipelines, said: list[str]) -> None:
        launcher.fails = True
        asked = []
        for _ in range(200):  # as the scaler does, twice a second
            if pipelines.count < 2:
                pipelines.grow(1)
            asked.append(launcher.asked)
            await asyncio.sleep(0.5)
        assert 3 <= launcher.asked <= 8, "later and later"
        assert "keeps dying" in said[0] and "the next in 2 s" in said[0] and "the next in 4 s" in said[1]
        launcher.fails = False
        await asyncio.sleep(60)
        pipelines.grow(1)
        await asyncio.sleep(6)
        assert pipelines.count == 2 and pipelines.settled
        assert launcher.names[0] == "batcher"

    scene(play)


def test_all_may_leave_while_one_comes_and_somebody_else_may_have_been_first() -> None:
    async def play(launcher: Launcher, pipelines: LocalPipelines, said: list[str]) -> None:
        pipelines.shrink()
        assert pipelines.count == 0
        pipelines.grow(1)
        assert pipelines.count == 1
        launcher.names.remove("batcher")  # `shoal scale`
        await asyncio.sleep(8)
        assert launcher.names == ["batcher-1"] and pipelines.count == 1
        assert said == ["batcher did not leave: no process batcher"]

    scene(play)
