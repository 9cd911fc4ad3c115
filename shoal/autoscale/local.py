"""Pipelines of a deployment on this machine: they come and leave by its launcher.

Each comes or drains in a task of its own. One that does not come to serve is taken away again, and for a
while, longer each time, none is started.
"""

import asyncio
from collections.abc import Callable

from shoal.launcher import DRAIN_TIMEOUT_S, READY_TIMEOUT_S, Deployment
from shoal.plan import LaunchError

PAUSE_S = 2.0  # after one that did not come; twice as long after the next
PAUSE_MAX_S = 60.0


class LocalPipelines:
    """Implements `scaler.Pipelines`. Belongs to the task group that it is given."""

    def __init__(self, shoal: Deployment, group: asyncio.TaskGroup, say: Callable[[str], None]) -> None:
        self._shoal = shoal
        self._group = group
        self._say = say
        self._coming: dict[str, None] = {}  # batchers
        self._leaving: dict[str, None] = {}
        self._adding = 0  # that have no name yet
        self._pause_s = 0.0
        self._not_before = 0.0

    @property
    def count(self) -> int:
        return self._adding + len(self._staying())

    @property
    def settled(self) -> bool:
        return not self._adding and not self._coming and not self._leaving

    def grow(self, count: int) -> None:
        if asyncio.get_running_loop().time() < self._not_before:
            return
        self._adding += count
        for _ in range(count):
            self._group.create_task(self._come(), name="a pipeline comes")

    def shrink(self) -> None:
        """The youngest drains."""
        name = self._staying()[-1]
        self._leaving[name] = None
        self._group.create_task(self._leave(name), name=f"{name} leaves")

    def _staying(self) -> list[str]:
        return [m.name for m in self._shoal.fleet.of("pipeline") if m.name not in self._leaving]

    async def _come(self) -> None:
        name = ""
        try:
            try:
                name = (await self._shoal.add("pipeline"))[-1]
            finally:
                self._adding -= 1
            self._coming[name] = None
            await self._shoal.wait_serving(name, READY_TIMEOUT_S)
            self._pause_s = 0.0
        except LaunchError as error:
            await self._failed(name, error)
        finally:
            self._coming.pop(name, None)

    async def _failed(self, name: str, error: LaunchError) -> None:
        if name in self._leaving or (name and name not in self._shoal.fleet):
            return  # taken away meanwhile
        self._pause_s = min(2 * self._pause_s or PAUSE_S, PAUSE_MAX_S)
        self._not_before = asyncio.get_running_loop().time() + self._pause_s
        self._say(f"a pipeline did not come, the next in {self._pause_s:g} s: {error}")
        if name:
            self._leaving[name] = None
            await self._leave(name, grace_s=1.0)

    async def _leave(self, name: str, grace_s: float = DRAIN_TIMEOUT_S) -> None:
        try:
            for killed in await self._shoal.remove(name, grace_s):
                self._say(f"{killed} did not drain in time")
        except LaunchError as error:
            self._say(f"{name} did not leave: {error}")
        finally:
            self._leaving.pop(name, None)
