"""Text that is no UTF-8 is told by its field, at any depth; what is broken otherwise is no text's fault."""

import pytest

from chassis.messages import BadMessage, parse
from chassis.messages.text_fields import bad_text
from chassis.wire import gateway_pb2 as pb
from chassis.wire import pipeline_pb2


def spoilt(message: pb.GenerateRequest) -> bytes:
    """With `!` in its texts become a byte that UTF-8 has not."""
    data = message.SerializeToString()
    assert b"!" in data
    return data.replace(b"!", b"\xff")


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (pb.GenerateRequest(prompt="!"), "prompt: not UTF-8 at byte 0"),
        (pb.GenerateRequest(prompt="p", model="né!"), "model: not UTF-8 at byte 3"),
        (pb.GenerateRequest(prompt="p", stop=["a", "b!"]), "stop[1]: not UTF-8 at byte 1"),
        (
            pb.GenerateRequest(chat=pb.Chat(turns=[pb.Turn(role="u"), pb.Turn(role="u", content="hi!")])),
            "chat.turns[1].content: not UTF-8 at byte 2",
        ),
    ],
)
def test_the_field_is_named(message: pb.GenerateRequest, said: str) -> None:
    with pytest.raises(BadMessage) as refused:
        parse(pb.GenerateRequest, spoilt(message))
    assert str(refused.value) == f"not a GenerateRequest: {said}"


@pytest.mark.parametrize(
    "data", [b"\xff\xff", b"\x0a\x05ab", pb.GenerateRequest(prompt="é").SerializeToString()]
)
def test_other_faults_are_not_of_text(data: bytes) -> None:
    assert bad_text(pb.GenerateRequest, data) is None


def test_messages_that_import_others_can_be_looked_at() -> None:
    data = pipeline_pb2.Hello(kind="!").SerializeToString().replace(b"!", b"\xff")
    assert bad_text(pipeline_pb2.Hello, data) == ("kind", 0)
