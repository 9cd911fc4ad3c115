"""Pure. Counts what the batcher's pipeline did, with the names and the meaning of Triton's statistics.

A sequence's row in a step is an inference and the step an execution, so that inferences over executions is
the mean batch size. What a step took is its stages' own account; the rest of its way round the ring, which
the batcher saw, is output.
"""

from collections import Counter
from collections.abc import Sequence

from batcher.stage_use import StageUse
from chassis.ids import BootId
from chassis.messages.pipeline import StageTiming
from chassis.messages.request import Reason, Terminal
from chassis.messages.statistics import Computed, Duration, ModelStatistics, StageTimes
from chassis.metrics import DURATION_S, FIRST_TOKEN_S, TOKEN_GAP_S, Histogram

SENT_MAX = 1024  # steps that were sent and never came back


class Statistics:
    def __init__(self) -> None:
        self._sent: dict[tuple[int, int], tuple[int, int]] = {}  # epoch, number -> rows, when
        self._last_ns = 0
        self._inferences = 0
        self._executions = 0
        self._computed = Computed()
        self._batches: dict[int, Computed] = {}
        self._success = self._fail = self._queue = Duration()
        self._ends: Counter[str] = Counter()
        self._input_tokens = self._cached_tokens = self._output_tokens = 0
        self.recomputed_tokens = 0
        self.queue_s, self.total_s = Histogram(DURATION_S), Histogram(DURATION_S)
        self.first_token_s, self.token_gap_s = Histogram(FIRST_TOKEN_S), Histogram(TOKEN_GAP_S)

    def sent(self, epoch: int, number: int, num_rows: int, now_ns: int) -> None:
        if num_rows:
            self._sent[epoch, number] = num_rows, now_ns
            if len(self._sent) > SENT_MAX:
                del self._sent[next(iter(self._sent))]

    def returned(self, epoch: int, number: int, timings: Sequence[StageTiming], now_ns: int) -> None:
        rows, sent_ns = self._sent.pop((epoch, number), (0, 0))
        if not rows:
            return
        input_ns = sum(timing.wait_ns for timing in timings)
        infer_ns = sum(timing.compute_ns for timing in timings)
        output_ns = max(0, now_ns - sent_ns - input_ns - infer_ns)
        self._inferences += rows
        self._executions += 1
        self._last_ns = now_ns
        each = (input_ns, infer_ns, output_ns)
        once = Computed(*(Duration(1, ns) for ns in each))
        self._batches[rows] = self._batches.get(rows, Computed()).plus(once)
        self._computed = self._computed.plus(Computed(*(Duration(rows, rows * ns) for ns in each)))

    def ended(self, record: Terminal) -> None:
        """Its receipt was written here."""
        t, usage = record.timings, record.usage
        queue_us = t.queued_us + t.waiting_us
        total_us = t.total_us
        once = Duration(1, 1000 * total_us)
        if record.reason in (Reason.STOP, Reason.LENGTH):
            self._success = self._success.plus(once)
        else:
            self._fail = self._fail.plus(once)
        if t.prefill_us or t.decode_us:
            self._queue = self._queue.plus(Duration(1, 1000 * queue_us))
        self._ends[record.reason.value] += 1
        self._input_tokens += usage.prompt_tokens
        self._cached_tokens += usage.cached_tokens
        self._output_tokens += usage.output_tokens
        self.recomputed_tokens += t.recomputed_tokens
        self.queue_s.observe(queue_us / 1e6)
        self.total_s.observe(total_us / 1e6)
        if usage.output_tokens:
            self.first_token_s.observe((total_us - t.decode_us) / 1e6)

    def tell(self, boot: BootId, model: str, use: StageUse) -> ModelStatistics:
        """`use`: what its stages did with the time."""
        return ModelStatistics(
            boot=boot,
            model=model,
            last_inference_ms=self._last_ns // 1_000_000,
            inference_count=self._inferences,
            execution_count=self._executions,
            success=self._success,
            fail=self._fail,
            queue=self._queue,
            computed=self._computed,
            batch_stats=dict(sorted(self._batches.items())),
            ends=dict(sorted(self._ends.items())),
            input_tokens=self._input_tokens,
            cached_tokens=self._cached_tokens,
            output_tokens=self._output_tokens,
            stages=tuple(StageTimes(*map(_ns, (u.busy_s, u.queued_s, u.idle_s))) for u in use.stages),
            active_ns=_ns(use.active_s),
        )


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)
