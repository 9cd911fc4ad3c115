"""What the launcher asks before it says that a deployment stands."""

from chassis import subjects
from chassis.ids import BootId, Epoch
from chassis.memory_broker import MemoryBroker
from chassis.memory_bus import MemoryBus
from chassis.messages.registry import (
    BatcherEntry,
    ModelEntry,
    WorkerEntry,
    build_batcher,
    build_model,
    build_worker,
)
from shoal.readiness import forget_models, standing
from tests.sim.loop import run


def test_what_others_wrote_beside_batchers_hides_none_of_them() -> None:
    async def main() -> None:
        bus = MemoryBus(MemoryBroker(), "test")
        await bus.ensure_streams()
        for boot, stands in (("a", True), ("b", False)):
            entry = BatcherEntry(BootId(boot), "m", Epoch(1), stands)
            await bus.put_entry(subjects.batcher_key(BootId(boot)), build_batcher(entry))
        for number, garbage in enumerate((b"", b"\xff" * 64, b"{}")):
            await bus.put_entry(f"{subjects.BATCHERS}garbage{number}", garbage)
        assert await standing(bus) == {subjects.batcher_key(BootId("a"))}
        bus.kill()

    run(main())


def test_a_model_without_a_worker_is_forgotten() -> None:
    async def main() -> None:
        bus = MemoryBus(MemoryBroker(), "test")
        await bus.ensure_streams()
        for model in ("now", "before"):
            await bus.put_entry(subjects.model_key(model), build_model(ModelEntry(model, "d", "c")))
        worker = WorkerEntry(BootId("w"), "now", "d", "h:1", "h:2", Epoch(0), True, 4)
        await bus.put_entry(subjects.worker_key(BootId("w")), build_worker(worker))
        await bus.put_entry(f"{subjects.WORKERS}garbage", b"\xff" * 64)
        await forget_models(bus)
        left = {entry.key for entry in await bus.entries(subjects.MODELS) if entry.value is not None}
        assert left == {subjects.model_key("now")}
        bus.kill()

    run(main())
