"""The endpoints of files and batches. A caller sees what is its tenant's; nothing else exists for it."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from chassis import batch_subjects, log
from chassis.batch_layout import BATCHES, FILE_AGE_MAX_S, NEW_BATCHES_BYTES_MAX
from chassis.bus import Stored
from chassis.errors import BusError, Code, Status, StreamFull, SubjectTaken, WrongSequence
from chassis.messages import BadMessage
from chassis.messages.batches import BATCH_PURPOSE, Batch, BatchState, StoredFile, build_batch, parse_batch
from chassis.ports import Ports
from gateway.access.caller import Caller
from gateway.batches.asked import BatchesQuery, BatchRequest, FilesQuery, asked, cut
from gateway.batches.files import PIECE_BYTES, RETRY_MS, Files, FileWriter, in_status
from gateway.batches.told import batch_told, file_told, page_told
from gateway.batches.upload import UPLOADS_AT_ONCE_MAX, uploaded
from gateway.config import Config
from gateway.front import Front
from gateway.http_body import parse_object, read_body
from gateway.openai.errors import BadField
from gateway.openai.routes import caller_at, check_json, json_response, refusal

BODY_BYTES_MAX = 64 * 1024
WINDOW_S = 24 * 3600
TRIES_MAX = 8  # at a record that others write too

Answer = Callable[[Request, Caller], Awaitable[Response]]


def routes(front: Front, config: Config, ports: Ports) -> list[BaseRoute]:
    files, batches = FileDoor(config, ports), BatchDoor(config, ports)

    def at(path: str, **answers: Answer) -> Route:
        """By method; of one route, so that `Allow` names all of them."""

        async def endpoint(request: Request) -> Response:
            answer = answers["GET" if request.method == "HEAD" else request.method]
            try:
                return await answer(request, caller_at(front, request))
            except Status as status:
                return refusal(status)
            except BusError as error:
                log.debug("storage failed", error=str(error))
                return refusal(in_status(error))
            except ClientDisconnect:
                return Response(status_code=400)  # to nobody

        return Route(path, endpoint, methods=list(answers))

    return [
        at("/v1/files", POST=files.create, GET=files.all),
        at("/v1/files/{id}", GET=files.one, DELETE=files.delete),
        at("/v1/files/{id}/content", GET=files.content),
        at("/v1/batches", POST=batches.create, GET=batches.all),
        at("/v1/batches/{id}", GET=batches.one),
        at("/v1/batches/{id}/cancel", POST=batches.cancel),
    ]


class FileDoor:
    def __init__(self, config: Config, ports: Ports) -> None:
        self._files = Files(ports.bus)
        self._ports = ports
        self._silence_s = config.http_body_timeout_s
        self._uploads = 0

    async def create(self, request: Request, who: Caller) -> Response:
        if self._uploads >= UPLOADS_AT_ONCE_MAX:
            raise Status(Code.UNAVAILABLE, f"files: {self._uploads} are being uploaded", RETRY_MS)
        self._uploads += 1
        try:
            return await self._create(request, who)
        finally:
            self._uploads -= 1

    async def _create(self, request: Request, who: Caller) -> Response:
        ports, now = self._ports, _now(self._ports)
        async with uploaded(request, self._silence_s) as upload:
            await self._files.check_room(who.tenant, now, upload.bytes)
            ends_at = now + (upload.age_s or FILE_AGE_MAX_S)
            place, file_id = ports.new_id(), f"file-{ports.new_id()}"
            file = StoredFile(
                file_id, who.tenant, place, 0, upload.bytes, now, ends_at, upload.filename, BATCH_PURPOSE
            )
            writer = FileWriter(ports.bus, place)
            try:
                while piece := await upload.file.read(PIECE_BYTES):
                    await writer.write(piece)
                await writer.finish(file)
            except BaseException:
                await writer.abandon()
                raise
        return json_response(200, file_told(file))

    async def all(self, request: Request, who: Caller) -> Response:
        page = asked(FilesQuery, request.query_params)
        found = await self._files.all(who.tenant, _now(self._ports))
        if page.purpose:
            found = [file for file in found if file.purpose == page.purpose]
        found.sort(key=lambda file: (file.created_at, file.id), reverse=page.order == "desc")
        first, end = cut([file.id for file in found], page)
        return json_response(200, page_told([file_told(file) for file in found[first:end]], end < len(found)))

    async def one(self, request: Request, who: Caller) -> Response:
        return json_response(200, file_told(await self._find(request, who)))

    async def delete(self, request: Request, who: Caller) -> Response:
        file = await self._find(request, who)
        for batch in await all_batches(self._ports, who.tenant):
            if batch.input_file_id == file.id and not batch.state.over:
                raise Status(Code.ABORTED, f"file: {batch.id} still reads it; cancel it, or wait for its end")
        await self._files.delete(file)
        return json_response(200, {"id": file.id, "object": "file", "deleted": True})

    async def content(self, request: Request, who: Caller) -> Response:
        file = await self._find(request, who)
        pieces = self._files.pieces(file)
        _, first = await anext(aiter(pieces))  # one that is gone has its own status

        async def data() -> AsyncIterator[bytes]:
            yield first
            async for _, piece in pieces:
                yield piece

        length = {"content-length": str(file.bytes)}
        return StreamingResponse(data(), headers=length, media_type="application/jsonl")

    async def _find(self, request: Request, who: Caller) -> StoredFile:
        """Raises Status, BusError."""
        file_id = request.path_params["id"]
        return await find_file(self._files, who, file_id, _now(self._ports))


async def find_file(files: Files, who: Caller, file_id: str, now: int) -> StoredFile:
    """Raises Status, BusError."""
    file = await files.find(who.tenant, file_id)
    if file is None or file.expires_at <= now:
        raise Status(Code.NOT_FOUND, f"file: there is no {file_id[:100]!r}")
    return file


class BatchDoor:
    def __init__(self, config: Config, ports: Ports) -> None:
        self._files = Files(ports.bus)
        self._ports = ports
        self._bus = ports.bus
        self._timeout_s = config.http_body_timeout_s

    async def create(self, request: Request, who: Caller) -> Response:
        check_json(request)
        body = parse_object(await read_body(request, BODY_BYTES_MAX, self._timeout_s))
        wanted, age_s = asked(BatchRequest, body), None
        if wanted.output_expires_after is not None:
            age_s = wanted.output_expires_after.seconds
        now = _now(self._ports)
        try:
            file = await find_file(self._files, who, wanted.input_file_id, now)
        except Status as status:
            raise BadField("input_file_id", status.message) from None
        if file.purpose != BATCH_PURPOSE:
            raise BadField("input_file_id", f"a file of purpose {BATCH_PURPOSE}, not {file.purpose}")
        await self._check_room()
        batch = Batch(
            f"batch_{self._ports.new_id()}",
            who.tenant,
            who.key,
            wanted.endpoint,
            file.id,
            now,
            now + WINDOW_S,
            metadata=wanted.metadata,
            output_age_s=age_s,
        )
        return json_response(200, batch_told(await self._begin(batch)))

    async def _check_room(self) -> None:
        """Of the stream of all batches: a full one would stop those that run. Raises Status, BusError."""
        used = await self._bus.stored_bytes(BATCHES)
        if used >= NEW_BATCHES_BYTES_MAX:
            least = f"new ones are taken below {NEW_BATCHES_BYTES_MAX}"
            raise Status(Code.RESOURCE_EXHAUSTED, f"batches: {BATCHES} holds {used} bytes; {least}")

    async def _begin(self, batch: Batch) -> Batch:
        """It is begun once it is given out to be driven: whoever drives it writes its record too.
        Raises Status, BusError."""
        data = build_batch(batch)
        try:
            await self._bus.append(batch_subjects.drive(batch.tenant, batch.id), data)
        except StreamFull:
            raise Status(Code.RESOURCE_EXHAUSTED, "batches: too many are not over", RETRY_MS) from None
        subject = batch_subjects.batch(batch.tenant, batch.id)
        try:
            await self._bus.append(subject, data, expected_seq=0)
        except (WrongSequence, SubjectTaken):
            pass  # its driver was faster
        except BusError as error:
            log.debug("a batch's record is left to its driver", batch=batch.id, error=str(error))
        return batch

    async def all(self, request: Request, who: Caller) -> Response:
        page = asked(BatchesQuery, request.query_params)
        found = await all_batches(self._ports, who.tenant)
        found.sort(key=lambda batch: (batch.created_at, batch.id), reverse=page.order == "desc")
        first, end = cut([batch.id for batch in found], page)
        told = [batch_told(batch) for batch in found[first:end]]
        return json_response(200, page_told(told, end < len(found)))

    async def one(self, request: Request, who: Caller) -> Response:
        return json_response(200, batch_told((await self._find(request, who))[0]))

    async def cancel(self, request: Request, who: Caller) -> Response:
        for _ in range(TRIES_MAX):
            batch, stored = await self._find(request, who)
            if batch.state is BatchState.CANCELLING:
                return json_response(200, batch_told(batch))
            if batch.state not in (BatchState.VALIDATING, BatchState.IN_PROGRESS):
                raise Status(
                    Code.INVALID_ARGUMENT, f"batch: it is {batch.state.value}, and cannot be cancelled"
                )
            cancelled = replace(batch, state=BatchState.CANCELLING, cancelling_at=_now(self._ports))
            try:
                await self._bus.append(stored.subject, build_batch(cancelled), expected_seq=stored.seq)
                return json_response(200, batch_told(cancelled))
            except WrongSequence:
                continue  # its driver wrote meanwhile
        raise Status(Code.UNAVAILABLE, "batch: it changes all the time", RETRY_MS)

    async def _find(self, request: Request, who: Caller) -> tuple[Batch, Stored]:
        """Raises Status, BusError."""
        batch_id = request.path_params["id"]
        stored = None
        if batch_subjects.is_id(batch_id):
            stored = await self._bus.last(BATCHES, batch_subjects.batch(who.tenant, batch_id))
        if stored is None:
            raise Status(Code.NOT_FOUND, f"batch: there is no {batch_id[:100]!r}")
        return parse_batch(stored.data), stored


async def all_batches(ports: Ports, tenant: str) -> list[Batch]:
    """Raises BusError."""
    found = []
    async for stored in ports.bus.scan(BATCHES, batch_subjects.batches(tenant)):
        try:
            found.append(parse_batch(stored.data))
        except BadMessage as error:
            log.warning("not a batch", subject=stored.subject, error=str(error))
    return found


def _now(ports: Ports) -> int:
    return ports.wall_ns() // 1_000_000_000
