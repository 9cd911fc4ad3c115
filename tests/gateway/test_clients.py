"""What one client is given: the end's text comes apart from the ids, so that a resumed stream has it once."""

import asyncio

import pytest

from chassis.errors import Code, Status
from chassis.ids import Attempt, RequestId
from chassis.messages.card import TokenBytes
from chassis.messages.gateway import (
    Accepted,
    Delta,
    Finished,
    GenerateEvent,
    PromptLogprobs,
    build_event,
)
from chassis.messages.request import Reason, Timings, Usage
from chassis.messages.sampling import PromptTold, TokenLogprobs
from gateway.clients import Client
from gateway.detokenizer import OutputText
from gateway.event_sizes import EVENT_BYTES_MAX, PLAIN_LEN, fitting
from gateway.events import Accept, End
from gateway.line import Line

TABLE = TokenBytes.of([bytes([b]) for b in range(256)])
R = RequestId("r")


async def _events(held: tuple[int, ...], fresh: tuple[int, ...]) -> list[GenerateEvent]:
    client = Client(1, R)
    client.accept(Accept(1, R, "m", (), held, None), OutputText(TABLE))
    if fresh:
        client.pass_on(len(held), fresh)
    client.finish(End(1, Reason.LENGTH, 3, None, Usage(), Timings(), Attempt(1)))
    return [event async for event in client.events()]


def test_the_ends_text_is_told_without_ids_and_again_to_who_missed_the_end() -> None:
    """The last byte begins a code point: its replacement is known only at the end."""
    ids = tuple(b"ab\xc3")
    first = asyncio.run(_events((), ids))
    assert [type(event) for event in first] == [Accepted, Delta, Delta, Finished]
    assert first[1:3] == [Delta("ab", ids, 0), Delta("\ufffd", (), 3)]
    again = asyncio.run(_events(ids, ()))
    assert again[1] == Delta("\ufffd", (), 3)


def test_ids_that_nobody_told_of_are_marked_among_those_told() -> None:
    async def events() -> list[GenerateEvent]:
        client = Client(1, R)
        client.accept(Accept(1, R, "m", (), (), None), OutputText(TABLE))
        client.pass_on(0, (97,))
        client.pass_on(1, (98,), (TokenLogprobs(-1.0, 2),))
        client.pass_on(2, (99,))
        client.finish(End(1, Reason.LENGTH, 3, None, Usage(), Timings(), Attempt(1)))
        return [event async for event in client.events()]

    delta = asyncio.run(events())[1]
    assert isinstance(delta, Delta)
    assert [(told.rank, told.token) for told in delta.logprobs] == [(0, b"a"), (2, b"b"), (0, b"c")]


def _said(
    held: tuple[int, ...], pieces: list[tuple[int, ...]], interval: int, failed: bool = False
) -> list[Delta]:
    """Deltas of a client that takes after each piece."""
    client = Client(1, R, interval=interval)
    client.accept(Accept(1, R, "m", (), held, None), OutputText(TABLE))
    found: list[GenerateEvent] = []
    index = len(held)
    for ids in pieces:
        client.pass_on(index, ids)
        index += len(ids)
        found += client.take()
    if failed:
        client.fail(Status(Code.UNAVAILABLE, "gone", 0))
        with pytest.raises(Status):
            for event in client.take():
                found.append(event)
    else:
        client.finish(End(1, Reason.LENGTH, index, None, Usage(), Timings(), Attempt(1)))
        found += client.take()
    return [event for event in found if isinstance(event, Delta)]


@pytest.mark.parametrize("failed", [False, True])
def test_an_interval_gathers_ids_but_the_first_and_the_last(failed: bool) -> None:
    async def main() -> list[Delta]:
        return _said((1,), [(97,), (98,), (99, 100), (101,), (102,)], 3, failed)

    deltas = asyncio.run(main())
    assert [(d.first_index, d.ids, d.text) for d in deltas] == [
        (1, (97,), "a"),
        (2, (98, 99, 100), "bcd"),
        (5, (101, 102), "ef"),
    ]


