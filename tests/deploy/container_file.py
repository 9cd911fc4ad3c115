"""Reads a container file as far as ours go: stages, what each copies, sets and starts.

Raises ValueError for an instruction it does not know, so that no test passes for not having understood.
"""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

KNOWN = {
    "ARG",
    "FROM",
    "WORKDIR",
    "COPY",
    "RUN",
    "ENV",
    "USER",
    "EXPOSE",
    "STOPSIGNAL",
    "HEALTHCHECK",
    "ENTRYPOINT",
}


@dataclass(frozen=True, slots=True)
class Copy:
    source: str  # in the repository, or in the stage `stage`
    target: str
    stage: str = ""


@dataclass(slots=True)
class Image:
    """A stage as it is at its end, with all that it has from the one it builds upon."""

    name: str
    base: str
    env: dict[str, str] = field(default_factory=dict)
    copies: list[Copy] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)
    exposed: set[int] = field(default_factory=set)
    workdir: str = "/"
    user: str = ""
    entrypoint: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)
    stop_signal: str = ""


def instructions(text: str) -> list[tuple[str, str]]:
    """(word, the rest), comments gone and lines joined. Raises ValueError."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    found = []
    for line in filter(str.strip, joined.splitlines()):
        word, _, rest = line.strip().partition(" ")
        if word not in KNOWN:
            raise ValueError(f"unknown instruction {word}")
        found.append((word, re.sub(r"\s+", " ", rest.strip())))
    return found


def images(path: Path) -> dict[str, Image]:
    """By name; the last one without a name is ''. Raises ValueError."""
    arguments: dict[str, str] = {}
    made: dict[str, Image] = {}
    image: Image | None = None
    for word, rest in instructions(path.read_text(encoding="utf-8")):
        if word == "ARG":
            name, _, default = rest.partition("=")
            arguments[name] = default
        elif word == "FROM":
            image = _begun(_filled(rest, arguments), made)
            made[image.name] = image
        elif image is None:
            raise ValueError(f"{path.name}: {word} before FROM")
        else:
            _take(image, word, _filled(rest, arguments) if word != "RUN" else rest)
    return made


def last(path: Path) -> Image:
    """What is built without a target."""
    return list(images(path).values())[-1]


def sources(image: Image, made: Mapping[str, Image]) -> list[Copy]:
    """What is copied from the repository, into it or into a stage whose files it takes."""
    found = []
    for copy in image.copies:
        if not copy.stage:
            found.append(copy)
            continue
        found += [
            Copy(inner.source, copy.target + inner.target.removeprefix(copy.source))
            for inner in sources(made[copy.stage], made)
            if inner.target.startswith(copy.source.rstrip("/") + "/")
        ]
    return found


def _filled(text: str, arguments: Mapping[str, str]) -> str:
    return re.sub(r"\$\{(\w+)\}", lambda match: arguments[match.group(1)], text)


def _begun(rest: str, made: Mapping[str, Image]) -> Image:
    base, _, name = rest.partition(" AS ")
    below = made.get(base)
    if below is None:
        return Image(name, base)
    return Image(
        name,
        below.base,
        dict(below.env),
        list(below.copies),
        list(below.runs),
        set(below.exposed),
        below.workdir,
        below.user,
        list(below.entrypoint),
        list(below.healthcheck),
        below.stop_signal,
    )


def _take(image: Image, word: str, rest: str) -> None:
    match word:
        case "ENV":
            image.env |= dict(pair.split("=", 1) for pair in shlex.split(rest))
        case "COPY":
            *options, target = rest.split(" ")
            stage = ""
            if options[0].startswith("--from="):
                stage = options.pop(0).removeprefix("--from=")
            for source in options:
                whole = f"{target}{Path(source).name}" if target.endswith("/") else target
                image.copies.append(Copy(source, whole, stage))
        case "RUN":
            image.runs.append(rest)
        case "EXPOSE":
            image.exposed |= set(map(int, rest.split(" ")))
        case "WORKDIR":
            image.workdir = rest
        case "USER":
            image.user = rest
        case "ENTRYPOINT":
            image.entrypoint = json.loads(rest)
        case "HEALTHCHECK":
            image.healthcheck = json.loads(rest.partition(" CMD ")[2])
        case "STOPSIGNAL":
            image.stop_signal = rest
