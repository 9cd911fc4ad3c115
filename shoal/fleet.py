"""Pure. Who is in a local deployment: names, kinds, pipelines, and what makes it as many as wanted.

A pipeline is a batcher and a worker for each stage. Which workers a batcher has is the registry's affair, so
a pipeline that leaves takes along as many workers as it brought, whoever is idle then. Of each kind the
youngest leaves first; the first gateway keeps the address that was given out.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["gateway", "pipeline", "batcher", "worker", "spare", "kvstore"]
COUNTED: dict[str, Kind] = {
    "gateways": "gateway",
    "pipelines": "pipeline",
    "spares": "spare",
    "kvstores": "kvstore",
}
LIMITS: dict[str, tuple[int, int]] = {
    "gateways": (1, 64),
    "pipelines": (0, 64),
    "spares": (0, 256),
    "kvstores": (1, 64),
}
MODULES: dict[str, str] = {
    "gateway": "gateway",
    "batcher": "batcher",
    "worker": "shard_worker",
    "spare": "shard_worker",
    "kvstore": "kvstore",
}


class BadCount(Exception):
    """A number that is refused; the message names what and its limits."""


@dataclass(frozen=True, slots=True)
class Member:
    """One process. `pipeline`: the name of the batcher it came with; empty for whoever came alone."""

    name: str
    kind: Kind
    flags: tuple[str, ...] = ()
    pipeline: str = ""

    @property
    def module(self) -> str:
        return MODULES[self.kind]


def wanted_of(words: Mapping[str, object]) -> dict[str, int]:
    """Numbers by kind, as `shoal scale` takes them. Raises BadCount."""
    wanted: dict[str, int] = {}
    for what, number in words.items():
        if what not in COUNTED:
            raise BadCount(f"{what}: unknown; known are {', '.join(COUNTED)}")
        low, high = LIMITS[what]
        if isinstance(number, bool) or not isinstance(number, int) or not low <= number <= high:
            raise BadCount(f"{what}: {number!r}; a number from {low} to {high}")
        wanted[what] = number
    return wanted


class Fleet:
    def __init__(self) -> None:
        self._members: dict[str, Member] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def __getitem__(self, name: str) -> Member:
        return self._members[name]

    def of(self, kind: Kind) -> list[Member]:
        """Those of a kind, the oldest first. Of pipelines: their batchers."""
        if kind == "pipeline":
            return [m for m in self.of("batcher") if m.pipeline == m.name]
        return [m for m in self._members.values() if m.kind == kind]

    def workers_of(self, pipeline: str) -> list[Member]:
        """That came with it."""
        return [m for m in self.of("worker") if m.pipeline == pipeline]

    def counts(self) -> dict[str, int]:
        return {what: len(self.of(kind)) for what, kind in COUNTED.items()}

    # ---- joining

    def join(self, kind: Kind, num_stages: int, flags: tuple[str, ...] = ()) -> list[Member]:
        """Names for one more: one process, or those of a pipeline, workers first. `flags`: more of them, of
        a pipeline for its workers."""
        if kind != "pipeline":
            return [self._add(Member(self._free_name(kind), kind, flags))]
        batcher = self._free_name("batcher")
        workers = [
            self._add(
                Member(
                    self._free_name("worker"), "worker", ("--preferred-stage", str(stage), *flags), batcher
                )
            )
            for stage in range(num_stages)
        ]
        return [*workers, self._add(Member(batcher, "batcher", pipeline=batcher))]

    def leave(self, name: str) -> None:
        del self._members[name]

    def lend(self, idle: list[str], pipeline: str) -> list[Member]:
        """Which workers leave with a pipeline, its batcher having left: as many as it brought, its own first
        among `idle`, then others'; one of another pipeline changes places with one that stays."""
        own = self.workers_of(pipeline)
        going = [m for m in own if m.name in idle]
        staying = [m for m in own if m.name not in idle]
        for other in (m for m in self.of("worker") if m.name in idle and m.pipeline != pipeline):
            if staying:
                going.append(other)
                kept = staying.pop()
                self._members[kept.name] = replace(kept, pipeline=other.pipeline)
        return going + staying

    def _add(self, member: Member) -> Member:
        self._members[member.name] = member
        return member

    def _free_name(self, kind: Kind) -> str:
        numbered = kind in ("worker", "spare")
        index = 0
        while (name := f"{kind}-{index}" if numbered or index else kind) in self._members:
            index += 1
        return name

    # ---- as many as wanted

    def missing(self, wanted: Mapping[str, int]) -> list[Kind]:
        """What has to join, capacity behind the doors first."""
        counts = self.counts()
        order = ("kvstores", "spares", "pipelines", "gateways")
        return [COUNTED[what] for what in order for _ in range(wanted.get(what, counts[what]) - counts[what])]

    def surplus(self, wanted: Mapping[str, int], in_use: Collection[str] = ()) -> list[str]:
        """Who has to leave, doors first. `in_use`: spares that serve a stage; those leave last."""
        names: list[str] = []
        for what in ("gateways", "pipelines", "spares", "kvstores"):
            members = self.of(COUNTED[what])
            keep = wanted.get(what, len(members))
            members.sort(key=lambda m: m.name not in in_use)  # the others stay in their order
            names += [m.name for m in reversed(members[keep:])]
        return names
