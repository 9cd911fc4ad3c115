"""Which device a stage computes on: `cpu`, `cuda`, `cuda:N`, or `auto` (CUDA where a device answers).

Who asks for CUDA and has none is told what is missing, before any weight is read.
"""

import re
from dataclasses import dataclass

import torch

from shard_worker.executor import LoadFailed

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NAME = re.compile(r"(cpu|auto|cuda)|cuda:(\d{1,3})")


@dataclass(frozen=True, slots=True)
class Found:
    """What torch says of CUDA here. `build`: the version that it was built for; None: it was not."""

    torch_version: str
    build: str | None
    num_devices: int


def found() -> Found:
    build = torch.version.cuda
    return Found(torch.__version__, build, torch.cuda.device_count() if build and _answers() else 0)


def _answers() -> bool:
    return torch.cuda.is_available()


def chosen(name: str, has: Found | None = None) -> torch.device:
    """The device of that name. Raises LoadFailed."""
    matched = _NAME.fullmatch(name)
    if matched is None:
        raise LoadFailed(f"device {name!r} is not cpu, cuda, cuda:N or auto")
    if name == "cpu":
        return torch.device("cpu")
    has = has or found()
    if name == "auto":
        return torch.device("cuda", 0) if has.num_devices else torch.device("cpu")
    if has.build is None:
        raise LoadFailed(f"device {name}: torch {has.torch_version} was built without CUDA")
    if not has.num_devices:
        raise LoadFailed(f"device {name}: torch has CUDA {has.build}, but no device or driver answers")
    number = int(matched[2] or 0)
    if number >= has.num_devices:
        raise LoadFailed(f"device {name}: there are {has.num_devices}, numbered from 0")
    return torch.device("cuda", number)
