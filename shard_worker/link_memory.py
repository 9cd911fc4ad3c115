"""What of an executor's memory links may reach by themselves: GPUDirect, where device and driver can."""

from dataclasses import replace

from chassis.transport.interface import DirectLink, Link, LinkOptions
from chassis.transport.registered import Memory
from shard_worker.executor import AheadExecutor, Executor, Loaded, StageSpec


class LinkMemory:
    """`wanted`: without it every payload goes through the host's memory."""

    def __init__(self, executor: Executor, wanted: bool) -> None:
        self._executor = executor
        self._direct = executor if wanted and isinstance(executor, AheadExecutor) else None
        self._sends_from: tuple[Memory, ...] = ()  # of the last load

    def load(self, spec: StageSpec) -> Loaded:
        """On the compute thread. Raises LoadFailed."""
        loaded = self._executor.load(spec)
        last = spec.stage + 1 == spec.num_stages
        self._sends_from = () if self._direct is None or last else (self._direct.sends_from(),)
        return loaded

    def receiving(self, options: LinkOptions) -> LinkOptions:
        return options if self._direct is None else replace(options, slots_on=self._direct.slots_on)

    def sending(self, options: LinkOptions) -> LinkOptions:
        """After a load."""
        return replace(options, sends_from=self._sends_from)


def takes_direct(link: Link) -> bool:
    return isinstance(link, DirectLink) and link.takes_direct
