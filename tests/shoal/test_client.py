"""The client against a gateway of a few lines: what it sends, what it makes of answers and errors."""

import asyncio
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from chassis.wire import gateway_pb2 as pb
from chassis.wire import gateway_pb2_grpc as pb_grpc
from shoal import Accepted, AsyncClient, Client, Delta, Finished, Params, ShoalError
from shoal.client import (
    Grammar,
    InvalidArgument,
    Model,
    Prompt,
    PromptLogprobs,
    TokenLogprobs,
    TopLogprob,
    build_generate,
)
from shoal.client.wire import event_of

EVENTS = [
    pb.GenerateEvent(accepted=pb.Accepted(request_id="r", prompt_tokens=3, seed=2**64 - 1)),
    pb.GenerateEvent(),  # a kind of a later version
    pb.GenerateEvent(delta=pb.Delta(text="é", ids=[1, 2], first_index=0)),
    pb.GenerateEvent(finished=pb.Finished(reason="stop", prompt_tokens=3, output_tokens=2, decode_us=5)),
]
EXPECTED = [Accepted("r", 3, 2**64 - 1), Delta("é", (1, 2), 0), Finished("stop", 3, 0, 2, 0, 0, 5)]


class Gateway(pb_grpc.InferenceServicer):
    def __init__(self) -> None:
        self.asked: list[Any] = []

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateEvent]:
        self.asked.append(request)
        if request.model == "none":
            context.set_trailing_metadata((("retry-after-ms", "250"),))
            context.abort(grpc.StatusCode.UNAVAILABLE, "no room")
        yield from EVENTS
        if request.model == "endless":
            while context.is_active():
                yield EVENTS[2]

    def Resume(self, request: pb.ResumeRequest, context: Any) -> Iterator[pb.GenerateEvent]:
        self.asked.append(request)
        yield from EVENTS[2:]

    def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelReply:
        self.asked.append(request)
        return pb.CancelReply()

    def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsReply:
        model = pb.Model(name="m", digest="d", context_len_max=10, vocab_size=5, chat=True)
        return pb.ListModelsReply(models=[model])

    def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeReply:
        self.asked.append(request)
        return pb.TokenizeReply(ids=[7, 8])


