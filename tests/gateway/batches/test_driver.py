"""The shell of a batch over the in-memory bus: storage that fails midway, takeovers, odd answers."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from chassis import batch_subjects, subjects
from chassis.batch_layout import BATCHES, DRIVES
from chassis.bus import Stored
from chassis.errors import BusUnavailable
from chassis.ids import AckToken, Attempt, BootId
from chassis.job_subjects import answer
from chassis.memory_broker import MemoryBroker
from chassis.memory_bus import MemoryBus
from chassis.messages.batches import BATCH_PURPOSE, Batch, BatchState, StoredFile, build_batch, parse_batch
from chassis.messages.gateway import ModelInfo
from chassis.messages.request import Reason, Terminal, build_record
from gateway.access.caller import Caller
from gateway.admission import request_id_of
from gateway.batches import driver as driver_module
from gateway.batches.desk import Desk
from gateway.batches.driver import AnswerGone, Driver
from gateway.batches.files import Files, FileWriter
from gateway.jobs.runner import key_after
from tests.gateway.fake_front import FakeFront
from tests.gateway.rig import run, until

TOTAL = 3 * driver_module.READ_LEN
NOW_S = 1_800_000_000
NEW = Batch("batch_1", "t", "", "/v1/completions", "file-1", NOW_S, NOW_S + 86400)


class FlakyBus(MemoryBus):
    """Fails the reads that the test says."""

    fails: Callable[[str, int], bool] = staticmethod(lambda stream, seq: False)

    async def read(self, stream: str, subject: str, start_seq: int, count_max: int) -> Sequence[Stored]:
        if self.fails(stream, start_seq):
            raise BusUnavailable("away")
        return await super().read(stream, subject, start_seq, count_max)


class World:
    def __init__(self, total: int = TOTAL) -> None:
        self.broker = MemoryBroker()
        self.bus = FlakyBus(self.broker, "gateway")
        self.front = FakeFront()
        self.total = total
        self._ids = 0

    def new_id(self) -> str:
        self._ids += 1
        return f"id{self._ids}"

    def wall_ns(self) -> int:
        return NOW_S * 1_000_000_000

    def driver(self, batch: Batch = NEW, boot: str = "g1") -> Driver:
        return Driver(batch, boot, self.front, self.bus, self.new_id, self.wall_ns)

    async def store(self, batch: Batch = NEW) -> None:
        writer = FileWriter(self.bus, "place")
        for i in range(self.total):
            one = {"custom_id": f"c{i}", "method": "POST", "url": NEW.endpoint, "body": {"model": "m"}}
            await writer.write(json.dumps(one).encode() + b"\n")
        await writer.finish(
            StoredFile("file-1", "t", "", 0, 0, NOW_S, NOW_S + 86400, "a.jsonl", BATCH_PURPOSE)
        )
        await self.bus.append(batch_subjects.batch("t", batch.id), build_batch(batch), expected_seq=0)

    async def answer(self, index: int, body: bytes = b"{}") -> None:
        data = b'{"id":"i","custom_id":"?","response":{"status_code":200,"body":' + body + b'},"error":null}'
        await self.bus.append(answer(batch_subjects.job_name("t", NEW.id, index)), data, expected_seq=0)

    def record(self) -> Batch:
        return parse_batch(list(self.broker.streams[BATCHES].messages())[-1].data)

    async def lines(self, file_id: str | None) -> list[dict[str, object]]:
        files = Files(self.bus)
        file = await files.find("t", file_id or "")
        assert file is not None
        data = b"".join([piece async for _, piece in files.pieces(file)])
        return [json.loads(one) for one in data.splitlines()]


def test_answers_read_before_a_read_that_fails_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "POLL_S", 0.001)

    async def main() -> None:
        world = World()
        await world.store()
        task = asyncio.create_task(world.driver().drive())
        await until(lambda: len(list(world.broker.streams[subjects.JOBS].messages())) == TOTAL)
        failures, there = 0, False

        def fails(stream: str, seq: int) -> bool:
            """All while they come; then those beyond the first page, some times."""
            nonlocal failures
            if stream != subjects.ANSWERS or not there:
                return stream == subjects.ANSWERS
            failures += seq > 1 and failures < 20
            return seq > 1 and failures < 20

        world.bus.fails = fails
        for i in range(TOTAL):
            await world.answer(i)
        there = True
        assert await task
        assert failures == 20
        batch = world.record()
        assert (batch.state, batch.tally.completed) == (BatchState.COMPLETED, TOTAL)
        told = await world.lines(batch.output_file_id)
        assert sorted(str(one["custom_id"]) for one in told) == sorted(f"c{i}" for i in range(TOTAL))

    run(main())


class NothingServed(FakeFront):
    """A gateway that has just started knows no model yet; its keys it knows."""

    def list_models(self, who: Caller | None = None) -> list[ModelInfo]:
        return []

    def may_use(self, who: Caller, model: str) -> bool:
        self.calls.append((who, model))
        return model == "m" and who.key == "good"


def test_a_gateway_that_knows_no_model_yet_drives_what_its_key_may() -> None:
    async def main() -> None:
        world = World(total=2)
        world.front = NothingServed()
        keyed = replace(NEW, key="good")
        await world.store(keyed)
        for i in range(2):
            await world.answer(i)
        assert await world.driver(keyed).drive()
        assert world.record().state is BatchState.COMPLETED

    run(main())


@pytest.mark.parametrize(
    ("state", "end"),
    [(BatchState.VALIDATING, BatchState.FAILED), (BatchState.IN_PROGRESS, BatchState.COMPLETED)],
)
def test_rights_are_asked_before_it_begins_and_not_when_it_is_taken_over(
    state: BatchState, end: BatchState
) -> None:
    async def main() -> None:
        world = World(total=2)
        world.front = NothingServed()
        batch = replace(NEW, key="taken away", state=state, driver="dead")
        await world.store(batch)
        for i in range(2):
            await world.answer(i)
        assert await world.driver(batch).drive()
        assert world.record().state is end

    run(main())


def test_an_answer_nested_too_deep_to_be_written_is_an_error_line() -> None:
    async def main() -> None:
        world = World(total=2)
        await world.store()
        await world.answer(0, b"[" * 500 + b"]" * 500)
        await world.answer(1)
        assert await world.driver().drive()
        batch = world.record()
        assert [one["custom_id"] for one in await world.lines(batch.output_file_id)] == ["c1"]
        (wrong,) = await world.lines(batch.error_file_id)
        assert wrong["custom_id"] == "c0" and "none" in str(wrong["error"])

    run(main())


def test_who_counted_an_answer_that_is_gone_lets_another_count_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "POLL_S", 0.001)

    async def main() -> None:
        world = World(total=2)
        await world.store()
        task = asyncio.create_task(world.driver().drive())
        await world.answer(0)
        await until(lambda: world.record().tally.completed == 1)
        await world.bus.purge(subjects.ANSWERS, answer(batch_subjects.job_name("t", NEW.id, 0)))
        await world.answer(1)
        with pytest.raises(AnswerGone):
            await task
        assert world.record().state is BatchState.FINALIZING
        assert await world.driver(boot="g2").drive()
        batch = world.record()
        assert batch.state is BatchState.COMPLETED
        assert (
            len(await world.lines(batch.output_file_id)) == len(await world.lines(batch.error_file_id)) == 1
        )

    run(main())


def test_who_was_taken_over_does_not_call_the_batch_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A nak, though by an old token, has the broker give it out again: two drivers would take turns."""
    monkeypatch.setattr(driver_module, "RECORD_INTERVAL_S", 0.01)

    class Naks(FlakyBus):
        said = 0

        def nak(self, token: AckToken, delay_s: float = 0.0) -> None:
            Naks.said += 1

    class Wires:
        def __init__(self, world: World) -> None:
            self.bus, self.new_id, self.wall_ns = world.bus, lambda: "g1", world.wall_ns

    async def main() -> None:
        world = World(total=2)
        world.bus = Naks(world.broker, "desk")
        await world.store()
        await world.bus.append(batch_subjects.drive("t", NEW.id), build_batch(NEW))
        desk = Desk(world.front, Wires(world))  # type: ignore[arg-type]
        task = asyncio.create_task(desk.run())
        await until(lambda: world.record().state is BatchState.IN_PROGRESS)
        taken = replace(world.record(), driver="g2")
        stored = list(world.broker.streams[BATCHES].messages())[-1]
        await world.bus.append(batch_subjects.batch("t", NEW.id), build_batch(taken), expected_seq=stored.seq)
        await until(lambda: not desk._drives)
        assert not Naks.said
        assert len(list(world.broker.streams[DRIVES].messages())) == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(main())


