"""What a model has done since its batchers started: `proto/statistics.proto` says what each count means."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from chassis.ids import BootId
from chassis.messages import check, check_id, parse
from chassis.wire import statistics_pb2 as pb

NUMBER_MAX = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Duration:
    count: int = 0
    ns: int = 0

    def plus(self, other: "Duration") -> "Duration":
        return Duration(self.count + other.count, self.ns + other.ns)


class Computed(NamedTuple):
    compute_input: Duration = Duration()
    compute_infer: Duration = Duration()
    compute_output: Duration = Duration()

    def plus(self, other: "Computed") -> "Computed":
        return Computed(*(mine.plus(its) for mine, its in zip(self, other, strict=True)))


class StageTimes(NamedTuple):
    busy_ns: int = 0
    queued_ns: int = 0
    idle_ns: int = 0

    def plus(self, other: "StageTimes") -> "StageTimes":
        return StageTimes(*(mine + its for mine, its in zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True)
class ModelStatistics:
    boot: BootId  # of the batcher; empty: of several
    model: str
    last_inference_ms: int = 0
    inference_count: int = 0
    execution_count: int = 0
    success: Duration = Duration()
    fail: Duration = Duration()
    queue: Duration = Duration()
    computed: Computed = Computed()  # of inferences
    batch_stats: Mapping[int, Computed] = field(default_factory=dict)  # of executions, by batch size
    ends: Mapping[str, int] = field(default_factory=dict)
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    stages: tuple[StageTimes, ...] = ()
    active_ns: int = 0  # steps were in flight

    @property
    def bubble_shares(self) -> list[float]:
        """Of that time: what each stage did not compute."""
        return [
            max(0.0, 1 - stage.busy_ns / self.active_ns) if self.active_ns else 0.0 for stage in self.stages
        ]


def total(several: Iterable[ModelStatistics]) -> dict[str, ModelStatistics]:
    """By model: what its batchers have done together."""
    found: dict[str, ModelStatistics] = {}
    for its in several:
        so_far = found.get(its.model, ModelStatistics(BootId(""), its.model))
        batches = dict(so_far.batch_stats)
        for size, computed in its.batch_stats.items():
            batches[size] = batches.get(size, Computed()).plus(computed)
        found[its.model] = ModelStatistics(
            boot=BootId(""),
            model=its.model,
            last_inference_ms=max(so_far.last_inference_ms, its.last_inference_ms),
            inference_count=so_far.inference_count + its.inference_count,
            execution_count=so_far.execution_count + its.execution_count,
            success=so_far.success.plus(its.success),
            fail=so_far.fail.plus(its.fail),
            queue=so_far.queue.plus(its.queue),
            computed=so_far.computed.plus(its.computed),
            batch_stats=dict(sorted(batches.items())),
            ends=dict(sorted((Counter(so_far.ends) + Counter(its.ends)).items())),
            input_tokens=so_far.input_tokens + its.input_tokens,
            cached_tokens=so_far.cached_tokens + its.cached_tokens,
            output_tokens=so_far.output_tokens + its.output_tokens,
            stages=tuple(
                mine.plus(more)
                for mine, more in zip_longest(so_far.stages, its.stages, fillvalue=StageTimes())
            ),
            active_ns=so_far.active_ns + its.active_ns,
        )
    return found


def build_statistics(s: ModelStatistics) -> bytes:
    return pb.ModelStatistics(
        boot=s.boot,
        model=s.model,
        last_inference_ms=s.last_inference_ms,
        inference_count=s.inference_count,
        execution_count=s.execution_count,
        inference_stats=pb.InferStatistics(
            success=_duration(s.success),
            fail=_duration(s.fail),
            queue=_duration(s.queue),
            compute_input=_duration(s.computed.compute_input),
            compute_infer=_duration(s.computed.compute_infer),
            compute_output=_duration(s.computed.compute_output),
        ),
        batch_stats=[
            pb.BatchStatistics(
                batch_size=size,
                compute_input=_duration(c.compute_input),
                compute_infer=_duration(c.compute_infer),
                compute_output=_duration(c.compute_output),
            )
            for size, c in s.batch_stats.items()
        ],
        ends=s.ends,
        input_tokens=s.input_tokens,
        cached_tokens=s.cached_tokens,
        output_tokens=s.output_tokens,
        stages=[
            pb.StageStatistics(**dict(zip(stage._fields, map(_fitting, stage), strict=True)))
            for stage in s.stages
        ],
        active_ns=_fitting(s.active_ns),
    ).SerializeToString()


def parse_statistics(data: bytes) -> ModelStatistics:
    m = parse(pb.ModelStatistics, data)
    check_id(m.boot, "boot")
    check(bool(m.model), "model: missing")
    sizes = [batch.batch_size for batch in m.batch_stats]
    check(sizes == sorted(dict.fromkeys(sizes)), "batch_stats: not ascending")
    infer = m.inference_stats
    return ModelStatistics(
        boot=BootId(m.boot),
        model=m.model,
        last_inference_ms=m.last_inference_ms,
        inference_count=m.inference_count,
        execution_count=m.execution_count,
        success=_parse_duration(infer.success),
        fail=_parse_duration(infer.fail),
        queue=_parse_duration(infer.queue),
        computed=_parse_computed(infer),
        batch_stats={batch.batch_size: _parse_computed(batch) for batch in m.batch_stats},
        ends=dict(sorted(m.ends.items())),
        input_tokens=m.input_tokens,
        cached_tokens=m.cached_tokens,
        output_tokens=m.output_tokens,
        stages=tuple(StageTimes(stage.busy_ns, stage.queued_ns, stage.idle_ns) for stage in m.stages),
        active_ns=m.active_ns,
    )


def _fitting(number: int) -> int:
    """Sums over rows and stages outgrow the field within a year of full load; then they stand still."""
    return min(number, NUMBER_MAX)


def _duration(d: Duration) -> pb.Duration:
    return pb.Duration(count=d.count, ns=_fitting(d.ns))


def _parse_duration(m: pb.Duration) -> Duration:
    return Duration(m.count, m.ns)


def _parse_computed(m: pb.InferStatistics | pb.BatchStatistics) -> Computed:
    return Computed(
        _parse_duration(m.compute_input), _parse_duration(m.compute_infer), _parse_duration(m.compute_output)
    )
