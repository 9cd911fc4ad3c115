"""What the C library does with memory that a process no longer uses; elsewhere than on glibc nothing.

A process of several threads has a heap for each, and keeps what it once had. One that shall stay small shares
two heaps between them, and gives back what it needed only to start.
"""

import ctypes

_ARENA_MAX = -8  # M_ARENA_MAX of malloc.h
HEAPS_MAX = 2


def share_heaps() -> None:
    """Before threads are started."""
    if (mallopt := _of_libc("mallopt")) is not None:
        mallopt(_ARENA_MAX, HEAPS_MAX)


def give_back() -> None:
    """Takes some milliseconds."""
    if (trim := _of_libc("malloc_trim")) is not None:
        trim(0)


def _of_libc(name: str) -> "ctypes._NamedFuncPointer | None":
    return getattr(ctypes.CDLL(None), name, None)
