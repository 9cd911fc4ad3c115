"""Both clients over real channels: lost streams go on, safe calls are repeated, leaving ends them."""

import asyncio
import gc
import pickle
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc
import pytest

from shoal import Accepted, AsyncClient, Client, Delta, Finished, Params, Result, Retry, ShoalError
from shoal.client import (
    AsyncConversation,
    Cancelled,
    Conversation,
    DeadlineExceeded,
    InvalidArgument,
    ResourceExhausted,
    Tls,
    Unavailable,
)
from shoal.client.events import Event, result_of
from tests.shoal.client.fake_gateway import IDS, TEXT, FakeGateway, served

T = TypeVar("T")
LIMIT_S = 20.0
QUICK = Retry(first_wait_s=0.001)


def run(main: Coroutine[Any, Any, T]) -> T:
    async def timed() -> T:
        async with asyncio.timeout(LIMIT_S):
            return await main

    return asyncio.run(timed())


def whole(events: list[Event], choices: int = 1) -> None:
    assert [type(e) for e in events].count(Accepted) == choices
    result: Result = result_of(events)
    assert [(c.text, c.ids, c.reason) for c in result.choices] == [(TEXT, IDS, "length")] * choices


def ask_blocking(addresses: list[str], params: Params, **more: Any) -> list[Event]:
    with Client(addresses, retry=QUICK, **more) as client:
        return list(client.generate("hi", params))


def ask_async(addresses: list[str], params: Params, **more: Any) -> list[Event]:
    async def life() -> list[Event]:
        async with AsyncClient(addresses, retry=QUICK, **more) as client:
            return [event async for event in client.generate("hi", params)]

    return run(life())


both = pytest.mark.parametrize("ask", [ask_blocking, ask_async])


@both
@pytest.mark.parametrize("choices", [1, 3])
def test_a_lost_stream_goes_on_with_the_rest(ask: Any, choices: int) -> None:
    gateway, other = FakeGateway(), FakeGateway()
    gateway.fail_after, other.fail_after = [7, 1], [3, 4]
    with served(gateway, other) as addresses:
        whole(ask(addresses, Params(n=choices)), choices)
    first, *more = [*gateway.asked, *other.asked]
    assert first.prompt == "hi" and len(more) >= 4
    assert {asked.request_id for asked in more} == {"r", "rc1", "rc2"} & {
        f"r{f'c{i}' if i else ''}" for i in range(choices)
    }


@both
def test_before_it_is_accepted_the_call_is_made_again(ask: Any) -> None:
    gateway = FakeGateway()
    gateway.fail_after, gateway.hint_ms = [0, 0], 5
    with served(gateway) as addresses:
        whole(ask(addresses, Params(client_key="k")))
    assert [asked.client_key for asked in gateway.asked] == ["k"] * 3


@both
def test_a_gateway_that_stops_takes_leave_by_cancelling(ask: Any) -> None:
    gateway, other = FakeGateway(), FakeGateway()
    gateway.fail_after, gateway.code = [4], grpc.StatusCode.CANCELLED
    with served(gateway, other) as addresses:
        whole(ask(addresses, Params()))
    assert list(other.asked[0].output_ids) == list(IDS[:6])


@both
def test_a_stream_that_ends_too_early_is_lost_too(ask: Any) -> None:
    gateway = FakeGateway()
    gateway.fail_after, gateway.code = [5], grpc.StatusCode.OK
    with served(gateway) as addresses:
        whole(ask(addresses, Params()))


@both
def test_what_is_no_use_to_repeat_is_said_at_once(ask: Any) -> None:
    gateway = FakeGateway()
    gateway.fail_after, gateway.code = [3], grpc.StatusCode.ABORTED
    with served(gateway) as addresses, pytest.raises(ShoalError) as caught:
        ask(addresses, Params())
    assert (caught.value.code, caught.value.request_id) == ("ABORTED", "r")
    assert len(gateway.asked) == 1
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is type(caught.value) and str(again) == str(caught.value)


@both
def test_a_quota_that_says_when_is_waited_for(ask: Any) -> None:
    gateway = FakeGateway()
    gateway.fail_after, gateway.code, gateway.hint_ms = [0], grpc.StatusCode.RESOURCE_EXHAUSTED, 10
    with served(gateway) as addresses:
        whole(ask(addresses, Params()))
    gateway.fail_after, gateway.hint_ms = [0], 3_600_000
    with served(gateway) as addresses, pytest.raises(ResourceExhausted):
        ask(addresses, Params())


