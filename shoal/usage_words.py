"""The words of `shoal usage`: what was used, summed from the receipts that the bus keeps.

Receipts are read in batches: a hundred thousand take seconds. What is none is counted and told.
"""

import argparse
import csv
import io
import json
import re
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from chassis import subjects, usage_subjects
from chassis.bus import Bus
from chassis.messages import BadMessage
from chassis.messages.usage import Receipt, parse_receipt
from shoal.looking import Dial
from shoal.usage import GROUPS, Summary, Sums

_AGO = re.compile(r"(\d{1,9})([mhd])")
CLOCKS_MS = 60_000  # a receipt is stored after the end it tells, but by another clock
_SECONDS = {"m": 60, "h": 3600, "d": 86400}


@dataclass(slots=True)
class UsageShown:
    summary: Summary
    garbage: int = 0  # messages that are no receipts: anyone may write there


def add_words(parser: argparse.ArgumentParser) -> None:
    groups = ", ".join(GROUPS)
    parser.add_argument(
        "--by", type=_groups, default=("tenant", "model"), help=f"of {groups}, with commas; empty: one sum"
    )
    parser.add_argument(
        "--since", type=_time_ms, help="2026-12-01, 2026-12-01T08:00 (UTC), or 90m, 12h, 7d ago"
    )
    parser.add_argument("--until", type=_time_ms, help="the same; up to, not with")
    parser.add_argument("--tenant", help="only of this one")
    parser.add_argument("--model", help="only of this one")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON object a sum")
    form.add_argument("--csv", action="store_true", help="a line a sum, after one of names")
    parser.add_argument("--nats", help="URL of the bus (default: what `shoal up` runs)")


def _groups(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name)
    for name in names:
        if name not in GROUPS:
            raise argparse.ArgumentTypeError(f"{name!r}; of {', '.join(GROUPS)}")
    return tuple(dict.fromkeys(names))


def _time_ms(text: str) -> int:
    """Since 1970. What is ago counts from now."""
    ago = _AGO.fullmatch(text)
    now = datetime.now(UTC)
    if ago is not None:
        return max(0, round(now.timestamp() * 1000) - int(ago[1]) * _SECONDS[ago[2]] * 1000)
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no time") from None
    return round((at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp() * 1000)


async def look(bus: Bus, arguments: argparse.Namespace) -> UsageShown:
    """Raises BusError."""
    shown = UsageShown(Summary(arguments.by))
    subject = usage_subjects.receipts(arguments.tenant, arguments.model)
    since_ms, until_ms = arguments.since or 0, arguments.until
    stored_since_ns = max(0, since_ms - CLOCKS_MS) * 1_000_000
    async with aclosing(bus.scan(subjects.USAGE, subject, stored_since_ns)) as found:
        async for stored in found:
            try:
                receipt = parse_receipt(stored.data)
            except BadMessage:
                shown.garbage += 1
                continue
            late = until_ms is not None and receipt.ended_ms >= until_ms
            if since_ms <= receipt.ended_ms and not late and _named(receipt, arguments):
                shown.summary.add(receipt)
    return shown


def _named(receipt: Receipt, arguments: argparse.Namespace) -> bool:
    """Long names may share a subject."""
    return (arguments.tenant in (None, receipt.tenant)) and (arguments.model in (None, receipt.model))


async def tell(bus: Bus, dial: Dial, arguments: argparse.Namespace) -> tuple[str, bool]:
    """The text, and whether all could be read. Raises BusError."""
    shown = await look(bus, arguments)
    return render(shown, arguments), not shown.garbage


def render(shown: UsageShown, arguments: argparse.Namespace) -> str:
    by: Sequence[str] = arguments.by
    groups = shown.summary.groups
    rows = [dict(zip(by, key, strict=True)) | asdict(sums) for key, sums in groups.items()]
    if arguments.json:
        return "\n".join(json.dumps(row) for row in rows)
    if arguments.csv:
        return _csv(by, groups)
    return _table(by, shown)


def _csv(by: Sequence[str], groups: dict[tuple[str, ...], Sums]) -> str:
    """Compute time in one column: pipelines may have different numbers of stages."""
    text = io.StringIO()
    plain = [name for name in asdict(Sums()) if name != "stage_compute_us"]
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow([*by, *plain, "compute_us"])
    for key, sums in groups.items():
        lines.writerow([*key, *(getattr(sums, name) for name in plain), sum(sums.stage_compute_us)])
    return text.getvalue().rstrip("\n")


def _table(by: Sequence[str], shown: UsageShown) -> str:
    head = [*by, "requests", "in", "cached", "out", "computed twice", "queued s", "running s", "compute s"]
    lines = [_cells(key, sums) for key, sums in shown.summary.groups.items()]
    if by and len(lines) > 1:
        lines.append(_cells(("all", *(" " for _ in by[1:])), shown.summary.all))
    widths = [max(len(row[i]) for row in [head, *lines]) for i in range(len(head))]
    text = [
        "  ".join(
            cell.ljust(width) if i < len(by) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [head, *lines]
    ]
    if not lines:
        text = ["no receipts"]
    if shown.garbage:
        text.append(f"no receipts, though in their stream: {shown.garbage:,} messages")
    return "\n".join(text)


def _cells(key: Sequence[str], s: Sums) -> list[str]:
    counts = s.requests, s.prompt_tokens, s.cached_tokens, s.output_tokens, s.recomputed_tokens
    computed = "+".join(f"{us / 1e6:,.1f}" for us in s.stage_compute_us) or "0"
    times = f"{s.queued_us / 1e6:,.1f}", f"{s.running_us / 1e6:,.1f}", computed
    return [*(_plain(name) for name in key), *(f"{count:,}" for count in counts), *times]


def _plain(name: str) -> str:
    """Names are whatever a client was called: nothing of them moves the terminal's cursor."""
    return "".join(c if c.isprintable() else "?" for c in name) or "-"
