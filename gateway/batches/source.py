"""An input file that was looked at, whose lines are read again when they are wanted."""

from chassis.messages.batches import StoredFile
from gateway.batches.files import PIECE_BYTES, Files
from gateway.batches.lines import Looked

PIECES_HELD = 4


class Source:
    def __init__(self, files: Files, file: StoredFile, looked: Looked, seqs: list[int]) -> None:
        """`seqs`: of its pieces, each of which but the last has PIECE_BYTES."""
        self.looked = looked
        self._files = files
        self._file = file
        self._seqs = seqs
        self._held: dict[int, bytes] = {}

    async def line(self, index: int) -> bytes:
        """Raises BusError."""
        offset, length = self.looked.places[index]
        first, last = offset // PIECE_BYTES, (offset + length - 1) // PIECE_BYTES
        whole = b"".join([await self._piece(number) for number in range(first, last + 1)])
        start = offset - first * PIECE_BYTES
        return whole[start : start + length].strip()

    async def _piece(self, number: int) -> bytes:
        held = self._held.get(number)
        if held is None:
            held = await self._files.piece(self._file, self._seqs[number])
            self._held[number] = held
            if len(self._held) > PIECES_HELD:
                del self._held[next(iter(self._held))]
        return held