def test_who_waits_is_not_woken_for_less_than_its_interval() -> None:
    async def main() -> tuple[bool, bool]:
        ready = asyncio.Event()
        client = Client(1, R, ready=ready, interval=3)
        client.accept(Accept(1, R, "m", (), (), None), OutputText(TABLE))
        client.pass_on(0, (97,))
        list(client.take())
        ready.clear()
        client.pass_on(1, (98, 99))
        early = ready.is_set()
        client.pass_on(3, (100,))
        return early, ready.is_set()

    assert asyncio.run(main()) == (False, True)


LONG = TokenBytes.of([bytes([b]) * 200 for b in range(32, 64)])


def _size(event: GenerateEvent) -> int:
    return len(build_event(event))


def test_what_a_message_cannot_hold_comes_in_pieces() -> None:
    """Long tokens with 20 of the likeliest for each, and the prompt's, for a client that reads nothing."""
    entry = TokenLogprobs(-1.0, 2, tuple(range(20)), (-1.0,) * 20)
    ids, prompt = tuple(i % 32 for i in range(1200)), tuple(i % 31 for i in range(1500))

    async def events() -> list[GenerateEvent]:
        client = Client(1, R)
        client.accept(Accept(1, R, "m", (), (), None), OutputText(LONG))
        client.pass_on(0, ids[:700], (entry,) * 700, PromptTold(prompt, (entry,) * len(prompt)))
        client.pass_on(700, ids[700:], (entry,) * 500)
        client.finish(End(1, Reason.LENGTH, len(ids), None, Usage(), Timings(), Attempt(1)))
        return [event async for event in client.events()]

    found = asyncio.run(events())
    assert max(map(_size, found)) < 4 << 20 < sum(map(_size, found))
    pieces = [event for event in found if isinstance(event, PromptLogprobs)]
    deltas = [event for event in found if isinstance(event, Delta)]
    assert found == [found[0], *pieces, *deltas, found[-1]], "the prompt comes first"
    for told, wanted, first in ((pieces, prompt, 1), (deltas, ids, 0)):
        assert len(told) > 1
        assert [event.first_index for event in told] == [
            first + sum(len(before.ids) for before in told[:i]) for i in range(len(told))
        ]
        assert tuple(token_id for event in told for token_id in event.ids) == wanted
        assert all(len(event.ids) == len(event.logprobs) for event in told)
    assert pieces[0].logprobs[0].token == LONG[0] and pieces[0].logprobs[0].top[3].token == LONG[3]
    assert "".join(delta.text for delta in deltas) == b"".join(LONG[i] for i in ids).decode()


def test_text_alone_is_cut_too_and_short_answers_are_not_looked_at() -> None:
    ids = tuple(i % 32 for i in range(20_000))

    async def events() -> list[GenerateEvent]:
        client = Client(1, R)
        client.accept(Accept(1, R, "m", (), (), None), OutputText(LONG))
        client.pass_on(0, ids)
        client.finish(End(1, Reason.LENGTH, len(ids), None, Usage(), Timings(), Attempt(1)))
        return [event async for event in client.events()]

    deltas = [event for event in asyncio.run(events()) if isinstance(event, Delta)]
    assert len(deltas) > 1 and max(map(_size, deltas)) < 4 << 20
    assert "".join(delta.text for delta in deltas) == b"".join(LONG[i] for i in ids).decode()

    def untouched(token_id: int) -> bytes:
        raise AssertionError("looked at")

    assert fitting(ids[:PLAIN_LEN], (), untouched) == PLAIN_LEN


def test_one_id_goes_whatever_its_size() -> None:
    assert fitting((1, 2), (TokenLogprobs(-1.0, 1),), lambda token_id: bytes(EVENT_BYTES_MAX)) == 1


@pytest.mark.parametrize("begins", [True, False])
def test_a_place_in_line_ends_with_the_first_id_or_the_end(begins: bool) -> None:
    async def main() -> None:
        line = Line()
        client = Client(1, R, waiting=line.enter(5, 0.0))
        client.accept(Accept(1, R, "m", (), (), None), OutputText(TABLE))
        assert len(line) == 1
        if begins:
            client.pass_on(0, (97,))
        else:
            client.fail(Status(Code.UNAVAILABLE, "gone", 0))
            client.leave_line()
        assert len(line) == 0
        client.leave_line()
        client.finish(End(1, Reason.LENGTH, 1, None, Usage(), Timings(), Attempt(1)))
        assert len(line) == 0

    asyncio.run(main())
