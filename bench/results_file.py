"""Results as JSON lines, one file per row kind: what was measured, where, when and how far to trust it."""

import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

FOLDER = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Sample:
    """Repeated values of one quantity; reported as median with range."""

    values: tuple[float, ...]
    unit: str

    @property
    def median(self) -> float:
        return median(self.values)

    def __str__(self) -> str:
        low, high = min(self.values), max(self.values)
        return f"{self.median:.4g} [{low:.4g}-{high:.4g}] {self.unit}"


def commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def machine() -> dict[str, Any]:
    model = "unknown"
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return {"cpu": model, "cores": os.cpu_count(), "python": platform.python_version()}


def write(row: str, values: Mapping[str, Sample], notes: Mapping[str, Any] | None = None) -> None:
    """Appends one line to `results/<row>.jsonl`."""
    FOLDER.mkdir(exist_ok=True)
    line = {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(),
        "machine": machine(),
        "values": {
            name: {
                "median": s.median,
                "min": min(s.values),
                "max": max(s.values),
                "n": len(s.values),
                "unit": s.unit,
            }
            for name, s in values.items()
        },
        "notes": dict(notes or {}),
    }
    with (FOLDER / f"{row}.jsonl").open("a") as file:
        file.write(json.dumps(line, sort_keys=True) + "\n")


def read_all() -> Iterator[dict[str, Any]]:
    """Every line of every file, oldest first within a file."""
    for path in sorted(FOLDER.glob("*.jsonl")):
        for text in path.read_text().splitlines():
            if text.strip():
                yield json.loads(text)


def table(rows: Sequence[Sequence[str]]) -> str:
    """A plain table; the first row is its head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(lines)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share of them lies; `share` from 0 to 1."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
