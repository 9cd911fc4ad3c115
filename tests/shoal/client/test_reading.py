"""However often a stream is lost, what is handed out is the answer: nothing twice, nothing left out."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.client.errors import Diverged, Unavailable
from shoal.client.events import (
    Accepted,
    Delta,
    Event,
    Finished,
    PromptLogprobs,
    TokenLogprobs,
    result_of,
)
from shoal.client.reading import Ask, Reading, Rest, Whole

LOST = Unavailable("UNAVAILABLE", "gone")


@dataclass(frozen=True)
class Spoken:
    """An answer as a gateway tells it: each id sets some characters free, the end the rest."""

    pieces: tuple[str, ...]
    tail: str
    prompt_len: int

    @property
    def text(self) -> str:
        return "".join(self.pieces) + self.tail

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(100 + i for i in range(len(self.pieces)))

    def tell(self, name: str, held: int, sizes: Iterator[int], choice: int) -> Iterator[Event]:
        yield Accepted(name, self.prompt_len, 7, choice)
        if not held and self.prompt_len > 1:
            told = range(1, self.prompt_len)
            for part in (told[: len(told) // 2], told[len(told) // 2 :]):
                if part:
                    yield PromptLogprobs(tuple(part), part[0], tuple(map(logprobs, part)), choice)
        while held < len(self.pieces):
            until = min(len(self.pieces), held + next(sizes))
            ids = self.ids[held:until]
            yield Delta("".join(self.pieces[held:until]), ids, held, tuple(map(logprobs, ids)), choice)
            held = until
        if self.tail:
            yield Delta(self.tail, (), held, choice=choice)
        yield Finished("stop", self.prompt_len, 0, held, 0, 0, 0, choice)


def logprobs(number: int) -> TokenLogprobs:
    return TokenLogprobs(-float(number), 1, b"")


spoken = st.builds(
    Spoken,
    st.lists(st.text("aé🐟", max_size=3), max_size=12).map(tuple),
    st.text("z🐟", max_size=4),
    st.integers(1, 6),
)


def read(answers: list[Spoken], reading: Reading, cuts: list[int], sizes: list[int]) -> list[Event]:
    """Reads to the end; each stream is cut after so many events while there are cuts."""
    told: list[Event] = []
    draws = (sizes[i % len(sizes)] for i in range(10_000))
    asks = reading.begin()
    left = list(cuts)
    while not reading.over:
        budget = left.pop() if left else 10_000
        for ask in asks:
            for event in heard(answers, ask, draws):
                if not budget:
                    break
                budget -= 1
                new = reading.take(event, ask.choice if isinstance(ask, Rest) else None)
                if new is not None:
                    told.append(new)
        if not reading.over:
            asks = reading.lost(LOST)
    return told


def heard(answers: list[Spoken], ask: Ask, draws: Iterator[int]) -> Iterator[Event]:
    if isinstance(ask, Rest):
        assert ask.request_id == f"r{ask.choice}"
        assert ask.ids == answers[ask.choice].ids[: len(ask.ids)]
        yield from answers[ask.choice].tell(ask.request_id, len(ask.ids), draws, 0)
        return
    streams = [a.tell(f"r{i}", 0, draws, i) for i, a in enumerate(answers)]
    yield from (next(stream) for stream in streams)  # all are accepted first
    while streams:
        for stream in tuple(streams):
            for event in stream:
                yield event
                break
            else:
                streams.remove(stream)


@given(
    st.lists(spoken, min_size=1, max_size=3),
    st.booleans(),
    st.lists(st.integers(0, 9), max_size=12),
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
)
def test_what_is_handed_out_is_the_answer(
    answers: list[Spoken], ranked: bool, cuts: list[int], sizes: list[int]
) -> None:
    reading = Reading(len(answers), ranked=ranked, keyed=True)
    told = read(answers, reading, cuts, sizes)
    for i, answer in enumerate(answers):
        mine = [e for e in told if e.choice == i]
        assert [type(e) for e in mine].count(Accepted) == 1 and isinstance(mine[0], Accepted)
        assert [type(e) for e in mine].count(Finished) == 1 and isinstance(mine[-1], Finished)
        ids: list[int] = []
        for delta in (e for e in mine if isinstance(e, Delta)):
            assert not delta.ids or delta.first_index == len(ids)
            assert delta.ids or delta.text
            ids += delta.ids
        of_prompt = [n for e in mine if isinstance(e, PromptLogprobs) for n in e.ids]
        assert of_prompt == list(range(1, answer.prompt_len))
    result = result_of(told)
    for answer, choice in zip(answers, result.choices, strict=True):
        assert (choice.text, choice.ids) == (answer.text, answer.ids)
        assert choice.logprobs == tuple(map(logprobs, answer.ids))


def test_what_another_process_held_is_not_told_again() -> None:
    answer = Spoken(("ab", "c", "d"), "!", 4)
    reading = Reading(held=Rest(0, "r0", answer.ids[:1]))
    told = read([answer], reading, [2, 3], [1])
    assert "".join(e.text for e in told if isinstance(e, Delta)) == "cd!"
    assert reading.ids_of(0) == answer.ids and reading.request_id == "r0"


def test_an_answer_that_no_call_means_again_is_the_callers_loss() -> None:
    """A choice that was not accepted, and candidates that are ranked, unless a client key names them."""
    for ranked, choices in ((True, 1), (False, 2)):
        reading = Reading(choices, ranked=ranked)
        assert reading.lost(LOST) == (Whole(),)  # nothing is accepted yet
        reading.take(Accepted("r0", 1, 1))
        with pytest.raises(Unavailable):
            reading.lost(LOST)
        keyed = Reading(choices, ranked=ranked, keyed=True)
        keyed.take(Accepted("r0", 1, 1))
        assert keyed.lost(LOST) == (Whole(),)


def test_a_ranked_choice_is_accepted_twice() -> None:
    reading = Reading(1, ranked=True, keyed=True)
    opening = [Accepted("r0", 1, 1), Accepted("r0c2", 1, 3)]
    assert [reading.take(e) for e in opening] == opening
    assert reading.lost(LOST) == (Whole(),)
    assert [reading.take(e) for e in opening] == [None, None]
    assert reading.request_id == "r0c2"


@pytest.mark.parametrize(
    "event",
    [
        Delta("x", (9,), 2),  # a gap
        Delta("x", (9,), 0),  # once more
        Delta("x", (9,), 1, choice=1),  # nobody asked
        Finished("stop", 1, 0, 1, 0, 0, 0, choice=1),
    ],
)
def test_what_does_not_follow_is_not_handed_out(event: Event) -> None:
    reading = Reading()
    reading.take(Accepted("r", 1, 1))
    reading.take(Delta("a", (5,), 0))
    with pytest.raises(Diverged):
        reading.take(event)


def test_an_answer_that_becomes_another_is_said_to() -> None:
    keyed = Reading(2, keyed=True)
    keyed.take(Accepted("r", 1, 1))
    keyed.take(Delta("a", (5, 6), 0))
    keyed.lost(LOST)
    with pytest.raises(Diverged, match="output ids from 0 on"):
        keyed.take(Delta("a", (5, 7), 0))
    with pytest.raises(Diverged, match="request r became s"):
        keyed.take(Accepted("s", 1, 1))
