"""Strangers write into an ownership log: what was said there before still counts."""

from chassis import subjects
from chassis.ids import Attempt, BootId, RequestId
from chassis.memory_broker import MemoryBroker
from chassis.memory_bus import MemoryBus
from chassis.messages.request import Cancel, Claim, build_record
from chassis.record_log import last_record
from tests.sim.loop import run

ID = RequestId("r1")
SUBJECT = subjects.result(ID)
CLAIM = Claim(Attempt(1), BootId("b"))


def test_garbage_says_nothing_but_has_a_sequence() -> None:
    async def main() -> None:
        bus = MemoryBus(MemoryBroker(), "reader")
        await bus.ensure_streams()
        assert await last_record(bus, ID, 1.0) == (None, 0)
        claimed = await bus.append(SUBJECT, build_record(CLAIM), expected_seq=0)
        assert await last_record(bus, ID, 1.0) == (CLAIM, claimed.seq)
        for garbage in (b"", b"\xff\xff", build_record(Claim(Attempt(1), BootId("a b")))):
            spoilt = await bus.append(SUBJECT, garbage)
            assert await last_record(bus, ID, 1.0) == (CLAIM, spoilt.seq)
        after = Claim(Attempt(2), BootId("b"))
        stored = await bus.append(SUBJECT, build_record(after), expected_seq=spoilt.seq)
        assert await last_record(bus, ID, 1.0) == (after, stored.seq)
        bus.kill()

    run(main())


def test_a_log_of_garbage_alone_is_that_of_a_cancelled_request() -> None:
    async def main() -> None:
        bus = MemoryBus(MemoryBroker(), "reader")
        await bus.ensure_streams()
        spoilt = await bus.append(SUBJECT, b"\xff")
        record, seq = await last_record(bus, ID, 1.0)
        assert isinstance(record, Cancel) and (record.attempt, record.boot) == (0, "")
        assert seq == spoilt.seq
        bus.kill()

    run(main())
