"""What the launcher asks before it says that a deployment stands."""

from chassis import subjects
from chassis.ids import BootId, Epoch
from chassis.memory_broker import MemoryBroker
from chassis.memory_bus import MemoryBus
from chassis.messages.registry import BatcherEntry, build_batcher
from shoal.readiness import standing
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
