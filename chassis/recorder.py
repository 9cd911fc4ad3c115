"""Records frames to a file and reads them back: what was sent on the ring, for replay and measurement.

Format: each frame is a little-endian u32 length and its bytes. A torn last frame (a killed writer) ends
the reading. A recording is bounded; beyond the bound nothing more is written.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_LENGTH = struct.Struct("<I")
FRAME_BYTES_MAX = 64 << 20


class Recorder:
    def __init__(self, path: Path, bytes_max: int = 1 << 30) -> None:
        self._file: BinaryIO = path.open("wb")
        self._left = bytes_max

    def write(self, frame: bytes) -> None:
        self._left -= _LENGTH.size + len(frame)
        if self._left >= 0:
            self._file.write(_LENGTH.pack(len(frame)))
            self._file.write(frame)

    def close(self) -> None:
        self._file.close()


def read_frames(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
            (length,) = _LENGTH.unpack(head)
            if length > FRAME_BYTES_MAX:
                raise ValueError(f"{path}: a frame of {length} bytes is no frame")
            frame = file.read(length)
            if len(frame) < length:
                return
            yield frame
