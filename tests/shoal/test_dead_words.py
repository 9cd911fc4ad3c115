"""Dead jobs: what is shown of them, and how they are tried anew."""

import argparse
import asyncio
import json
from pathlib import Path

import pytest

from chassis import subjects
from chassis.ids import Attempt, BootId
from chassis.job_subjects import JobName, job, letter_of
from chassis.memory_broker import MemoryBroker
from chassis.memory_bus import MemoryBus
from chassis.messages.jobs import Letter, build_letter
from chassis.messages.request import Claim, Reason, Terminal, build_record
from shoal import cli, dead_words

NAME = JobName("t", "q", "k")


def letter(name: JobName = NAME) -> Letter:
    claim = Claim(Attempt(3), BootId("b2"), b"", 2, 1)
    end = Terminal(Attempt(3), BootId("b2"), Reason.FAILED, (), error="poison")
    log = ((1000, build_record(claim)), (2500, build_record(end)))
    return Letter(job(name), b"body", "r1", "poison", 3000, {"Shoal-Timeout-Ms": "5"}, log)


async def bus_with(*letters: Letter) -> MemoryBus:
    bus = MemoryBus(MemoryBroker(), "test")
    for each in letters:
        await bus.append(letter_of(each.subject), build_letter(each))
    await bus.append("shoal.dead.job.t.q.garbage", b"\xff")
    await bus.append(subjects.dead("plainrequest"), b"")  # type: ignore[arg-type]
    return bus


def test_letters_are_found_among_others() -> None:
    async def main() -> None:
        assert await dead_words.letters(await bus_with(letter())) == [letter()]

    asyncio.run(main())


def test_a_letter_is_shown_with_its_history() -> None:
    text = dead_words._line(letter())
    assert text.splitlines()[0] == "shoal.job.t.q.k  1970-01-01T00:00:03.000+00:00  r1  poison"
    assert "claim 3 by b2, deaths 2 of workers, 1 of batchers" in text
    shown = json.loads(dead_words._json(letter()))
    assert (shown["subject"], shown["died_at_ms"], shown["error"]) == ("shoal.job.t.q.k", 3000, "poison")
    assert shown["history"][-1].endswith("terminal 3 by b2")
    broken = dead_words._line(Letter(job(NAME), b"", "r", "e", 0, {}, ((0, b"\xff"),)))
    assert "not a Record" in broken


def test_a_retry_is_the_same_job_under_the_next_name_and_twice_is_once() -> None:
    async def main() -> None:
        bus = await bus_with(letter())
        subject = await dead_words.retry(bus, letter())
        assert subject == "shoal.job.t.q.k=r2" == await dead_words.retry(bus, letter())
        (stored,) = await bus.read(subjects.JOBS, "shoal.job.>", 1, 10)
        assert (stored.subject, stored.data) == (subject, b"body")
        assert stored.headers["Shoal-Timeout-Ms"] == "5"
        assert await dead_words.retry(bus, letter(NAME.next)) == "shoal.job.t.q.k=r3"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("words", "done", "said"),
    [
        (["retry", "--all"], True, "shoal.job.t.q.k goes on as shoal.job.t.q.k=r2"),
        (["retry", "shoal.job.t.q.k"], True, "goes on as"),
        (["retry", "shoal.job.t.q.other"], False, "no such letter"),
        (["retry"], False, "name subjects, or say --all"),
    ],
)
def test_what_is_asked_for_is_retried(words: list[str], done: bool, said: str) -> None:
    parser = argparse.ArgumentParser()
    dead_words.add_words(parser)

    async def main() -> None:
        bus = await bus_with(letter())
        found = await dead_words.letters(bus)
        text, whole = await dead_words._retry(bus, found, parser.parse_args(words))
        assert whole is done and said in text

    asyncio.run(main())


@pytest.mark.parametrize("words", [["--run-dir", "there", "list"], ["list", "--run-dir", "there"]])
def test_the_folder_may_be_said_before_or_behind_the_word(words: list[str]) -> None:
    arguments = cli._parser().parse_args(["batch", "dead", *words])
    assert arguments.run_dir == Path("there")