@both
def test_a_key_goes_with_each_call(ask: Any) -> None:
    gateway = FakeGateway()
    gateway.fail_after = [3]
    with served(gateway) as addresses:
        whole(ask(addresses, Params(), api_key="secret"))
    assert [m["authorization"] for m in gateway.metadata] == ["Bearer secret"] * 2
    for wrong in ("a b", "ü", "a\nb"):
        with pytest.raises(InvalidArgument) as refused:
            Client(api_key=wrong)
        assert wrong not in str(refused.value)


def test_small_calls_are_repeated() -> None:
    gateway, other = FakeGateway(), FakeGateway()

    async def life(addresses: list[str]) -> None:
        async with AsyncClient(addresses, retry=QUICK) as client:
            assert [m.name for m in await client.models()] == ["m"]

    with served(gateway, other) as addresses:
        gateway.fail_after, other.fail_after = [0], [0]
        with Client(addresses, retry=QUICK) as client:
            assert [m.name for m in client.models()] == ["m"]
        gateway.fail_after, other.fail_after = [0], [0]
        run(life(addresses))
        assert (len(gateway.asked), len(other.asked)) == (4, 2)


@both
def test_an_address_where_nobody_is_costs_a_try(ask: Any) -> None:
    gateway = FakeGateway()
    with served(gateway) as addresses:
        whole(ask(["127.0.0.1:1", *addresses], Params()))


def test_a_timeout_is_for_all_of_it() -> None:
    gateway = FakeGateway()
    gateway.hold.clear()
    with served(gateway) as addresses, Client(addresses) as client:
        with pytest.raises(DeadlineExceeded):
            list(client.generate("hi", timeout_s=0.2))
        assert all(left is not None and left < 1 for left in gateway.time_left_s)
    with (
        Client("127.0.0.1:1") as client,
        pytest.raises(DeadlineExceeded, match="timeout_s: 0.2; last UNAVAIL"),
    ):
        client.complete("hi", timeout_s=0.2)


def test_a_whole_answer() -> None:
    gateway = FakeGateway()
    gateway.fail_after = [5]

    async def life(addresses: list[str]) -> Result:
        async with AsyncClient(addresses, retry=QUICK) as client:
            return await client.complete("hi", Params(n=2))

    with served(gateway) as addresses:
        with Client(addresses, retry=QUICK) as client:
            result = client.complete("hi")
        assert (result.text, result.ids, result.reason, result.request_id) == (TEXT, IDS, "length", "r")
        assert gateway.asked[0].stream_interval == 1024  # nobody looks at the pieces
        assert [c.text for c in run(life(addresses)).choices] == [TEXT, TEXT]


def test_what_was_held_at_a_stop_is_enough_to_go_on() -> None:
    gateway = FakeGateway()
    with served(gateway) as addresses, Client(addresses) as client:
        with client.generate("hi", Params(resume_window_s=9)) as stream:
            text = "".join(e.text for _, e in zip(range(4), stream, strict=False) if isinstance(e, Delta))
        saved = (stream.request_id, list(stream.output_ids()))
        assert saved == ("r", list(IDS[:6]))
    with served(gateway) as addresses, Client(addresses) as client:
        rest = "".join(e.text for e in client.resume(*saved) if isinstance(e, Delta))
    assert text + rest == TEXT


def test_cancel_asks_for_the_end_from_any_thread() -> None:
    gateway = FakeGateway()
    gateway.hold.clear()
    with served(gateway) as addresses, Client(addresses) as client:
        with client.generate("hi") as stream:
            assert isinstance(next(stream), Accepted)
            cancelling = threading.Timer(0.05, stream.cancel)
            cancelling.start()
            events = list(stream)
        cancelling.join()  # the end may be told before the call is answered
        end = events[-1]
        assert isinstance(end, Finished) and end.reason == "cancelled"
        assert gateway.asked[1].request_id == "r"


