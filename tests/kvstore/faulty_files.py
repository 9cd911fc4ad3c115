"""Segments in memory that outlive their kvstore, and disks that tear, flip and fill up."""

import errno


class MemoryFiles:
    """A `kvstore.segment_files.Files`. `room`: bytes it takes in all; `fails`: so many calls raise."""

    def __init__(self) -> None:
        self.files: dict[int, bytearray] = {}
        self.room: int | None = None
        self.fails = 0

    def open(self) -> list[int]:
        self._maybe_fail()
        return sorted(self.files)

    def whole(self, number: int) -> memoryview:
        return memoryview(bytes(self.files[number]))

    def write(self, number: int, offset: int, parts: list[bytes]) -> None:
        self._maybe_fail()
        data = b"".join(parts)
        if self.room is not None:
            left = max(0, self.room - sum(len(f) for n, f in self.files.items() if n != number) - offset)
            if left < len(data):
                self._put(number, offset, data[:left])
                raise OSError(errno.ENOSPC, "no space left")
        self._put(number, offset, data)

    def _put(self, number: int, offset: int, data: bytes) -> None:
        file = self.files.setdefault(number, bytearray())
        file += bytes(max(0, offset - len(file)))  # where it was torn meanwhile
        file[offset : offset + len(data)] = data

    def read(self, number: int, offset: int, length: int) -> bytes:
        self._maybe_fail()
        if number not in self.files:
            raise OSError(errno.ENOENT, "gone")
        return bytes(self.files[number][offset : offset + length])

    def remove(self, number: int) -> None:
        self.files.pop(number, None)

    def close(self) -> None:
        return None

    def _maybe_fail(self) -> None:
        if self.fails:
            self.fails -= 1
            raise OSError(errno.EIO, "input/output error")

    def tear(self, number: int, length: int) -> None:
        del self.files[number][length:]

    def flip(self, number: int, bit: int) -> None:
        self.files[number][bit // 8] ^= 1 << bit % 8
