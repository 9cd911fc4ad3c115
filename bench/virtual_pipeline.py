"""The batcher's scheduler as it is over stages that only take time, on a clock of their own.

What a stage takes comes from a real worker's measured steps (`bench/step_costs.py`: SmolLM2 135M, bfloat16,
one thread of an AMD EPYC with AVX-512). Steps queue at stages; links and the batcher take what they take in
the real system; kvstore answers at once. Nothing is drawn by chance, so a run has one outcome.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from batcher import events as ev
from batcher.block_hash import namespace
from batcher.composer import load_of
from batcher.scheduler import Scheduler, SchedulerConfig
from batcher.stage_cost import Load
from batcher.stops import Stops
from chassis.ids import BlockId, Epoch, GatewayId, RequestId
from chassis.messages.pipeline import StageTiming
from chassis.messages.request import Limits, Request, Sampling
from shard_worker.fake_model import EOS_ID, TOKEN_BYTES

OUTPUT_ID = 97
Curve = tuple[tuple[int, float], ...]  # what, milliseconds; straight between the points and beyond the last

# By `python -m bench.step_costs`: of 15 layers, by the tokens of a step, its attention left out ...
LAYERS = 15
TOKENS_MS: Curve = (
    (1, 2.58), (2, 2.94), (4, 3.28), (8, 3.41), (16, 4.10), (32, 7.95), (64, 14.9), (128, 29.3), (256, 57.1),
    (512, 113.5),
)  # fmt: skip
DECODE_POSITION_MS = 0.00039  # a position that a decode attends to
CHUNK_POSITION_MS = 0.0001  # a position that a token of a prompt attends to
# ... and of the head, by the rows that sample.
SAMPLES_MS: Curve = ((1, 1.46), (4, 2.30), (8, 2.34), (16, 2.60), (32, 4.37), (64, 8.17))
SPLITS = {1: (30,), 2: (19, 11), 3: (13, 13, 4), 4: (10, 10, 9, 1)}  # as formation divides the layers


@dataclass(frozen=True, slots=True)
class Costs:
    """Of a pipeline; in milliseconds."""

    layers: tuple[int, ...]
    hop_ms: float = 0.15  # each link, its ends' work included
    batcher_ms: float = 0.2  # a step
    batcher_row_ms: float = 0.004
    base_ms: float = 0.0  # more a step and stage, as a device's launches take
    wobble: float = 0.0  # every other step takes so much more, in parts of one
    beside: float = 0.0  # so much more while another stage is at work, as on one machine

    def stage_s(self, stage: int, load: Load, samples: int, number: int) -> float:
        attended_ms = CHUNK_POSITION_MS * load.attended
        if load.decodes:
            attended_ms += DECODE_POSITION_MS * load.read
        tokens = load.prompt_tokens + load.decodes
        took_ms = (at(TOKENS_MS, tokens) + attended_ms) * self.layers[stage] / LAYERS + self.base_ms
        if stage == len(self.layers) - 1 and samples:
            took_ms += at(SAMPLES_MS, samples)
        return took_ms * (1 + self.wobble * (number * 7 % 5) / 4) / 1e3


def at(curve: Curve, x: float) -> float:
    index = min(max(1, bisect_right(curve, (x, float("inf")))), len(curve) - 1)
    (x0, y0), (x1, y1) = curve[index - 1], curve[index]
    return y0 + (x - x0) * (y1 - y0) / (x1 - x0)


@dataclass(slots=True)
class Seen:
    """Of one request, in seconds."""

    came_s: float
    tokens_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.tokens_s[0] - self.came_s

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.tokens_s, self.tokens_s[1:], strict=False)]


class VirtualPipeline:
    def __init__(self, costs: Costs, num_blocks: int = 1 << 15, **config: Any) -> None:
        self._costs = costs
        self._stages = len(costs.layers)
        self._free_at = [0.0] * self._stages
        self._batcher_free_at = 0.0
        self._back: deque[tuple[float, ev.StepReturned]] = deque()
        self._coming: list[tuple[float, int, Request]] = []
        self._count = 0
        self._blocks = deque(map(BlockId, range(num_blocks)))
        self.now = 0.0
        self.seen: dict[RequestId, Seen] = {}
        self.ended: Callable[[RequestId], None] = lambda request_id: None
        self.steps: list[tuple[Load, float]] = []  # what each computed, and the slowest stage's seconds
        self.in_flight_max = 0
        settings: dict[str, Any] = {"context_len_max": 1 << 14, "sequences_max": 256, **config}
        self.scheduler = Scheduler(
            SchedulerConfig(namespace=namespace("d", "", "paged"), **settings),
            Stops(TOKEN_BYTES, (EOS_ID,)),
        )
        self.scheduler.form(Epoch(1), num_blocks, self._stages, True, 0.0)
        self._settle()

    # ---- requests

    def ask(self, prompt_tokens: int, output_tokens: int, at_s: float | None = None) -> RequestId:
        """A request comes, now or later. No two share a prefix."""
        self._count += 1
        number = self._count
        request = Request(
            id=RequestId(f"r{number}"), tenant="t", gateway=GatewayId("gw"), model="fake",
            prompt_ids=tuple((number * 7919 + i * (i + number)) % 200 for i in range(prompt_tokens)), seed=1,
            sampling=Sampling(1.0), limits=Limits(max_tokens=output_tokens, ignore_eos=True),
        )  # fmt: skip
        heappush(self._coming, (self.now if at_s is None else at_s, number, request))
        return request.id

    # ---- time

    def run(self, until_s: float = float("inf")) -> None:
        """Until then, or until nothing is left to do."""
        while True:
            if not self._coming and not self.scheduler.runnable and not self.scheduler.num_waiting:
                return
            times = [self._back[0][0] if self._back else None, self._coming[0][0] if self._coming else None]
            wake = self.scheduler.wake_at()
            now = max(self.now, min(t for t in [*times, wake] if t is not None))
            if now > until_s:
                self.now = until_s
                return
            self.now = now
            self._turn()

    def _turn(self) -> None:
        """What the batcher's one task does: hear, then plan; it is at one thing at a time."""
        now = self.now = max(self.now, self._batcher_free_at)
        self.scheduler.tick(now)
        while self._coming and self._coming[0][0] <= now:
            came_s, _, request = heappop(self._coming)
            self.seen[request.id] = Seen(came_s)
            self.scheduler.add_waiting(request, now, 0.0, None)
        while self._back and self._back[0][0] <= now:
            assert self.scheduler.returned(self._back.popleft()[1])
            self._settle()
        self._settle()
        left_at = now
        while (plan := self.scheduler.plan(now)) is not None:
            self._settle()
            left_at += (self._costs.batcher_ms + self._costs.batcher_row_ms * len(plan.rows)) / 1e3
            self._send(plan, left_at)
        self._batcher_free_at = left_at
        self.in_flight_max = max(self.in_flight_max, self.scheduler.num_in_flight)

    def _send(self, plan: ev.StepPlan, at_s: float) -> None:
        hop_s = self._costs.hop_ms / 1e3
        # as the composer's record of a row: sequence, incarnation, start, end, samples
        rows = [(None, 0, row.start, row.start + len(row.token_ids), row.samples) for row in plan.rows]
        load = load_of(rows)
        samples = sum(row.samples for row in plan.rows)
        timings, slowest_s = [], 0.0
        for stage in range(self._stages):
            at_s += hop_s
            begun_s = max(at_s, self._free_at[stage])
            took_s = self._costs.stage_s(stage, load, samples, plan.number) if plan.rows else 0.0
            others = [free_s for other, free_s in enumerate(self._free_at) if other != stage]
            if max(others, default=0.0) > begun_s:
                took_s *= 1 + self._costs.beside
            timings.append(StageTiming(stage, _ns(at_s), _ns(begun_s - at_s), _ns(took_s), 0))
            at_s = self._free_at[stage] = begun_s + took_s
            slowest_s = max(slowest_s, took_s)
        if plan.rows:
            self.steps.append((load, slowest_s))
        at_s += hop_s
        ids = (OUTPUT_ID,) * samples
        back = ev.StepReturned(at_s, plan.epoch, plan.number, ids, timings=tuple(timings))
        self._back.append((at_s, back))

    # ---- what the scheduler says

    def _settle(self) -> None:
        while True:
            taken = self.scheduler.take()
            for note in taken.notes:
                match note:
                    case ev.TokensMade():
                        for request_id in note.request_ids:
                            self.seen[request_id].tokens_s.append(note.now)
                    case ev.Ended():
                        self.ended(note.request_id)
            if not taken.effects:
                return
            for effect in taken.effects:
                self.scheduler.handle_blocks(self._call(effect))

    def _call(self, effect: ev.BlockEffect) -> ev.BlockEvent:
        match effect:
            case ev.AttachPool(call=call):
                return ev.PoolAttached(self.now, call, len(self._blocks), 0)
            case ev.MatchBlocks(call=call):
                return ev.BlocksMatched(self.now, call, ((),) * len(effect.request_ids))
            case ev.ExchangeBlocks(call=call):
                self._blocks.extend(effect.releases)
                leased = [self._blocks.popleft() for _ in range(min(effect.lease, len(self._blocks)))]
                return ev.BlocksExchanged(self.now, call, tuple(leased), len(self._blocks), 0)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


