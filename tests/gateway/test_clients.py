"""What one client is given: the end's text comes apart from the ids, so that a resumed stream has it once."""

import asyncio

from chassis.ids import Attempt, RequestId
from chassis.messages.card import TokenBytes
from chassis.messages.gateway import Accepted, Delta, Finished, GenerateEvent
from chassis.messages.request import Reason, Timings, Usage
from chassis.messages.sampling import TokenLogprobs
from gateway.clients import Client
from gateway.detokenizer import OutputText
from gateway.events import Accept, End

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