def test_a_closed_client_says_so() -> None:
    """Also a call that was under way, instead of trying again."""
    gateway = FakeGateway()
    with served(gateway) as addresses, Client(addresses) as client:
        client.close()
        for ask in (client.models, lambda: client.cancel("r"), lambda: client.complete("hi")):
            with pytest.raises(Cancelled, match="the client is closed"):
                ask()

    async def life(addresses: list[str]) -> None:
        client = AsyncClient(addresses)
        await client.close()
        for ask in (client.models(), client.cancel("r"), client.complete("hi")):
            with pytest.raises(Cancelled, match="the client is closed"):
                await ask

    with served(gateway) as addresses:
        asyncio.run(life(addresses))


def test_close_ends_a_read_in_another_thread() -> None:
    gateway = FakeGateway()
    gateway.hold.clear()
    with served(gateway) as addresses, Client(addresses) as client:
        stream = client.generate("hi")
        events: list[type] = []
        for event in stream:
            events.append(type(event))
            if len(events) == 4:  # no more comes: the next read waits
                threading.Timer(0.05, stream.close).start()
        assert events == [Accepted, Delta, Delta, Delta]
        assert list(stream) == []
    with Client("127.0.0.1:1", retry=Retry(first_wait_s=30, wait_s_max=30, patience_s=99)) as client:
        stream = client.generate("hi")
        threading.Timer(0.2, stream.cancel).start()
        assert list(stream) == []  # it waited to try again


def test_close_and_cancel_from_another_task() -> None:
    gateway = FakeGateway()
    gateway.hold.clear()

    async def life(addresses: list[str]) -> None:
        async with AsyncClient(addresses) as client:
            stream = client.generate("hi")
            heard: list[type] = []
            async for event in stream:
                heard.append(type(event))
                if len(heard) == 4:
                    asyncio.get_running_loop().call_later(0.05, stream.close)
            assert heard == [Accepted, Delta, Delta, Delta]
            async with client.generate("hi") as stream:
                assert isinstance(await anext(stream), Accepted)
                await stream.cancel()
                events = [e async for e in stream]
            assert isinstance(events[-1], Finished) and events[-1].reason == "cancelled"
            gateway.cancelled.clear()
            gateway.hold.clear()
            reader = asyncio.get_running_loop().create_task(anext(client.resume("r", IDS[:6])))
            await asyncio.sleep(0)
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader

    with served(gateway) as addresses:
        run(life(addresses))


def test_a_stream_that_is_dropped_is_left() -> None:
    gateway = FakeGateway()
    gateway.hold.clear()
    gc.disable()  # no cycle holds it
    try:
        with served(gateway) as addresses, Client(addresses) as client:
            stream = client.generate("hi")
            next(stream)
            calls = [call for _, call in stream._course._open]
            del stream
            assert [call.code() for call in calls] == [grpc.StatusCode.CANCELLED]
    finally:
        gc.enable()


def test_a_conversation_keeps_what_was_answered() -> None:
    gateway = FakeGateway()

    async def life(addresses: list[str]) -> None:
        async with AsyncClient(addresses, retry=None) as client:
            chat = AsyncConversation(client, system="be brief")
            assert await chat.say("one") == TEXT
            assert chat.turns[1:] == [("user", "one"), ("assistant", TEXT)]

    with served(gateway) as addresses, Client(addresses, retry=None) as client:
        chat = Conversation(client, Params(client_key="k"), system="be brief")
        assert chat.say("one") == TEXT
        gateway.fail_after = [3]
        with pytest.raises(Unavailable):
            chat.say("two")
        assert chat.say("two") == TEXT
        assert [role for role, _ in chat.turns] == ["system", "user", "assistant", "user", "assistant"]
        assert [len(asked.chat.turns) for asked in gateway.asked] == [2, 4, 4]
        assert gateway.asked[1].client_key == gateway.asked[2].client_key != gateway.asked[0].client_key
        assert chat.undo() == "two" and chat.undo() == "one" and chat.undo() is None
        assert chat.turns == [("system", "be brief")]
        run(life(addresses))
    with pytest.raises(InvalidArgument, match="n: 2"):
        Conversation(client, Params(n=2))


def test_credentials_are_whole_or_none() -> None:
    with pytest.raises(InvalidArgument, match="belong together"):
        Tls(certificate=b"x")
    assert "PRIVATE" not in repr(Tls(certificate=b"x", private_key=b"PRIVATE"))
    for addresses in ([], "", ["a:1", ""]):
        with pytest.raises(InvalidArgument, match="address"):
            Client(addresses)
