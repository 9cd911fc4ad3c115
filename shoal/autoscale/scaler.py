"""The autoscaler's shell: listens to batchers, looks at the stream, asks the policy, has pipelines made.

It looks every `PERIOD_S`. While the bus is away nothing is decided: what is not known is no reason to change
anything. Once it is back, batchers are listened to first, as at the start.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from chassis import log, subjects
from chassis.bus import Bus, Message
from chassis.errors import BusError
from chassis.insist import insist
from chassis.messages import BadMessage
from chassis.messages.load import parse_load
from shoal.autoscale.demand import HEARD_TTL_S, Demand, Queued
from shoal.autoscale.keeper import Keeper
from shoal.autoscale.policy import Decision, Policy, Rules, Signals
from shoal.autoscale.starts import GIVEN_UP_S, Starts

PERIOD_S = 0.5
BATCH = subjects.PRIORITIES[-1]  # the class that has what others leave


class Pipelines(Protocol):
    """Where pipelines come from and go to. No call waits for what it asks for."""

    @property
    def count(self) -> int:
        """Those that run or come, without those that leave."""

    @property
    def settled(self) -> bool:
        """None comes or leaves here as far as this knows."""

    def grow(self, count: int) -> None:
        """So many more; it may refuse for a while, then `count` stays."""

    def shrink(self) -> None:
        """One less: it drains."""


class Told:
    """For those who only ask: somebody else makes pipelines of the number that is told."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.settled = True

    def grow(self, count: int) -> None:
        self.count += count

    def shrink(self) -> None:
        self.count -= 1


class Scaler:
    """`make`: from the number of pipelines that take work at the start. `say`: what changes, in words."""

    def __init__(
        self,
        bus: Bus,
        model: str,
        rules: Rules,
        make: Callable[[int], Pipelines],
        wall_ns: Callable[[], int],
        say: Callable[[str], None] = log.info,
    ) -> None:
        self._bus = bus
        self.model = model
        self._rules = rules
        self._make = make
        self._wall_ns = wall_ns
        self._say = say
        self.demand = Demand(rules.while_s)
        self.starts = Starts()
        self.signals: Signals | None = None  # the last; None: nothing was decided yet
        self.decision: Decision | None = None
        self._count = 0  # of pipelines, when last looked
        self._missing_since: float | None = None  # fewer take work than there are to be

    async def run(self) -> None:
        """Until cancelled."""
        bus, model = self._bus, self.model
        await insist(lambda: bus.ensure_consumers(model))
        keeper = Keeper(bus, model)
        opened = [
            await insist(keeper.watch),
            await insist(lambda: bus.subscribe(subjects.loads(model), self._heard)),
        ]
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(keeper.keep(), name="keep the model")
                await asyncio.sleep(HEARD_TTL_S)  # by then all have told
                await self._decide()
        finally:
            for subscription in opened:
                try:
                    await subscription.close()
                except BusError:
                    pass  # gone with its connection

    def _heard(self, message: Message) -> None:
        try:
            self.demand.heard(parse_load(message.data), asyncio.get_running_loop().time())
        except BadMessage as error:
            log.debug("a load that is none", error=str(error))

    async def _decide(self) -> None:
        pipelines = self._make(self.demand.ready)
        policy = Policy(self._rules, pipelines.count)
        self._count = pipelines.count
        loop = asyncio.get_running_loop()
        looked_at = loop.time()
        while True:
            try:
                queued = await self._queued()
                if loop.time() > looked_at + HEARD_TTL_S:  # what runs would seem to wait
                    await asyncio.sleep(HEARD_TTL_S)
                    queued = await self._queued()
            except BusError as error:
                log.debug("the stream's consumers say nothing", error=str(error))
            else:
                looked_at = loop.time()
                self._turn(policy, pipelines, queued)
            await asyncio.sleep(PERIOD_S)

    def _turn(self, policy: Policy, pipelines: Pipelines, queued: Queued) -> None:
        now = asyncio.get_running_loop().time()
        self._counted(now, pipelines.count)
        if pipelines.count != policy.pipelines:
            policy.put(now, pipelines.count)
        signals = self.demand.signals(now, queued, self.starts.since(now), self.starts.start_s)
        self.starts.saw(now, self.demand.arrived)
        there = self._all_there(signals, pipelines.count) or not signals.unfinished
        decision = policy.decide(signals, may_fall=there and pipelines.settled and not self.starts.coming)
        self.signals, self.decision = signals, decision
        change = decision.pipelines - pipelines.count
        if change > 0:
            pipelines.grow(change)
        for _ in range(-change):
            pipelines.shrink()
        if pipelines.count != self._count:
            self._say(_reason(self._count, pipelines.count, signals, decision))
        self._counted(now, pipelines.count)

    def _all_there(self, signals: Signals, count: int) -> bool:
        """One that has been missing for too long never comes, and holds up nobody."""
        if signals.ready >= count:
            self._missing_since = None
            return True
        if self._missing_since is None:
            self._missing_since = signals.now
        return signals.now - self._missing_since > GIVEN_UP_S

    def _counted(self, now: float, count: int) -> None:
        if count > self._count:
            self.starts.asked(now, count - self._count)
        elif count < self._count:
            self.starts.unasked(self._count - count)
        self._count = count

    async def _queued(self) -> Queued:
        """Raises BusError."""
        names = [subjects.consumer_name(self.model, priority) for priority in subjects.PRIORITIES]
        lags = await asyncio.gather(*(self._bus.lag(subjects.REQUESTS, name) for name in names))
        unfinished = sum(lag.waiting + lag.given for lag in lags)
        oldest_s = 0.0
        if unfinished and not self.demand.ready:
            for stored in await self._bus.read(subjects.REQUESTS, subjects.requests(self.model), 1, 1):
                oldest_s = max(0.0, (self._wall_ns() - stored.stored_at_ns) / 1e9)
        return Queued(sum(lag.waiting for lag in lags[:BATCH]), unfinished, oldest_s)


def _reason(before: int, after: int, s: Signals, decision: Decision) -> str:
    return (
        f"pipelines {before} -> {after}: work for {s.demand:.2f} ({s.demand_now:.2f} now), "
        f"{s.backlog_s:.1f} s of it waits, a request {decision.wait_s:.1f} s; {s.unfinished} unfinished, "
        f"{s.ready} take work, one comes in {s.start_s:.1f} s"
    )
