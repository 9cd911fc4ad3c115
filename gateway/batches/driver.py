"""The shell of one batch: reads its file, publishes its jobs, follows its answers, writes its files.

It may be killed anywhere: whoever is given the batch next begins with what is stored.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from chassis import batch_subjects, log, subjects
from chassis.batch_layout import BATCHES, FILE_AGE_MAX_S
from chassis.bus import Bus, Stored
from chassis.errors import BusError, Status, SubjectTaken, WrongSequence
from chassis.job_subjects import JobName, answer, answers, job
from chassis.messages.batches import (
    OUTPUT_PURPOSE,
    Batch,
    BatchState,
    Problem,
    StoredFile,
    build_batch,
    parse_batch,
)
from chassis.messages.jobs import (
    CANCELLED,
    CONTENT_TYPE,
    JSON_TYPE,
    KEY,
    TIMEOUT_MS,
    Answer,
    Form,
    answer_headers,
    answer_id,
    build_answer,
)
from chassis.messages.request import Reason, Terminal
from chassis.record_log import last_record
from gateway.access.caller import Caller
from gateway.admission import request_id_of
from gateway.batches.answers import index_of, line, seen
from gateway.batches.driving import Driving
from gateway.batches.events import (
    Answered,
    AnswerSeen,
    Close,
    Effect,
    Event,
    Leave,
    Load,
    Loaded,
    Offer,
    Offered,
    Save,
    Seen,
    Tick,
    Write,
    Written,
)
from gateway.batches.files import Files, FileWriter, MissingPiece
from gateway.batches.lines import LINE_BYTES_MAX, Cutter, Looked
from gateway.batches.source import Source
from gateway.front import Front
from gateway.jobs.runner import key_after
from gateway.jobs.verdict import REFUSALS_MAX

POLL_S = 0.25
RECORD_INTERVAL_S = 1.0
READ_LEN = 64  # answers at a time
CALLS_AT_ONCE_MAX = 32
READ_TIMEOUT_S = 2.0
WRITE_RETRY_S = 5.0  # the files are written from the start
WHY = {CANCELLED: "The batch was cancelled before this request was done."}
WHY_EXPIRED = "The batch's time was over before this request was done."


class AnswerGone(BusError):
    """By its age, or by hand."""


class Driver:
    def __init__(
        self,
        batch: Batch,
        boot: str,
        front: Front,
        bus: Bus,
        new_id: Callable[[], str],
        wall_ns: Callable[[], int],
    ) -> None:
        self._batch = batch
        self._front = front
        self._bus = bus
        self._new_id = new_id
        self._wall_ns = wall_ns
        self._files = Files(bus)
        self._core = Driving(boot)
        self._record_seq = 0
        self._record_at = 0.0
        self._answers_seq = 0
        self._source: Source | None = None
        self._calling = asyncio.Semaphore(CALLS_AT_ONCE_MAX)

    @property
    def _now(self) -> int:
        return self._wall_ns() // 1_000_000_000

    async def drive(self) -> bool:
        """To its end, or until somebody else has it. Whether it is over."""
        events: list[Event] = await self._insist_on_record()
        while True:
            while events:
                effects: list[Effect] = []
                for event in events:
                    effects = self._core.handle(event)
                events = []
                for effect in effects:
                    if isinstance(effect, Leave):
                        return effect.over
                    events += await self._perform(effect)
                self._core.check()
            await asyncio.sleep(POLL_S)
            events = await self._look()

    async def _insist_on_record(self) -> list[Event]:
        while True:
            if found := await self._look_at_record(create=True):
                return found
            await asyncio.sleep(POLL_S)

    async def _look(self) -> list[Event]:
        """What is new."""
        events: list[Event] = []
        if asyncio.get_running_loop().time() >= self._record_at + RECORD_INTERVAL_S:
            events += await self._look_at_record()
        if self._source is not None:
            events += await self._look_at_answers()
        return events or [Tick(self._now)]

    async def _look_at_record(self, create: bool = False) -> list[Event]:
        subject = batch_subjects.batch(self._batch.tenant, self._batch.id)
        self._record_at = asyncio.get_running_loop().time()
        try:
            stored = await self._bus.last(BATCHES, subject)
            if stored is None and create:
                await self._bus.append(subject, build_batch(self._batch), expected_seq=0)
                return []
        except BusError as error:
            log.debug("a batch is not read", batch=self._batch.id, error=str(error))
            return []
        if stored is None or stored.seq == self._record_seq:
            return []
        self._record_seq, self._batch = stored.seq, parse_batch(stored.data)
        return [Seen(self._now, self._batch)]

    async def _look_at_answers(self) -> list[Event]:
        found: list[AnswerSeen] = []
        try:
            await self._read_answers(found)
        except BusError as error:  # what was read before it is not read again
            log.debug("answers are not read", batch=self._batch.id, error=str(error))
        return [Answered(self._now, tuple(found))] if found else []

    async def _read_answers(self, found: list[AnswerSeen]) -> None:
        """Raises BusError."""
        async for stored in self._stored_answers(self._answers_seq + 1):
            self._answers_seq = stored.seq
            index = index_of(stored, self._total)
            if index is not None:
                found.append(seen(index, stored))

    async def _stored_answers(self, seq: int) -> AsyncIterator[Stored]:
        subject = answers(self._batch.tenant, self._batch.id)
        while True:
            some: Sequence[Stored] = await self._bus.read(subjects.ANSWERS, subject, seq, READ_LEN)
            for stored in some:
                yield stored
                seq = stored.seq + 1
            if len(some) < READ_LEN:
                return

    @property
    def _total(self) -> int:
        return len(self._source.looked.custom_ids) if self._source is not None else 0

    # ---- effects -----------------------------------------------------------------------------------

    async def _perform(self, effect: Effect) -> list[Event]:
        try:
            match effect:
                case Load():
                    return [await self._load()]
                case Save(batch):
                    return await self._save(batch)
                case Offer():
                    return [await self._offer(effect)]
                case Close():
                    await self._close(effect)
                    return await self._look_at_answers()
                case Write():
                    return [await self._write()]
                case Leave():
                    raise AssertionError("the loop ends with it")
        except AnswerGone:
            raise  # nobody who counted it ends: whoever is next counts what there is
        except BusError as error:
            log.debug("a batch waits", batch=self._batch.id, error=str(error))
            if isinstance(effect, Write):
                await asyncio.sleep(WRITE_RETRY_S)
            return []

    async def _load(self) -> Event:
        batch = self._batch
        file = await self._files.find(batch.tenant, batch.input_file_id)
        if file is None:
            return Loaded(self._now, 0, None, (_gone(batch),))
        looked, cutter, seqs = Looked(batch.endpoint, self._may_use), Cutter(), []
        try:
            async for seq, data in self._files.pieces(file):
                seqs.append(seq)
                for offset, text in cutter.cut(data):
                    looked.take(offset, text)
                if looked.enough or cutter.held_len > 2 * LINE_BYTES_MAX:
                    break
                await asyncio.sleep(0)
        except MissingPiece:
            return Loaded(self._now, 0, None, (_gone(batch),))
        looked.take(*cutter.rest())
        looked.end()
        self._source, self._answers_seq = Source(self._files, file, looked, seqs), 0
        found: list[AnswerSeen] = []
        if not looked.problems:
            await self._read_answers(found)
        return Loaded(self._now, self._total, looked.model, tuple(looked.problems), tuple(found))

    def _may_use(self, model: str) -> bool:
        """Its key's rights are asked once, before it begins: whoever takes it over goes on with it. Whether
        a model is served now is not asked: its jobs wait for that."""
        if self._batch.state is not BatchState.VALIDATING:
            return True
        return self._front.may_use(Caller(self._batch.tenant, self._batch.key), model)

    async def _save(self, batch: Batch) -> list[Event]:
        subject = batch_subjects.batch(batch.tenant, batch.id)
        try:
            stored = await self._bus.append(subject, build_batch(batch), expected_seq=self._record_seq)
        except WrongSequence:
            return await self._look_at_record()
        self._record_seq, self._batch = stored.seq, batch
        return [Seen(self._now, batch)]

    async def _offer(self, effect: Offer) -> Event:
        source, batch = self._source, self._batch
        assert source is not None
        headers = {CONTENT_TYPE: JSON_TYPE, TIMEOUT_MS: str(max(1, effect.timeout_s) * 1000)}
        if batch.key:
            headers[KEY] = batch.key
        offered: list[int] = []

        async def one(index: int, data: bytes) -> None:
            async with self._calling:
                try:
                    subject = job(batch_subjects.job_name(batch.tenant, batch.id, index))
                    await self._bus.append(subject, data, headers=headers)
                except SubjectTaken:
                    pass  # by an earlier driver
                except BusError as error:
                    log.debug("a request waits", batch=batch.id, index=index, error=str(error))
                    return
                offered.append(index)

        lines = [(index, await source.line(index)) for index in effect.indexes]
        async with asyncio.TaskGroup() as group:
            for index, data in lines:
                group.create_task(one(index, data))
        if not offered:
            await asyncio.sleep(POLL_S)  # full, or away
        return Offered(self._now, tuple(sorted(offered)))

    async def _close(self, effect: Close) -> None:
        async with asyncio.TaskGroup() as group:
            for index in effect.indexes:
                group.create_task(self._close_one(index, effect.code, index in effect.running))

    async def _close_one(self, index: int, code: str, may_run: bool) -> None:
        source, batch = self._source, self._batch
        assert source is not None
        name = batch_subjects.job_name(batch.tenant, batch.id, index)
        request_id = request_id_of(batch.tenant, name.client_key)
        why = WHY.get(code, WHY_EXPIRED)
        said = Answer(answer_id(request_id), request_id, 0, error_code=code, error=why)
        data = build_answer(said, Form.JSON, source.looked.custom_ids[index])
        async with self._calling:
            try:
                headers = answer_headers(said, Form.JSON, b"")
                await self._bus.append(answer(name), data, expected_seq=0, headers=headers)
            except (WrongSequence, SubjectTaken):
                return  # it was done
            except BusError as error:
                log.debug("a request is not closed", batch=batch.id, index=index, error=str(error))
                return
            if may_run:
                await self._cancel(name)

    async def _cancel(self, name: JobName) -> None:
        """Of a job's requests the one that may run: all before it were refused by a queue."""
        try:
            for refusals in range(REFUSALS_MAX + 1):
                request_id = request_id_of(name.tenant, key_after(name, refusals))
                record, _ = await last_record(self._bus, request_id, READ_TIMEOUT_S)
                if not isinstance(record, Terminal) or record.reason is not Reason.REFUSED:
                    await self._front.cancel(request_id, name.tenant)
                    return
        except (BusError, Status) as error:  # it had not begun, or nobody can be told: its answer counts not
            log.debug("a request is not cancelled", batch=self._batch.id, error=str(error))

    async def _write(self) -> Event:
        """Raises BusError."""
        source, batch, done = self._source, self._batch, bytearray(self._total)
        assert source is not None
        output, errors = FileWriter(self._bus, self._new_id()), FileWriter(self._bus, self._new_id())
        try:
            async for stored in self._stored_answers(1):
                index = index_of(stored, self._total)
                if index is None or done[index]:
                    continue
                done[index] = 1
                told = line(index, source.looked.custom_ids[index], stored)
                await (output if told.seen.ok else errors).write(told.data)
            if not all(done):
                raise AnswerGone(f"{batch.id}: an answer is gone")
            ids = [await self._finish(output, "output"), await self._finish(errors, "error")]
        except BaseException:
            await output.abandon()
            await errors.abandon()
            raise
        return Written(self._now, ids[0], ids[1])

    async def _finish(self, writer: FileWriter, kind: str) -> str | None:
        """Its id, the same whoever writes it; None for an empty one."""
        if not writer.bytes:
            return None
        batch, now = self._batch, self._now
        file_id = f"file-{batch.id.removeprefix('batch_')}-{kind}"
        ends_at = now + (batch.output_age_s or FILE_AGE_MAX_S)
        name = f"{batch.id}_{kind}.jsonl"
        await writer.finish(StoredFile(file_id, batch.tenant, "", 0, 0, now, ends_at, name, OUTPUT_PURPOSE))
        return file_id


def _gone(batch: Batch) -> Problem:
    return Problem("input_file_not_found", f"{batch.input_file_id}: it was deleted", None, "input_file_id")
