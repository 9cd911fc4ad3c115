"""`make targets`: every numeric target beside its newest measured value."""

import sys
import tomllib
from pathlib import Path
from typing import Any

from bench.results_file import read_all, table

FILE = Path(__file__).parent / "targets.toml"


def verdict(target: dict[str, Any], value: float | None) -> str:
    if value is None:
        return "never measured"
    reached = value >= target["value"] if target["direction"] == "at least" else value <= target["value"]
    return "reached" if reached else "missed"


def newest() -> dict[str, dict[str, Any]]:
    """Newest measurement of each quantity, with when and at which commit."""
    found: dict[str, dict[str, Any]] = {}
    for line in read_all():
        for name, value in line["values"].items():
            if name not in found or line["at"] >= found[name]["at"]:
                found[name] = {**value, "at": line["at"], "commit": line["commit"]}
    return found


def main() -> int:
    targets = tomllib.loads(FILE.read_text())
    values = newest()
    rows = [["target", "wanted", "measured", "verdict", "at", "commit"]]
    for name, target in targets.items():
        value = values.get(name)
        measured = "-" if value is None else f"{value['median']:.4g} [{value['min']:.4g}-{value['max']:.4g}]"
        rows.append(
            [
                name,
                f"{target['direction']} {target['value']:g} {target['unit']}",
                measured,
                verdict(target, None if value is None else value["median"]),
                "-" if value is None else value["at"],
                "-" if value is None else value["commit"],
            ]
        )
    sys.stdout.write(table(rows) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
