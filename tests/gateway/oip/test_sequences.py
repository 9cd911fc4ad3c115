"""Sequences: turns in order, nothing left of what fails, bounds, and that idle ones are forgotten."""

import asyncio

import pytest

from chassis.errors import Code, Status
from gateway.oip.asking import Wanted
from gateway.oip.sequences import SEQUENCES_MAX, TURNS_MAX, Sequences
from tests.gateway.rig import run, until


async def say(
    sequences: Sequences, text: str, start: bool = False, end: bool = False, owner: str = "a"
) -> str:
    async with sequences.turn(owner, Wanted("s", start, end)) as sequence:
        sequence.text += text
        return sequence.text


def test_it_goes_on_where_it_was_and_ends() -> None:
    async def main() -> None:
        sequences = Sequences(60, lambda: 0.0)
        assert await say(sequences, "one", start=True) == "one"
        with pytest.raises(Status):
            await say(sequences, "?", owner="another")
        assert await say(sequences, " two") == "one two"
        assert await say(sequences, "anew", start=True) == "anew"
        assert await say(sequences, ".", end=True) == "anew."
        with pytest.raises(Status) as over:
            await say(sequences, "?")
        assert over.value.code is Code.INVALID_ARGUMENT and len(sequences) == 0

    run(main())


def test_turns_come_in_order_and_failures_leave_nothing() -> None:
    async def main() -> None:
        sequences = Sequences(60, lambda: 0.0)
        gate, order = asyncio.Event(), []

        async def turn(name: str, start: bool) -> None:
            async with sequences.turn("a", Wanted("s", start, False)) as sequence:
                await gate.wait()
                order.append((name, sequence.text))
                if name == "bad":
                    raise Status(Code.INTERNAL, "no")
                sequence.text += name

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(turn("x", True)), group.create_task(_fails(turn("bad", False)))]
            tasks.append(group.create_task(turn("y", False)))
            await until(lambda: len(sequences) == 1)
            gate.set()
        assert order == [("x", ""), ("bad", "x"), ("y", "x")]
        with pytest.raises(Status):
            await _first_fails(sequences)
        assert len(sequences) == 1  # what never began is not kept

    run(main())


async def _fails(work: object) -> None:
    with pytest.raises(Status):
        await work  # type: ignore[misc]


async def _first_fails(sequences: Sequences) -> None:
    async with sequences.turn("b", Wanted("s", True, False)):
        raise Status(Code.INTERNAL, "no")


def test_they_are_bounded_and_forgotten() -> None:
    async def main() -> None:
        now = 0.0
        sequences = Sequences(60, lambda: now)
        for i in range(SEQUENCES_MAX):
            await say(sequences, "x", start=True, owner=str(i))
        with pytest.raises(Status) as full:
            await say(sequences, "x", start=True, owner="late")
        assert full.value.code is Code.UNAVAILABLE
        now = 61.0
        await say(sequences, "x", start=True, owner="late")
        assert len(sequences) == 1
        async with asyncio.TaskGroup() as group, sequences.turn("late", Wanted("s", False, False)):
            waiting = [group.create_task(say(sequences, "y", owner="late")) for _ in range(TURNS_MAX - 1)]
            await asyncio.sleep(0)
            with pytest.raises(Status) as queue:
                await say(sequences, "z", owner="late")
            assert queue.value.code is Code.UNAVAILABLE and len(waiting) == TURNS_MAX - 1

    run(main())
