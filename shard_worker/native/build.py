"""Builds the compiled code at first use and keeps it: a worker's next start only loads it.

The result is kept in the user's cache folder under a digest of all that decides it: sources, flags, and what
the compiler says of itself and of the processor. Who starts at the same time waits for the one that builds; a
file appears whole or not at all, and what a power cut or a bad disk leaves of one is built anew. Without a
compiler, with SHOAL_NATIVE=0, or when a build fails, there is none, and torch computes instead. A folder that
SHOAL_NATIVE_DIR names has libraries made ahead (`prebuild.py`): then nothing is compiled.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from chassis import log
from chassis.user_folders import cache_folder
from shard_worker.native import levels

SOURCES = Path(__file__).parent
FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fno-math-errno",
    "-ffp-contract=off",  # a sum has the same bits wherever the compiler inlines it
    "-fPIC",
    "-fvisibility=default",
    "-Wno-psabi",
)
LINK_FLAGS = ("-shared", "-pthread", "-Wl,-z,defs")  # what is missing shows now, not at load
COMPILERS = ("g++", "c++", "clang++")
COMPILE_TIMEOUT_S = 300
PROBE_TIMEOUT_S = 20
SEAL_BYTES = 32
KEPT_MAX = 8  # builds in the cache folder; the oldest go


class BuildFailed(Exception):
    """There is no library; the message says why."""


def enabled() -> bool:
    return os.environ.get("SHOAL_NATIVE", "1") != "0"


def library_path(cache_dir: Path | None = None) -> Path | None:
    """The compiled library, built if need be; None if there is none. Logs what it did."""
    if not enabled():
        return None
    if (ready := _made_ahead()) is not None:
        return ready
    try:
        return _built(cache_dir or _user_cache_dir())
    except BuildFailed as error:
        log.warning("no compiled stage", error=str(error))
        return None


def is_built(cache_dir: Path | None = None) -> bool:
    """`library_path` would have nothing to compile."""
    if enabled() and _made_ahead() is not None:
        return True
    try:
        return enabled() and _is_whole(_target(cache_dir or _user_cache_dir(), find_compiler()))
    except BuildFailed:
        return False


def find_compiler() -> str:
    """$CXX, else the first of the usual ones. Raises BuildFailed."""
    named = os.environ.get("CXX")
    for name in (named,) if named else COMPILERS:
        if found := shutil.which(name):
            return found
    raise BuildFailed(f"no C++ compiler: {named or ', '.join(COMPILERS)} not found")


def digest_of(compiler: str, sources: Path) -> str:
    """Of all that decides the library's bytes. The compiler's predefined macros name it and the processor."""
    total = hashlib.sha256("\0".join(FLAGS + LINK_FLAGS).encode())
    total.update(_run([compiler, *FLAGS, "-E", "-dM", "-x", "c++", os.devnull], PROBE_TIMEOUT_S))
    for path in sorted([*sources.glob("*.cpp"), *sources.glob("*.h")]):
        content = path.read_bytes()
        total.update(f"\0{path.name}\0{len(content)}\0".encode())
        total.update(content)
    return total.hexdigest()


def _built(cache_dir: Path) -> Path:
    compiler = find_compiler()
    target = _target(cache_dir, compiler)
    if _is_whole(target):
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _turn(cache_dir / "lock"):
            if not _is_whole(target):
                if target.exists():
                    log.warning("the compiled stage is damaged: it is built anew", library=str(target))
                compile_into(compiler, target, FLAGS, SOURCES)
                _prune(cache_dir, target)
    except OSError as error:
        raise BuildFailed(f"{cache_dir}: {error}") from None
    return target


def _target(cache_dir: Path, compiler: str) -> Path:
    return cache_dir / f"{digest_of(compiler, SOURCES)}.so"


def portable_flags() -> tuple[str, ...]:
    """Without those that fit one processor; levels add their own."""
    return tuple(flag for flag in FLAGS if flag != "-march=native")


def _made_ahead() -> Path | None:
    """The best of SHOAL_NATIVE_DIR that this processor runs and that is whole; None: there is none."""
    folder = os.environ.get("SHOAL_NATIVE_DIR")
    if not folder:
        return None
    machine, has = levels.here()
    found = levels.candidates(Path(folder), SOURCES, portable_flags(), machine, has)
    ready = next((path for path in found if _is_whole(path)), None)
    if ready is None:
        log.warning("nothing made ahead for this processor and these sources", folder=folder)
    return ready


def _user_cache_dir() -> Path:
    return cache_folder() / "native"


def _is_whole(target: Path) -> bool:
    """Whether it ends in the digest of what comes before: a loader that meets holes ends the process."""
    try:
        content = target.read_bytes()
    except OSError:
        return False
    whole, seal = content[:-SEAL_BYTES], content[-SEAL_BYTES:]
    return hashlib.sha256(whole).digest() == seal


def _seal(library: Path) -> None:
    """Loaders don't look at what comes after the last section."""
    with library.open("r+b") as file:
        digest = hashlib.sha256(file.read()).digest()
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _turn(lock: Path) -> Iterator[None]:
    """One builder at a time; the system lets go of a lock whose holder died."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compile_into(compiler: str, target: Path, flags: Sequence[str], sources: Path) -> None:
    """`target` appears whole or not at all. Raises BuildFailed, OSError."""
    started = time.monotonic()
    log.info("compiling the stage", compiler=compiler)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        partial = Path(folder)
        objects = _compiled(compiler, partial, flags, sources)
        library = partial / "library.so"
        _run([compiler, *LINK_FLAGS, "-o", str(library), *map(str, objects)], COMPILE_TIMEOUT_S)
        _seal(library)
        os.replace(library, target)
    log.info("compiled the stage", took_s=round(time.monotonic() - started, 1), library=str(target))


def _compiled(compiler: str, folder: Path, flags: Sequence[str], place: Path) -> list[Path]:
    """All sources at once, as far as there are cores. Raises BuildFailed."""
    sources = sorted(place.glob("*.cpp"), key=lambda path: -path.stat().st_size)
    objects = [folder / f"{path.stem}.o" for path in sources]
    waiting = [
        [compiler, *flags, "-c", str(source), "-o", str(made)]
        for source, made in zip(sources, objects, strict=True)
    ]
    at_once = max(1, os.cpu_count() or 1)
    running: list[subprocess.Popen[bytes]] = []
    deadline = time.monotonic() + COMPILE_TIMEOUT_S
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(subprocess.Popen(waiting.pop(0), stderr=subprocess.PIPE))
            first = running[0]
            _, errors = first.communicate(timeout=max(0.0, deadline - time.monotonic()))
            running.remove(first)
            if first.returncode:
                raise BuildFailed(f"{' '.join(map(str, first.args))}: {_tail(errors)}")  # type: ignore[arg-type]
    except subprocess.TimeoutExpired:
        raise BuildFailed(f"compiling took over {COMPILE_TIMEOUT_S} s") from None
    finally:
        for process in running:
            process.kill()
            process.communicate()
    return objects


def _run(command: list[str], timeout_s: float) -> bytes:
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(f"{command[0]}: {error}") from None
    if done.returncode:
        raise BuildFailed(f"{' '.join(command)}: {_tail(done.stderr)}")
    return done.stdout


def _tail(errors: bytes) -> str:
    return errors.decode(errors="replace").strip()[-2000:]


def _prune(cache_dir: Path, newest: Path) -> None:
    """A library that is still loaded elsewhere stays mapped there. Called by the only builder: folders are of
    builders that were killed."""
    builds = sorted(cache_dir.glob("*.so"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in builds[KEPT_MAX:]:
        if path != newest:
            path.unlink(missing_ok=True)
    for path in cache_dir.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