@contextmanager
def served() -> Iterator[tuple[str, Gateway]]:
    gateway = Gateway()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    pb_grpc.add_InferenceServicer_to_server(gateway, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", gateway
    finally:
        server.stop(0).wait()


def test_a_stream_is_typed() -> None:
    with served() as (address, _), Client(address) as client:
        assert list(client.generate("hi")) == EXPECTED
        assert list(client.resume("r", [])) == EXPECTED[1:]


def test_the_asynchronous_client_does_the_same() -> None:
    async def go(address: str) -> None:
        async with AsyncClient(address, retry=None) as client:
            assert [e async for e in client.generate("hi")] == EXPECTED
            assert [e async for e in client.resume("r")] == EXPECTED[1:]
            assert await client.models() == [Model("m", "d", 10, 5, True)]
            assert await client.tokenize([("user", "hi")]) == [7, 8]
            await client.cancel("r")
            with pytest.raises(ShoalError) as caught:
                async for _ in client.generate("hi", Params(model="none")):
                    pass
            assert (caught.value.code, caught.value.retry_ms) == ("UNAVAILABLE", 250)

    with served() as (address, gateway):
        asyncio.run(go(address))
        assert gateway.asked[3].request_id == "r"


def test_small_calls() -> None:
    with served() as (address, gateway), Client(address) as client:
        assert client.models() == [Model("m", "d", 10, 5, True)]
        assert client.tokenize("text") == [7, 8]
        client.cancel("r")
        assert [type(a).__name__ for a in gateway.asked] == ["TokenizeRequest", "CancelRequest"]


def test_errors_carry_the_gateways_words() -> None:
    with served() as (address, _), Client(address, retry=None) as client:
        with pytest.raises(ShoalError) as caught:
            list(client.generate("hi", Params(model="none")))
        error = caught.value
        assert (error.code, error.message, error.retry_ms) == ("UNAVAILABLE", "no room", 250)


def test_nobody_there_is_an_error_too() -> None:
    with Client("127.0.0.1:1", retry=None) as client:
        with pytest.raises(ShoalError) as caught:
            client.models()
        assert caught.value.code == "UNAVAILABLE"


def test_leaving_early_cancels_the_call() -> None:
    with served() as (address, _), Client(address) as client:
        stream = client.generate("hi", Params(model="endless"))
        assert next(stream) == EXPECTED[0]
        stream.close()
        assert client.models()  # the connection still serves


def test_what_is_not_said_is_not_sent() -> None:
    plain = build_generate("p", Params())
    assert plain == pb.GenerateRequest(prompt="p")
    assert not plain.HasField("temperature")
    said = build_generate([("user", "hi")], Params(temperature=0.0, top_k=0, seed=0, stop=("a",), priority=0))
    assert said.HasField("temperature") and said.HasField("seed") and said.HasField("priority")
    assert said.chat.turns[0] == pb.Turn(role="user", content="hi")
    assert build_generate([1, 2], Params()).token_ids.ids == [1, 2]
    assert build_generate([], Params()).WhichOneof("input") == "token_ids"


@pytest.mark.parametrize(
    ("prompt", "params", "said"),
    [
        ("\udcff", Params(), "prompt: not valid Unicode"),
        ([("user", "a"), ("user", "\udcff")], Params(), "chat.turns[1].content: not valid Unicode"),
        ([("\udcff", "a")], Params(), "chat.turns[0].role: not valid Unicode"),
        ("p", Params(stop=("\udcff",)), "stop: not valid Unicode"),
        ("p", Params(model="\udcff"), "model: not valid Unicode"),
        ([-1], Params(), "token_ids: [-1]; 0 to 4294967295"),
        ("p", Params(top_k=-1), "top_k: -1; 0 to 4294967295"),
        ("p", Params(max_tokens=2**32), "max_tokens: 4294967296; 0 to 4294967295"),
        ("p", Params(seed=-1), "seed: -1; 0 to 18446744073709551615"),
        ("p", Params(seed=2**64), "seed: 18446744073709551616; 0 to 18446744073709551615"),
        ("p", Params(timeout_ms=-1), "timeout_ms: -1; 0 to 4294967295"),
    ],
)
def test_what_a_message_cannot_carry_is_refused_by_field_and_limit(
    prompt: Prompt, params: Params, said: str
) -> None:
    with pytest.raises(ShoalError) as refused:
        build_generate(prompt, params)
    assert (refused.value.code, refused.value.message) == ("INVALID_ARGUMENT", said)


def test_the_other_calls_refuse_it_too() -> None:
    with Client("127.0.0.1:1", retry=None) as client:
        for call in (
            lambda: list(client.resume("\udcff", [])),
            lambda: list(client.resume("r", [-1])),
            lambda: client.cancel("\udcff"),
            lambda: client.tokenize("\udcff"),
            lambda: client.tokenize([("user", "\udcff")]),
        ):
            with pytest.raises(ShoalError, match="INVALID_ARGUMENT"):
                call()


def test_every_parameter_is_sent_and_logprobs_and_choices_come_back() -> None:
    params = Params(
        min_p=0.25, typical_p=0.5, repetition_penalty=1.5, presence_penalty=-1.0, frequency_penalty=0.5,
        logit_bias={9: 1.5, 3: -2.0}, allowed_token_ids=(3, 4), bad_words=("no",), top_logprobs=0, n=2,
        best_of=3,
    )  # fmt: skip
    request = build_generate("x", params)
    assert (request.min_p, request.typical_p, request.repetition_penalty) == (0.25, 0.5, 1.5)
    assert (request.presence_penalty, request.frequency_penalty, request.n) == (-1.0, 0.5, 2)
    assert request.best_of == 3 and not build_generate("x", Params()).HasField("best_of")
    assert dict(request.logit_bias) == {9: 1.5, 3: -2.0}
    assert list(request.allowed_token_ids) == [3, 4] and list(request.bad_words) == ["no"]
    assert request.HasField("top_logprobs") and not build_generate("x", Params()).HasField("top_logprobs")
    top = pb.TopLogprob(id=8, logprob=-0.25, token=b"y")
    told = pb.TokenLogprobs(logprob=-0.5, rank=2, token=b"x", top=[top])
    message = pb.GenerateEvent(delta=pb.Delta(text="x", ids=[7], first_index=3, logprobs=[told]), choice=1)
    assert event_of(message) == Delta(
        "x", (7,), 3, (TokenLogprobs(-0.5, 2, b"x", (TopLogprob(8, -0.25, b"y"),)),), 1
    )


@pytest.mark.parametrize("bias", [{-1: 1.0}, {1 << 32: 1.0}])
def test_a_bias_of_no_id_is_refused_by_field(bias: dict[int, float]) -> None:
    with pytest.raises(ShoalError, match="logit_bias"):
        build_generate("x", Params(logit_bias=bias))


def test_what_is_told_of_a_prompt_is_typed() -> None:
    top = [pb.TopLogprob(id=7, logprob=-0.25, token=b"y")]
    told = [pb.TokenLogprobs(logprob=-0.5, rank=2, token=b"x", top=top)]
    event = pb.GenerateEvent(prompt_logprobs=pb.PromptLogprobs(first_index=3, ids=[5], logprobs=told))
    entry = TokenLogprobs(-0.5, 2, b"x", (TopLogprob(7, -0.25, b"y"),))
    assert event_of(event) == PromptLogprobs((5,), 3, (entry,))
    assert build_generate("hi", Params(prompt_logprobs=0)).HasField("prompt_logprobs")


def test_a_grammar_is_one_of_its_kinds() -> None:
    made = build_generate("x", Params(grammar=Grammar(choice=("a", "b"))))
    assert list(made.grammar.choice.texts) == ["a", "b"]
    assert build_generate("x", Params(grammar=Grammar(json_object=True))).grammar.json_object
    assert not build_generate("x", Params()).HasField("grammar")
    for wrong in (Grammar(), Grammar(regex="a", lark="b")):
        with pytest.raises(InvalidArgument, match="one of its kinds"):
            build_generate("x", Params(grammar=wrong))
