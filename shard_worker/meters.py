"""What a worker tells scrapers: its own counts, named when they are asked for."""

from collections.abc import Iterator

from chassis.metrics import Family, counter, gauge
from shard_worker.service import ShardWorker
from shard_worker.stage import Phase


class ObservedWorker(ShardWorker):
    @property
    def ready(self) -> bool:
        """It listens; a batcher may have it, or has it."""
        return bool(self._rpc_address) and not self._drained.is_set()

    def metrics(self) -> Iterator[Family]:
        stage, runner = self._stage, self._runner
        yield gauge("shoal_stage_in_use", "A batcher has it").add(stage.phase is not Phase.FREE)
        yield gauge("shoal_stage_epoch", "The newest that it knows").add(stage.last_epoch)
        yield counter("shoal_stage_steps_total", "Steps computed").add(runner.num_steps)
        yield counter("shoal_stage_compute_seconds_total", "Computing them").add(runner.compute_ns / 1e9)
        yield counter("shoal_stage_wait_seconds_total", "They lay here before").add(runner.wait_ns / 1e9)
        yield counter("shoal_stage_dropped_steps_total", "Of an epoch that ended").add(runner.dropped)
        yield counter("shoal_stage_void_rows_total", "Rows whose blocks held something else").add(
            runner.num_void_rows
        )
        yield counter("shoal_stage_events_total", "What is rare, by kind").each(self.counts, "event")
