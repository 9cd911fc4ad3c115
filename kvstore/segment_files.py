"""Where segments lie: a folder of one kvstore. Calls block, so they come from one thread of their own."""

import fcntl
import mmap
import os
from pathlib import Path
from typing import Protocol

_SUFFIX = ".segment"


class Files(Protocol):
    """Numbered files that only grow. Everything may raise OSError."""

    def open(self) -> list[int]:
        """The numbers of those that are there, ascending."""

    def whole(self, number: int) -> memoryview:
        """What a file holds now; to be `released`."""

    def write(self, number: int, offset: int, parts: list[bytes]) -> None:
        """What lay there is void. When it fails, some of it may be there."""

    def read(self, number: int, offset: int, length: int) -> bytes:
        """Shorter where the file ends."""

    def remove(self, number: int) -> None: ...

    def close(self) -> None: ...


class FolderFiles:
    """In a folder that is this process's alone while it is open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock: int | None = None
        self._handles: dict[int, int] = {}

    def open(self) -> list[int]:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise
        self._lock = lock
        names = [p.name.removesuffix(_SUFFIX) for p in self._folder.glob(f"*{_SUFFIX}")]
        return sorted(int(name) for name in names if name.isdigit())

    def whole(self, number: int) -> memoryview:
        handle = self._handle(number)
        if not os.fstat(handle).st_size:
            return memoryview(b"")
        return memoryview(mmap.mmap(handle, 0, prot=mmap.PROT_READ))

    def write(self, number: int, offset: int, parts: list[bytes]) -> None:
        handle = self._handle(number)
        for part in parts:
            view = memoryview(part)
            while view:
                count = os.pwrite(handle, view, offset)
                view, offset = view[count:], offset + count

    def read(self, number: int, offset: int, length: int) -> bytes:
        return os.pread(self._handle(number), length, offset)

    def remove(self, number: int) -> None:
        handle = self._handles.pop(number, None)
        if handle is not None:
            os.close(handle)
        self._path(number).unlink(missing_ok=True)

    def close(self) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:012d}{_SUFFIX}"

    def _handle(self, number: int) -> int:
        handle = self._handles.get(number)
        if handle is None:
            handle = os.open(self._path(number), os.O_RDWR | os.O_CREAT, 0o600)
            self._handles[number] = handle
        return handle
