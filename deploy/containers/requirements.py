"""Prints what pyproject.toml asks for with the extras named, a requirement a line, for a container file.

So an image installs a service's libraries before its code is there, and no list stands twice.
"""

import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

OWN_EXTRA = re.compile(r"shoal\[([\w,]+)\]")


def requirements(project: dict[str, object], extras: Iterable[str]) -> list[str]:
    """Raises KeyError for an extra that there is not."""
    dependencies, optional = project["dependencies"], project["optional-dependencies"]
    assert isinstance(dependencies, list) and isinstance(optional, dict)
    found: list[str] = list(dependencies)
    for extra in extras:
        for line in optional[extra]:
            if own := OWN_EXTRA.fullmatch(line):
                found += requirements({**project, "dependencies": []}, own.group(1).split(","))
            else:
                found.append(line)
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    described = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    sys.stdout.write("".join(f"{line}\n" for line in requirements(described["project"], sys.argv[1:])))
