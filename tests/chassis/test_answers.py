"""Each who asks is told once: in time, too late, or that the connection was lost."""

import asyncio

from chassis.answers import Answers
from chassis.bus import Message
from chassis.errors import BusError, BusTimeout, NoResponders
from tests.sim.loop import run


class Asking:
    def __init__(self) -> None:
        self.answers = Answers()
        self.told: dict[str, tuple[float, Message | BusError]] = {}

    def ask(self, inbox: str, timeout_s: float) -> None:
        def done(found: Message | BusError) -> None:
            assert inbox not in self.told, "told twice"
            self.told[inbox] = asyncio.get_running_loop().time(), found

        self.answers.expect(inbox, f"to {inbox}", timeout_s, done)

    def late(self) -> dict[str, float]:
        """When who was told that it took too long."""
        return {
            inbox: round(at - self.began, 6)
            for inbox, (at, found) in self.told.items()
            if isinstance(found, BusTimeout)
        }

    began = 0.0


def test_each_waits_as_long_as_it_said_whoever_is_answered_before_it() -> None:
    async def main() -> None:
        asking = Asking()
        asking.began = asyncio.get_running_loop().time()
        for inbox, timeout_s in (("a", 2.0), ("b", 2.0), ("c", 0.5)):
            asking.ask(inbox, timeout_s)
        await asyncio.sleep(0.25)
        asking.ask("d", 2.0)
        asking.ask("e", 0.5)
        asking.answers.hear(Message("a", b"x"))
        asking.answers.hear(Message("c", b"x"))
        await asyncio.sleep(5.0)
        assert asking.late() == {"e": 0.75, "b": 2.0, "d": 2.25}
        assert len(asking.answers) == 0
        asking.ask("f", 0.5)  # a line that was empty begins anew
        await asyncio.sleep(1.0)
        assert asking.late()["f"] == 5.75

    run(main())


def test_an_answer_counts_once_and_nobody_hears_those_of_others() -> None:
    async def main() -> None:
        asking = Asking()
        asking.ask("a", 1.0)
        asking.ask("b", 1.0)
        asking.ask("c", 1.0)
        asking.answers.hear(Message("stranger", b"x"))
        asking.answers.hear(Message("a", b"1"))
        asking.answers.hear(Message("a", b"2"))
        asking.answers.hear(Message("b", b"", None, {"Status": "503"}))
        asking.answers.forget("c")
        asking.answers.hear(Message("c", b"x"))
        await asyncio.sleep(2.0)
        assert sorted(asking.told) == ["a", "b"]
        answer, refusal = asking.told["a"][1], asking.told["b"][1]
        assert isinstance(answer, Message) and answer.data == b"1"
        assert isinstance(refusal, NoResponders) and str(refusal) == "to b"

    run(main())


def test_a_lost_connection_is_told_to_all_who_wait_and_what_they_ask_then_waits_anew() -> None:
    async def main() -> None:
        answers = Answers()
        told: list[str] = []

        def again(found: Message | BusError) -> None:
            told.append(type(found).__name__)
            if len(told) == 1:
                answers.expect("b", "x", 1.0, again)

        answers.expect("a", "x", 1.0, again)
        answers.lose()
        assert told == ["BusTimeout"] and len(answers) == 1
        answers.hear(Message("b", b"x"))
        assert told == ["BusTimeout", "Message"]

    run(main())
