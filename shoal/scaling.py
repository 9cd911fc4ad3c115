"""Makes a running deployment as large as somebody wants it: first what joins serves, then what leaves drains.

One change at a time; the same words again do nothing. What joined and does not come to serve is taken away
again, so that a change that failed leaves what was there before.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.fleet import BadCount, wanted_of
from shoal.launcher import DRAIN_TIMEOUT_S, READY_TIMEOUT_S, Deployment
from shoal.plan import LaunchError


@dataclass(frozen=True, slots=True)
class Scaled:
    """`added`, `removed`: processes; `killed`: of the removed, who did not drain in time."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    killed: tuple[str, ...]
    counts: Mapping[str, int]


class Scaling:
    def __init__(
        self,
        shoal: Deployment,
        ready_timeout_s: float = READY_TIMEOUT_S,
        drain_timeout_s: float = DRAIN_TIMEOUT_S,
    ) -> None:
        self._shoal = shoal
        self._ready_timeout_s = ready_timeout_s
        self._drain_timeout_s = drain_timeout_s
        self._changing = asyncio.Lock()

    async def scale(self, words: Mapping[str, object]) -> Scaled:
        """`words`: numbers of gateways, pipelines, spares, kvstores; who is not named stays. Returns when all
        that joined serves and all that left has drained. Raises LaunchError."""
        try:
            wanted = wanted_of(words)
        except BadCount as error:
            raise LaunchError(str(error)) from None
        async with self._changing:
            before = set(self._shoal.children)
            await self._join(wanted)
            added = [name for name in self._shoal.children if name not in before]
            present = set(self._shoal.children)
            killed = await self._leave(wanted)
            removed = sorted(present - set(self._shoal.children))
            counts = self._shoal.fleet.counts()
        return Scaled(tuple(added), tuple(removed), tuple(killed), counts)

    async def _join(self, wanted: Mapping[str, int]) -> None:
        joined = [await self._shoal.add(kind) for kind in self._shoal.fleet.missing(wanted)]
        try:
            async with asyncio.TaskGroup() as group:
                for names in joined:  # of a pipeline the batcher is last
                    group.create_task(self._shoal.wait_serving(names[-1], self._ready_timeout_s))
        except ExceptionGroup as errors:
            await asyncio.gather(*(self._take_back(name) for names in joined for name in names))
            raise errors.exceptions[0] from None

    async def _take_back(self, name: str) -> None:
        if name in self._shoal.fleet:
            await self._shoal.dismiss(name, grace_s=1.0)

    async def _leave(self, wanted: Mapping[str, int]) -> list[str]:
        fleet = self._shoal.fleet
        members = [fleet[name] for name in fleet.surplus(wanted, await self._shoal.spares_in_use())]
        killed: list[str] = []
        for kind in (
            "gateway",
            "batcher",
            "spare",
            "kvstore",
        ):  # doors first
            going = [m.name for m in members if m.kind == kind]
            lists = await asyncio.gather(*(self._shoal.remove(name, self._drain_timeout_s) for name in going))
            killed += [name for some in lists for name in some]
        return killed
