"""W6: a conversation's turns, and what is made of their times."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from bench.chat import KNOWN, UNKNOWN, Turns, ratios, slopes, values_of
from bench.load import W6, Chat, converse
from shoal.client import Accepted, Delta, Event, Finished, Params

CHAT = Chat("chat", 4, 5, 3)


class Client:
    """Answers 7, 8, 9 to everything."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []

    async def generate(self, prompt: Sequence[int], params: Params) -> AsyncIterator[Event]:
        assert params.temperature == 0.0 and params.ignore_eos
        self.prompts.append(list(prompt))
        yield Accepted("r", len(prompt), 1)
        yield Delta("", (7, 8, 9), 0)
        yield Finished("length", len(prompt), 0, 3, 0, 0, 0)


def talk(known: bool) -> list[list[int]]:
    client = Client()
    heard = asyncio.run(converse(client, CHAT, 5, 1000, known))  # type: ignore[arg-type]
    assert len(heard) == CHAT.turns and all(s.ids == [7, 8, 9] for s in heard)
    return client.prompts


def test_each_turn_continues_all_that_was_said() -> None:
    prompts = talk(known=True)
    assert [len(p) for p in prompts] == [5, 13, 21, 29]
    for before, after in zip(prompts, prompts[1:], strict=False):
        assert after[: len(before)] == before and after[len(before) :][:3] == [7, 8, 9]


def test_without_the_cache_no_beginning_comes_twice_and_the_rest_is_the_same() -> None:
    known, unknown = talk(known=True), talk(known=False)
    assert len({p[0] for p in unknown}) == CHAT.turns
    assert [p[1:] for p in unknown] == [p[1:] for p in known]


def test_w6_fits_into_the_context_of_the_model() -> None:
    assert W6.context_len <= 2048 and W6.turns == 10


def test_ratios_are_of_one_round_and_of_the_last_turn() -> None:
    turns = Turns({KNOWN: [[9.0, 2.0, 4.0], [9.0, 1.0, 1.0]], UNKNOWN: [[9.0, 9.0, 20.0], [9.0, 9.0, 10.0]]})
    assert ratios(turns) == (5.0, 10.0)
    assert slopes(turns.ttft_ms[KNOWN]) == (2.0, 1.0)
    values, rows = values_of(turns)
    assert values["chat.w6.ttft_ratio"].median == 7.5 and len(rows) == 4
    assert values["chat.w6.turn3_with_ms"].values == (4.0, 1.0)
