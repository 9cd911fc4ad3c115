"""The words of `shoal batch dead`: jobs that killed who ran them, and how to try one of them anew.

A job is tried anew under another subject, `=rN` behind its key: its first answer, which says that it failed,
stays as it is, and the new one stands beside it. To retry a letter twice runs it once.
"""

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path

from chassis import job_subjects, subjects
from chassis.bus import Bus
from chassis.errors import BusError, SubjectTaken
from chassis.messages import BadMessage
from chassis.messages.jobs import Letter, parse_letter
from chassis.messages.request import Claim
from shoal.looking import Dial

LETTERS_MAX = 10_000


def add_words(parser: argparse.ArgumentParser) -> None:
    words = parser.add_subparsers(required=True, metavar="WORD", dest="word")
    listing = words.add_parser("list", help="the dead jobs, oldest first")
    listing.add_argument("--json", action="store_true", help="one JSON object a line")
    retry = words.add_parser("retry", help="publish dead jobs again")
    retry.add_argument("subject", nargs="*", help="of a job, as `list` shows it")
    retry.add_argument("--all", action="store_true", help="each of them")
    for word in (listing, retry):
        word.add_argument("--nats", help="URL of the bus (default: what `shoal up` runs)")
        word.add_argument("--run-dir", type=Path, default=argparse.SUPPRESS, help="of what runs")


async def letters(bus: Bus) -> list[Letter]:
    """Raises BusError."""
    found = []
    for stored in await bus.read(subjects.DEAD, job_subjects.LETTERS, 1, LETTERS_MAX):
        try:
            found.append(parse_letter(stored.data))
        except BadMessage:
            continue  # anyone may write there
    return found


async def retry(bus: Bus, letter: Letter) -> str:
    """Publishes it under its next name; returns that subject. Raises ValueError, BusError."""
    name = job_subjects.parse_job(letter.subject)
    if name is None:
        raise ValueError(f"{letter.subject}: not the subject of a job")
    subject = job_subjects.job(name.next)
    try:
        await bus.append(subject, letter.body, headers=letter.headers)
    except SubjectTaken:
        pass  # it was retried before, and waits
    return subject


async def tell(bus: Bus, dial: Dial, arguments: argparse.Namespace) -> tuple[str, bool]:
    """The text, and whether all was done. Raises BusError when the bus does not answer."""
    found = await letters(bus)
    if arguments.word == "list":
        return "\n".join(map(_json if arguments.json else _line, found)) or "no job is dead", True
    return await _retry(bus, found, arguments)


async def _retry(bus: Bus, found: list[Letter], arguments: argparse.Namespace) -> tuple[str, bool]:
    wanted = [letter.subject for letter in found] if arguments.all else list(arguments.subject)
    if not wanted:
        return "nothing to retry: name subjects, or say --all", bool(arguments.all)
    by_subject = {letter.subject: letter for letter in found}
    lines, done = [], True
    for subject in wanted:
        letter = by_subject.get(subject)
        try:
            if letter is None:
                raise ValueError(f"{subject}: no such letter")
            lines.append(f"{subject} goes on as {await retry(bus, letter)}")
        except (ValueError, BusError) as error:
            lines.append(str(error))
            done = False
    return "\n".join(lines), done


def _history(letter: Letter) -> list[str]:
    told = []
    try:
        for at_ms, record in letter.records:
            deaths = ""
            if isinstance(record, Claim):
                deaths = f", deaths {record.worker_deaths} of workers, {record.batcher_deaths} of batchers"
            kind = type(record).__name__.lower()
            told.append(f"{_time(at_ms)} {kind} {record.attempt} by {record.boot}{deaths}")
    except BadMessage as error:
        told.append(str(error))
    return told


def _line(letter: Letter) -> str:
    head = f"{letter.subject}  {_time(letter.died_at_ms)}  {letter.request_id}  {letter.error}"
    return "\n".join([head, *(f"    {entry}" for entry in _history(letter))])


def _json(letter: Letter) -> str:
    return json.dumps(
        {
            "subject": letter.subject,
            "died_at_ms": letter.died_at_ms,
            "request_id": letter.request_id,
            "error": letter.error,
            "history": _history(letter),
        }
    )


def _time(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds")