def test_full_storage_is_not_written_to_again_at_once() -> None:
    async def main() -> None:
        world = World(total=1)
        await world.store()
        await world.answer(0)
        writes = 0
        append = world.bus.append

        async def full(subject: str, *args: object, **more: object) -> object:
            nonlocal writes
            if subject.startswith("shoal.piece."):
                writes += 1
                raise BusUnavailable("full")
            return await append(subject, *args, **more)  # type: ignore[arg-type]

        world.bus.append = full  # type: ignore[assignment, method-assign]
        task = asyncio.create_task(world.driver().drive())
        await until(lambda: writes)
        await asyncio.sleep(3 * driver_module.POLL_S)
        assert writes == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(main())


def test_a_cancel_meets_the_request_that_may_run_and_not_one_that_a_queue_refused() -> None:
    async def main() -> None:
        world = World(1)
        await world.store()
        driver = world.driver()
        name = batch_subjects.job_name("t", NEW.id, 0)
        refused = Terminal(Attempt(1), BootId("b"), Reason.REFUSED, ())
        for refusals in range(3):
            log = subjects.result(request_id_of("t", key_after(name, refusals)))
            await world.bus.append(log, build_record(refused))
        await driver._cancel(name)
        assert world.front.calls == [(request_id_of("t", f"{name.client_key}~3"), "t")]

    run(main())
