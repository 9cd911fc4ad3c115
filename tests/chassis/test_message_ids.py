"""What others send is answered on subjects made of their ids: none may break one, or be several."""

import pytest

from chassis.messages import BadMessage
from chassis.messages.chunk import parse_chunk
from chassis.messages.load import parse_load
from chassis.messages.ownership import parse_takeover_question, parse_to_batcher
from chassis.messages.registry import parse_batcher, parse_kvstore, parse_model
from chassis.messages.request import parse_record, parse_request
from chassis.wire import pipeline_pb2
from chassis.wire import request_pb2 as pb

GOOD = "01m8pgme1nepaqcdrkdq358ky1"
BAD = ("", "a b", "*", ">", "a.b", "é", "a\r\nPUB x 1\r\n", "x" * 201)


def request(gateway: str) -> bytes:
    return pb.Request(
        id="r1",
        gateway=gateway,
        model="fake",
        prompt_ids=[1],
        limits=pb.Limits(max_tokens=1),
        sampling=pb.Sampling(top_p=1),
    ).SerializeToString()


@pytest.mark.parametrize("value", [GOOD, *BAD])
def test_ids_that_no_subject_can_hold_are_refused(value: str) -> None:
    takeover = pb.TakeoverAnswer(request_id="r", gateway=value, attempt=1, no_minimum=2)
    messages = [
        (parse_request, request(value)),
        (parse_record, pb.Record(claim=pb.Claim(attempt=1, boot=value)).SerializeToString()),
        (parse_chunk, pb.Chunk(boot=value, number=1).SerializeToString()),
        (
            parse_takeover_question,
            pb.TakeoverQuestion(request_id="r", attempt=1, boot=value).SerializeToString(),
        ),
        (parse_to_batcher, pb.ToBatcher(takeover=takeover).SerializeToString()),
        (parse_to_batcher, pb.ToBatcher(attach=pb.Attach(gateway=value, attempt=1)).SerializeToString()),
        (parse_to_batcher, pb.ToBatcher(detached=pb.Detached(gateway=value)).SerializeToString()),
        (parse_to_batcher, pb.ToBatcher(refused=pb.Refused(gateway=value)).SerializeToString()),
        (parse_batcher, pipeline_pb2.BatcherEntry(boot=value).SerializeToString()),
        (parse_load, pipeline_pb2.PipelineLoad(boot=value).SerializeToString()),
        (parse_kvstore, pipeline_pb2.KvstoreEntry(boot=value, rpc_address="h:1").SerializeToString()),
        (parse_model, pipeline_pb2.ModelEntry(name="m", card_digest=value).SerializeToString()),
    ]
    for parse, data in messages:
        if value == GOOD:
            parse(data)
        else:
            with pytest.raises(BadMessage):
                parse(data)


@pytest.mark.parametrize("token", ["", "a b", "$JS.ACK\r\nPUB x 1", "é", "$" * 1001])
def test_an_ack_token_is_a_subject(token: str) -> None:
    def question(ack_token: str) -> bytes:
        return pb.ToBatcher(owner=pb.OwnerQuestion(request_id="r", ack_token=ack_token)).SerializeToString()

    parse_to_batcher(question("$JS.ACK.REQUESTS.b-fake-5.1.2.3.4.0"))
    with pytest.raises(BadMessage):
        parse_to_batcher(question(token))


def test_a_cancel_may_follow_nobody() -> None:
    parse_record(pb.Record(cancel=pb.CancelMark(reason="gone")).SerializeToString())
    with pytest.raises(BadMessage):
        parse_record(pb.Record(cancel=pb.CancelMark(boot="a b")).SerializeToString())