@dataclass(frozen=True, slots=True)
class Steady:
    tokens_per_s: float
    pipeline: VirtualPipeline


def steady(
    costs: Costs, sequences: int, prompt_tokens: int, output_tokens: int, rounds: int, **config: Any
) -> Steady:
    """So many clients each ask again when they are answered. The first round is not counted; clients begin
    apart, so that prompts come all the time."""
    pipeline = VirtualPipeline(costs, **{"sequences_max": sequences, **config})
    left = [sequences * rounds]

    def again(request_id: RequestId) -> None:
        if left[0] > 0:
            left[0] -= 1
            pipeline.ask(prompt_tokens, output_tokens)

    pipeline.ended = again
    for i in range(sequences):
        pipeline.ask(prompt_tokens, 1 + output_tokens * (i + 1) // sequences)
    while left[0] > sequences * (rounds - 1):
        pipeline.run(pipeline.now + 0.05)
    begun_s, before = pipeline.now, _tokens(pipeline)
    while left[0] > 0:
        pipeline.run(pipeline.now + 0.05)
    return Steady((_tokens(pipeline) - before) / (pipeline.now - begun_s), pipeline)


def _tokens(pipeline: VirtualPipeline) -> int:
    return sum(len(seen.tokens_s) for seen in pipeline.seen.values())
