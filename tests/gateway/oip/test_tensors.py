"""Tensors and messages of the protocol: raw, in fields, in JSON and binary; garbage is BadMessage."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chassis.messages import BadMessage
from chassis.messages.open_inference import InferResponse, build_infer, parse_infer, parse_infer_id
from chassis.messages.tensors import ELEMENTS_MAX, Tensor, from_raw, to_raw
from chassis.wire import open_inference_pb2 as pb
from gateway.http_body import parse_object
from gateway.oip.rest_tensors import generate_request, infer_answer, infer_request


@pytest.mark.parametrize(
    "tensor",
    [
        Tensor("t", "BYTES", (2, 1), (b"", b"\xffab")),
        Tensor("t", "BOOL", (3,), (True, False, True)),
        Tensor("t", "INT8", (2,), (-128, 127)),
        Tensor("t", "UINT64", (1,), (2**64 - 1,)),
        Tensor("t", "FP16", (2,), (0.5, -2.0)),
        Tensor("t", "FP64", (1,), (0.1,)),
        Tensor("t", "INT32", (0,), ()),
    ],
)
def test_raw_contents_come_back(tensor: Tensor) -> None:
    assert from_raw(tensor.name, tensor.datatype, tensor.shape, to_raw(tensor)) == tensor


@pytest.mark.parametrize(
    "datatype, shape, raw, words",
    [
        ("INT32", (2,), b"1234", "4 bytes; 8 for shape [2] of INT32"),
        ("BYTES", (1,), b"\x05\0\0\0ab", "element 0 of 1"),
        ("BYTES", (2,), b"\x01\0\0\0a", "element 1 of 2"),
        ("BYTES", (1,), b"\x01\0\0\0abc", "2 bytes behind"),
        ("BYTES", (ELEMENTS_MAX, ELEMENTS_MAX), b"", "elements; at most"),
        ("INT32", (-1,), b"", "shape [-1]"),
        ("INT32", (1,) * 9, b"", "9 dimensions; at most 8"),
        ("STRING", (1,), b"", "datatype 'STRING'"),
    ],
)
def test_bad_tensors_name_input_and_limit(
    datatype: str, shape: tuple[int, ...], raw: bytes, words: str
) -> None:
    with pytest.raises(BadMessage) as bad:
        from_raw("t", datatype, shape, raw)
    assert str(bad.value).startswith("input 't'") and words in str(bad.value)


def _input(**more: Any) -> pb.ModelInferRequest.InferInputTensor:
    fields = {"name": "a", "datatype": "INT32", "shape": [1]} | more
    return pb.ModelInferRequest.InferInputTensor(**fields)


@pytest.mark.parametrize(
    "message, words",
    [
        (pb.ModelInferRequest(inputs=[_input()], raw_input_contents=[b"", b""]), "2 for 1 inputs"),
        (
            pb.ModelInferRequest(
                inputs=[_input(contents=pb.InferTensorContents(int_contents=[1]))],
                raw_input_contents=[b"1234"],
            ),
            "contents beside raw_input_contents",
        ),
        (
            pb.ModelInferRequest(inputs=[_input(contents=pb.InferTensorContents(fp32_contents=[1]))]),
            "fp32_contents for INT32, whose field is int_contents",
        ),
        (pb.ModelInferRequest(inputs=[_input()]), "0 elements; 1"),
        (pb.ModelInferRequest(inputs=[_input(datatype="FP16")]), "send it raw"),
        (pb.ModelInferRequest(parameters={"p": pb.InferParameter()}), "parameter 'p'"),
        (pb.ModelInferRequest(inputs=[_input()] * 65), "65 tensors; at most 64"),
    ],
)
def test_bad_messages_are_refused(message: pb.ModelInferRequest, words: str) -> None:
    with pytest.raises(BadMessage) as bad:
        parse_infer(message.SerializeToString())
    assert words in str(bad.value)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.binary(max_size=6))
def test_garbage_is_a_bad_message(data: bytes, noise: bytes) -> None:
    fine = pb.ModelInferRequest(
        id="x", inputs=[_input()], parameters={"k": pb.InferParameter(string_param="v")}
    )
    half = fine.SerializeToString()
    for one in (data, half[: len(noise)] + noise + half[len(noise) :]):
        parse_infer_id(one)
        try:
            parse_infer(one)
        except BadMessage:
            pass


def test_answers_in_fields_and_raw() -> None:
    response = InferResponse(
        "m", "1", "i", (Tensor("t", "BYTES", (1,), (b"x",)),), {"f": True, "n": 2, "s": "t"}
    )
    fields = pb.ModelInferResponse.FromString(build_infer(response, raw=False))
    assert fields.outputs[0].contents.bytes_contents == [b"x"] and not fields.raw_output_contents
    assert fields.parameters["f"].bool_param and fields.parameters["n"].int64_param == 2
    raw = pb.ModelInferResponse.FromString(build_infer(response, raw=True))
    assert raw.raw_output_contents == [b"\x01\0\0\0x"] and not raw.outputs[0].contents.ListFields()


def test_rest_in_json_and_binary() -> None:
    binary = b"\x02\0\0\0hi" + b"\x07\0\0\0"
    body = {
        "id": "i",
        "inputs": [
            {"name": "text_input", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 6}},
            {"name": "max_tokens", "datatype": "INT32", "shape": [1], "parameters": {"binary_data_size": 4}},
            {"name": "stop", "datatype": "BYTES", "shape": [1, 2], "data": [["a", "b"]]},
        ],
        "outputs": [{"name": "text_output", "parameters": {"binary_data": True}}, {"name": "finish_reason"}],
    }
    request, in_binary = infer_request("m", "", body, binary)
    assert [t.values for t in request.inputs] == [(b"hi",), (7,), (b"a", b"b")]
    assert request.outputs == ("text_output", "finish_reason") and in_binary == frozenset({"text_output"})
    outputs = (
        Tensor("text_output", "BYTES", (1,), (b"x",)),
        Tensor("finish_reason", "BYTES", (1,), (b"stop",)),
    )
    told, json_len = infer_answer(InferResponse("m", "1", "i", outputs), in_binary)
    assert json_len is not None and told[json_len:] == b"\x01\0\0\0x"
    assert parse_object(told[:json_len])["outputs"][1]["data"] == ["stop"]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["name", "shape", "datatype", "data", "parameters", "binary_data_size", "text_input", "id"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["inputs", "outputs", "parameters", "id", "text_input", "x"]), _JSON, max_size=5
    )
)
def test_any_json_is_a_request_or_a_bad_message(body: dict[str, Any]) -> None:
    for read in (lambda: infer_request("m", "", body, b""), lambda: generate_request("m", "", body)):
        try:
            read()
        except BadMessage:
            pass
