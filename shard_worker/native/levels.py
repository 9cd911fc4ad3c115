"""Levels of processors that compiled code is made for ahead, and which of them this processor has.

A container's image has one library for each level (`prebuild.py`), since it is built on another machine than
it runs on and has no compiler. A level asks for what the sources look for, and no more.
"""

import hashlib
import platform
from collections.abc import Iterable, Set
from dataclasses import dataclass
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Level:
    """`needs`: flags as /proc/cpuinfo says them; `flags`: what the compiler is told."""

    name: str
    machine: str
    flags: tuple[str, ...]
    needs: frozenset[str]


def _level(name: str, machine: str, flags: str, below: Iterable[str], needs: str) -> Level:
    return Level(name, machine, tuple(flags.split()), frozenset(below) | frozenset(needs.split()))


_V2 = _level("x86-64-v2", "x86_64", "-march=x86-64-v2", (), "cx16 popcnt sse4_1 sse4_2 ssse3")
_V3 = _level(
    "x86-64-v3", "x86_64", "-march=x86-64-v3", _V2.needs, "abm avx avx2 bmi1 bmi2 f16c fma movbe xsave"
)
_V4 = _level(
    "x86-64-v4", "x86_64", "-march=x86-64-v4", _V3.needs, "avx512f avx512bw avx512cd avx512dq avx512vl"
)
_VNNI = _level("x86-64-v4-vnni", "x86_64", "-march=x86-64-v4 -mavx512vnni", _V4.needs, "avx512_vnni")
_BF16 = _level(
    "x86-64-v4-bf16",
    "x86_64",
    "-march=x86-64-v4 -mavx512vnni -mavx512bf16",
    _VNNI.needs,
    "avx512_bf16",
)
_ARM8 = _level("armv8-a", "aarch64", "-march=armv8-a", (), "asimd")
_ARM82 = _level(
    "armv8.2-a",
    "aarch64",
    "-march=armv8.2-a+fp16+dotprod",
    _ARM8.needs,
    "asimddp asimdhp atomics crc32 fphp",
)
LEVELS = (_BF16, _VNNI, _V4, _V3, _V2, _ARM82, _ARM8)  # the best first


def of_machine(machine: str) -> tuple[Level, ...]:
    """The best first; none for a machine that nobody has thought of."""
    return tuple(level for level in LEVELS if level.machine == machine)


def features(cpuinfo: str) -> frozenset[str]:
    """What every core has."""
    lines = [line.partition(":") for line in cpuinfo.splitlines()]
    cores = [frozenset(value.split()) for key, _, value in lines if key.strip() in ("flags", "Features")]
    return frozenset.intersection(*cores) if cores else frozenset()


def file_name(level: Level, sources: Path, flags: Iterable[str]) -> str:
    """Says what it was made of, so that it is loaded beside the same sources only."""
    total = hashlib.sha256("\0".join((*flags, *level.flags)).encode())
    for path in sorted([*sources.glob("*.cpp"), *sources.glob("*.h")]):
        content = path.read_bytes()
        total.update(f"\0{path.name}\0{len(content)}\0".encode())
        total.update(content)
    return f"{level.name}-{total.hexdigest()[:32]}.so"


def candidates(folder: Path, sources: Path, flags: Iterable[str], machine: str, has: Set[str]) -> list[Path]:
    """The files that may be there and that this processor runs, the best first."""
    return [folder / file_name(level, sources, flags) for level in of_machine(machine) if level.needs <= has]


def here() -> tuple[str, frozenset[str]]:
    """This machine, and what its processor has; nothing where the system doesn't say."""
    try:
        return platform.machine(), features(CPUINFO.read_text(encoding="ascii", errors="replace"))
    except OSError:
        return platform.machine(), frozenset()
