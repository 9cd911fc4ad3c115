"""`python -m shard_worker.native.prebuild DIR`: compiles the stage for every level of this kind of processor.

For images: where they run, `SHOAL_NATIVE_DIR=DIR` has the best library that the processor there can run
loaded, and nothing is compiled (`build.py`).
"""

import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from chassis import log
from shard_worker.native import build, levels


def prebuild(folder: Path, wanted: Sequence[levels.Level]) -> list[Path]:
    """One library a level, whole or not at all. Raises BuildFailed, OSError."""
    compiler, sources = build.find_compiler(), build.SOURCES
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for level in wanted:
        target = folder / levels.file_name(level, sources, build.portable_flags())
        build.compile_into(compiler, target, (*build.portable_flags(), *level.flags), sources)
        made.append(target)
    return made


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1:
        log.error("usage: python -m shard_worker.native.prebuild DIR")
        return 2
    wanted = levels.of_machine(platform.machine())
    if not wanted:
        log.warning(
            "no levels of this machine: a compiler is needed where it runs", machine=platform.machine()
        )
    try:
        prebuild(Path(argv[0]), wanted)
    except (build.BuildFailed, OSError) as error:
        log.error("not built", error=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
