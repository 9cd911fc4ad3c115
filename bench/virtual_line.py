"""A scheduler over kvstore's ledger and one stage whose steps take what a formula says, on a virtual clock.

The batcher's and kvstore's cores as they are, no process, no tensor. The formula is of SmolLM2-135M in
bfloat16 on one thread of the machine that measured the row `quality`: 138 tokens/s alone, 1,288 of 16
together; a prompt's token costs what a row does, as they are products with the same weights.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from batcher import events as ev
from batcher.block_hash import namespace
from batcher.queueing import Queueing
from batcher.scheduler import Scheduler, SchedulerConfig
from batcher.stops import Stops
from chassis.ids import Epoch, GatewayId, RequestId
from chassis.messages.kvstore import Attach, Commit, Exchange, PoolRef
from chassis.messages.request import Limits, Reason, Request, Sampling
from kvstore.ledger import Ledger
from shard_worker.fake_model import EOS_ID, TOKEN_BYTES

BASE_S = 6.9e-3
ROW_S = 0.35e-3
HOP_S = 0.2e-3  # from the stage to the batcher
OUTPUT_ID = 97
BLOCK = 16


def step_s(num_tokens: int) -> float:
    return BASE_S + ROW_S * num_tokens


@dataclass(slots=True)
class Asked:
    """A request that comes at `at`."""

    at: float
    prompt_len: int
    output_len: int
    priority: int = 5
    tenant: str = "t"
    timeout_s: float | None = None


@dataclass(slots=True)
class Served:
    asked: Asked
    arrivals: list[float] = field(default_factory=list)  # of its tokens
    reason: Reason | None = None
    ended_at: float = 0.0
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0] - self.asked.at

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


class VirtualLine:
    def __init__(
        self,
        queueing: Queueing,
        sequences_max: int = 64,
        num_blocks: int = 8192,
        waiting_len_max: int = 1024,
        run_ahead: bool = True,
    ) -> None:
        self._ref = PoolRef("g", Epoch(1), 1)
        self._num_blocks = num_blocks
        self.ledger = Ledger(blocks_max=num_blocks)
        self.scheduler = Scheduler(
            SchedulerConfig(
                context_len_max=4096,
                namespace=namespace("d", "", "paged"),
                block_size_tokens=BLOCK,
                sequences_max=sequences_max,
                waiting_len_max=waiting_len_max,
                run_ahead=run_ahead,
                queueing=queueing,
            ),
            Stops(TOKEN_BYTES, (EOS_ID,)),
        )
        self.now = 0.0
        self.served: dict[RequestId, Served] = {}
        self.ring: deque[tuple[float, ev.StepPlan]] = deque()  # when it is back
        self.busy_s = 0.0
        self._busy_until = 0.0
        self.scheduler.form(Epoch(1), num_blocks, 1, True, 0.0)
        self.settle()

    def bring(self, asked: Asked) -> None:
        name = RequestId(f"r{len(self.served)}")
        self.served[name] = Served(asked)
        word = random.Random(len(self.served)).getrandbits(62).to_bytes(8)  # prompts share nothing
        request = Request(
            id=name, tenant=asked.tenant, gateway=GatewayId("gw"), model="fake",
            prompt_ids=tuple(word[i % 8] for i in range(asked.prompt_len)), seed=1,
            sampling=Sampling(1.0), limits=Limits(asked.output_len, ignore_eos=True), priority=asked.priority,
        )  # fmt: skip
        deadline = None if asked.timeout_s is None else asked.at + asked.timeout_s
        self.scheduler.add_waiting(request, self.now, self.now - asked.at, deadline)
        self.settle()

    def plan(self) -> bool:
        plan = self.scheduler.plan(self.now)
        self.settle()
        if plan is None:
            return False
        took = step_s(sum(len(row.token_ids) for row in plan.rows)) if plan.rows else HOP_S
        self._busy_until = max(self.now, self._busy_until) + took
        self.busy_s += took
        self.ring.append((self._busy_until + HOP_S, plan))
        return True

    def come_back(self) -> None:
        """The oldest step."""
        at, plan = self.ring.popleft()
        self.now = max(self.now, at)
        sampled = (OUTPUT_ID,) * sum(row.samples for row in plan.rows)
        self.scheduler.returned(ev.StepReturned(self.now, plan.epoch, plan.number, sampled))
        self.settle()

    def run(self, coming: Sequence[Asked], until: float) -> None:
        """`coming`: in any order; what comes after `until` does not."""
        heap: list[tuple[float, int, Asked]] = []
        for number, asked in enumerate(coming):
            heappush(heap, (asked.at, number, asked))
        while True:
            while heap and heap[0][0] <= self.now:
                self.bring(heappop(heap)[2])
            self.scheduler.tick(self.now)
            self.settle()
            while self.plan():
                pass
            times = [self.ring[0][0]] if self.ring else []
            times += [heap[0][0]] if heap else []
            wake_at = self.scheduler.wake_at()
            times += [max(wake_at, self.now + 1e-6)] if wake_at is not None else []
            if not times or min(times) > until:
                return
            self.now = max(self.now, min(times))
            while self.ring and self.ring[0][0] <= self.now:
                self.come_back()

    def settle(self) -> None:
        while True:
            taken = self.scheduler.take()
            for note in taken.notes:
                match note:
                    case ev.TokensMade():
                        for name in note.request_ids:
                            self.served[name].arrivals.append(note.now)
                    case ev.Ended():
                        served = self.served[note.request_id]
                        served.reason, served.ended_at, served.error = note.reason, note.now, note.error
            if not taken.effects:
                return
            for effect in taken.effects:
                self.scheduler.handle_blocks(self._call(effect))

    def _call(self, effect: ev.BlockEffect) -> ev.BlockEvent:
        match effect:
            case ev.AttachPool(call=call):
                attached = self.ledger.attach(Attach(self._ref, ("w",), self._num_blocks, BLOCK, "n"))
                return ev.PoolAttached(self.now, call, attached.free, attached.cached)
            case ev.MatchBlocks(call=call, chains=chains):
                return ev.BlocksMatched(self.now, call, self.ledger.match(self._ref, chains))
            case ev.ExchangeBlocks(call=call):
                commits = tuple(Commit(*commit) for commit in effect.commits)
                exchange = Exchange(self._ref, commits, effect.releases, effect.lease, effect.keeps)
                done = self.ledger.exchange(exchange)
                return ev.BlocksExchanged(self.now, call, done.leased, done.free, done.cached)
