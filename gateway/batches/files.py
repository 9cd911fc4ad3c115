"""Files of callers, kept in the bus in pieces of one size.

What a file is is written last: a file is there as a whole or not at all. Whoever knows its place can read it,
also when its time is over: it is forgotten `LINGER_S` later, when no batch can need it any more.
"""

from collections.abc import AsyncIterator
from dataclasses import replace

from chassis import batch_subjects, log
from chassis.batch_layout import FILE_AGE_MAX_S, FILES
from chassis.bus import Bus
from chassis.errors import BusError, Code, Status, StreamFull, SubjectTaken, WrongSequence
from chassis.messages import BadMessage
from chassis.messages.batches import StoredFile, build_file, parse_file

PIECE_BYTES = 512 * 1024
LINGER_S = 25 * 3600
TENANT_FILES_MAX = 5000
TENANT_BYTES_MAX = 2 << 30
CALL_TIMEOUT_S = 5.0
RETRY_MS = 1000


class Files:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def all(self, tenant: str, now: int) -> list[StoredFile]:
        """Those whose time is not over, oldest first. Raises BusError."""
        found = []
        async for stored in self._bus.scan(FILES, batch_subjects.files(tenant)):
            try:
                file = parse_file(stored.data)
            except BadMessage as error:
                log.warning("not a file", subject=stored.subject, error=str(error))
                continue
            if file.expires_at > now:
                found.append(file)
            elif file.expires_at + LINGER_S <= now:
                await self.delete(file)
        return found

    async def find(self, tenant: str, file_id: str) -> StoredFile | None:
        """Also one whose time is over. Raises BusError."""
        if not batch_subjects.is_id(file_id):
            return None
        stored = await self._bus.last(FILES, batch_subjects.file(tenant, file_id))
        return None if stored is None else parse_file(stored.data)

    async def check_room(self, tenant: str, now: int, bytes_more: int) -> None:
        """Raises Status, BusError."""
        held = await self.all(tenant, now)
        held_bytes = sum(file.bytes for file in held)
        if len(held) >= TENANT_FILES_MAX:
            raise Status(
                Code.RESOURCE_EXHAUSTED, f"files: {len(held)} are stored; at most {TENANT_FILES_MAX}"
            )
        if held_bytes + bytes_more > TENANT_BYTES_MAX:
            message = f"files: {held_bytes} bytes are stored, {bytes_more} more; at most {TENANT_BYTES_MAX}"
            raise Status(Code.RESOURCE_EXHAUSTED, message)

    async def delete(self, file: StoredFile) -> None:
        """Raises BusError."""
        await self._bus.purge(FILES, batch_subjects.file(file.tenant, file.id))
        await self._bus.purge(FILES, batch_subjects.pieces(file.place))

    async def pieces(self, file: StoredFile) -> AsyncIterator[tuple[int, bytes]]:
        """(sequence, data) of each. Raises BusError, also when one is missing."""
        seq = 1
        subject = batch_subjects.pieces(file.place)
        for _ in range(file.pieces):
            found = await self._bus.read(FILES, subject, seq, 1)
            if not found:
                raise MissingPiece(f"{file.id}: a piece is gone")
            yield found[0].seq, found[0].data
            seq = found[0].seq + 1

    async def piece(self, file: StoredFile, seq: int) -> bytes:
        """Raises BusError."""
        found = await self._bus.read(FILES, batch_subjects.pieces(file.place), seq, 1)
        if not found or found[0].seq != seq:
            raise MissingPiece(f"{file.id}: a piece is gone")
        return found[0].data


class MissingPiece(BusError):
    """It was deleted meanwhile."""


class FileWriter:
    """Writes a file piece by piece; it is there once `finish` returns, and nothing of it after `abandon`."""

    def __init__(self, bus: Bus, place: str) -> None:
        self.bytes = 0
        self._bus = bus
        self._place = place
        self._pieces = 0
        self._named = False  # the file may be there
        self._held = bytearray()

    async def write(self, data: bytes) -> None:
        """Raises BusError."""
        self._held += data
        self.bytes += len(data)
        while len(self._held) >= PIECE_BYTES:
            await self._store(bytes(self._held[:PIECE_BYTES]))
            del self._held[:PIECE_BYTES]

    async def finish(self, file: StoredFile) -> None:
        """If there is one of its id, that one stands, and what was written now goes. Raises BusError."""
        if self._held:
            await self._store(bytes(self._held))
            self._held.clear()
        made = replace(file, place=self._place, pieces=self._pieces, bytes=self.bytes)
        subject = batch_subjects.file(file.tenant, file.id)
        self._named = True
        try:
            await self._bus.append(subject, build_file(made), expected_seq=0, timeout_s=CALL_TIMEOUT_S)
        except (WrongSequence, SubjectTaken):
            stored = await self._bus.last(FILES, subject)
            if stored is None or parse_file(stored.data).place != self._place:
                self._named = False
                await self.abandon()

    async def abandon(self) -> None:
        """Never raises BusError: what is left goes by its age."""
        if self._named:
            return
        try:
            await self._bus.purge(FILES, batch_subjects.pieces(self._place))
        except BusError as error:
            log.warning("pieces are left", place=self._place, error=str(error))

    async def _store(self, piece: bytes) -> None:
        # the order of pieces is that of their storing: one of unknown fate spoils the file
        await self._bus.append(batch_subjects.pieces(self._place), piece, timeout_s=CALL_TIMEOUT_S)
        self._pieces += 1


def in_status(error: BusError) -> Status:
    """What a caller is told."""
    if isinstance(error, StreamFull):
        return Status(Code.RESOURCE_EXHAUSTED, "files: the storage of this deployment is full")
    if isinstance(error, MissingPiece):
        return Status(Code.NOT_FOUND, "file: it was deleted")
    return Status(Code.UNAVAILABLE, "gateway: storage does not answer", RETRY_MS)


__all__ = ["FILE_AGE_MAX_S", "FileWriter", "Files", "MissingPiece", "in_status"]
