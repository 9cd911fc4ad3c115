"""Where this user's files go: caches, and what is kept. Who has no home folder gets one beside the temporary
files that nobody else can write to.
"""

import functools
import os
import stat
import tempfile
from pathlib import Path

from chassis import log

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_folder() -> Path:
    """Needn't exist. What is lost from it is made again."""
    return _folder("XDG_CACHE_HOME", ".cache")


def data_folder() -> Path:
    """Needn't exist."""
    return _folder("XDG_DATA_HOME", ".local/share")


def _folder(variable: str, in_home: str) -> Path:
    base = os.environ.get(variable)
    return (Path(base) if base else _home() / in_home) / "shoal"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:
        return _instead(Path(tempfile.gettempdir()))


@functools.cache
def _instead(temporary: Path) -> Path:
    """The same at every start, unless somebody else could write there: compiled code is loaded from it."""
    folder = temporary / f"shoal-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
        if not own or found.st_mode & OTHERS_WRITE:
            folder = Path(tempfile.mkdtemp(prefix="shoal-", dir=temporary))
    except OSError as error:
        log.warning("no home folder, and none instead", folder=str(folder), error=str(error))
        return folder
    log.warning("no home folder", instead=str(folder))
    return folder
