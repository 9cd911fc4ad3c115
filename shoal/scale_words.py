"""The words of `shoal scale`, and what is said of a change."""

import argparse
import asyncio
import math
from typing import Any

from shoal.control import ask
from shoal.fleet import COUNTED, LIMITS, BadCount, wanted_of
from shoal.launcher import read_state
from shoal.plan import LaunchError

DIGITS_MAX = 9


def add_words(parser: argparse.ArgumentParser) -> None:
    known = ", ".join(f"{what} ({low} to {high})" for what, (low, high) in LIMITS.items())
    parser.add_argument(
        "wanted",
        nargs="*",
        metavar="WHAT=NUMBER",
        help=f"{known}; none: only say how many there are",
    )
    parser.add_argument(
        "--timeout", type=float, default=300.0, help="seconds to wait for the change (default: 300)"
    )


def run(arguments: argparse.Namespace) -> str:
    """Asks the running `shoal up` and tells what it did. Raises LaunchError."""
    wanted = wanted_in(arguments.wanted)
    if not 0 < arguments.timeout < math.inf:
        raise LaunchError(f"--timeout {arguments.timeout:g}: seconds, above 0")
    read_state(arguments.run_dir)  # says it plainly when nothing runs
    return told(asyncio.run(ask(arguments.run_dir, {"scale": dict(wanted)}, arguments.timeout)))


def wanted_in(words: list[str]) -> dict[str, int]:
    """Of `gateways=2`. Raises LaunchError."""
    wanted: dict[str, object] = {}
    for word in words:
        what, equals, number = word.partition("=")
        if not equals or not number.isascii() or not number.isdigit():
            raise LaunchError(f"{word!r}: say WHAT=NUMBER, as in gateways=2")
        if what in wanted:
            raise LaunchError(f"{what}: said twice")
        if len(number) > DIGITS_MAX:
            raise LaunchError(f"{what}: say at most {DIGITS_MAX} digits")
        wanted[what] = int(number)
    try:
        return wanted_of(wanted)
    except BadCount as error:
        raise LaunchError(str(error)) from None


def told(answer: dict[str, Any]) -> str:
    verbs = {"added": "started", "removed": "drained", "killed": "killed"}
    lines = [f"{verb} {' '.join(answer[key])}" for key, verb in verbs.items() if answer.get(key)]
    counts = answer.get("counts", {})
    return "\n".join([*lines, " ".join(f"{what}={counts.get(what, 0)}" for what in COUNTED)])
