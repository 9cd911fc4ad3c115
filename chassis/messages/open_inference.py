"""What clients of the Open Inference Protocol ask and are answered: `proto/open_inference.proto`.

Its front door over REST speaks in the same value types. What the server tells of models is in
`open_inference_models.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chassis.messages import BadMessage, check, parse
from chassis.messages.tensors import Tensor, count_of, from_raw, to_raw
from chassis.wire import open_inference_pb2 as pb

INPUTS_MAX = 64
PARAMETERS_MAX = 64
Parameter = bool | int | float | str

_FIELDS = {
    "BOOL": "bool_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


@dataclass(frozen=True, slots=True)
class InferRequest:
    model: str = ""
    version: str = ""
    id: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[str, ...] = ()  # none: all that are told unasked
    raw: bool = False  # its tensors were, so the answer's are


@dataclass(frozen=True, slots=True)
class InferResponse:
    model: str
    version: str
    id: str
    outputs: tuple[Tensor, ...]
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InferFailure:
    """Of one request on a stream."""

    model: str
    id: str
    message: str
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


def parse_infer(data: bytes) -> InferRequest:
    """Raises BadMessage."""
    m = parse(pb.ModelInferRequest, data)
    check(len(m.inputs) <= INPUTS_MAX, f"inputs: {len(m.inputs)} tensors; at most {INPUTS_MAX}")
    check(len(m.parameters) <= PARAMETERS_MAX, f"parameters: {len(m.parameters)}; at most {PARAMETERS_MAX}")
    raw = bool(m.raw_input_contents)
    if raw:
        given = len(m.raw_input_contents)
        check(given == len(m.inputs), f"raw_input_contents: {given} for {len(m.inputs)} inputs")
        for tensor in m.inputs:
            filled = tensor.contents.ListFields()
            check(not filled, f"input {tensor.name[:100]!r}: contents beside raw_input_contents")
        pairs = zip(m.inputs, m.raw_input_contents, strict=True)
        inputs = [from_raw(t.name, t.datatype, t.shape, contents) for t, contents in pairs]
    else:
        inputs = [_from_contents(tensor) for tensor in m.inputs]
    return InferRequest(
        model=m.model_name,
        version=m.model_version,
        id=m.id,
        parameters={key: _parameter(key, value) for key, value in sorted(m.parameters.items())},
        inputs=tuple(inputs),
        outputs=tuple(output.name for output in m.outputs),
        raw=raw,
    )


def parse_infer_id(data: bytes) -> str:
    """Of a request that may be bad otherwise; empty if it can't be told."""
    try:
        return pb.ModelInferRequest.FromString(data).id
    except Exception:
        return ""


def _from_contents(m: pb.ModelInferRequest.InferInputTensor) -> Tensor:
    name = f"input {m.name[:100]!r}"
    count = count_of(m.name, m.datatype, m.shape)
    if (where := _FIELDS.get(m.datatype)) is None:
        raise BadMessage(f"{name}: {m.datatype} has no contents field; send it raw")
    filled = [found.name for found, _ in m.contents.ListFields()]
    check(set(filled) <= {where}, f"{name}: {', '.join(filled)} for {m.datatype}, whose field is {where}")
    values = getattr(m.contents, where)
    check(len(values) == count, f"{name}: {len(values)} elements; {count} for shape {list(m.shape)}")
    return Tensor(m.name, m.datatype, tuple(m.shape), tuple(values))


def _parameter(key: str, m: pb.InferParameter) -> Parameter:
    which = m.WhichOneof("parameter_choice")
    check(which is not None, f"parameter {key[:100]!r}: has no value")
    value: Parameter = getattr(m, str(which))
    return value


def build_infer(response: InferResponse, raw: bool) -> bytes:
    return _response(response, raw).SerializeToString()


def build_stream_infer(response: InferResponse, raw: bool) -> bytes:
    return pb.ModelStreamInferResponse(infer_response=_response(response, raw)).SerializeToString()


def build_stream_failure(failure: InferFailure) -> bytes:
    about = pb.ModelInferResponse(
        model_name=failure.model, id=failure.id, parameters=_parameters(failure.parameters)
    )
    return pb.ModelStreamInferResponse(
        error_message=failure.message, infer_response=about
    ).SerializeToString()


def _response(response: InferResponse, raw: bool) -> pb.ModelInferResponse:
    outputs = [_tensor(tensor, raw) for tensor in response.outputs]
    return pb.ModelInferResponse(
        model_name=response.model,
        model_version=response.version,
        id=response.id,
        parameters=_parameters(response.parameters),
        outputs=outputs,
        raw_output_contents=[to_raw(tensor) for tensor in response.outputs] if raw else (),
    )


def _tensor(tensor: Tensor, raw: bool) -> pb.ModelInferResponse.InferOutputTensor:
    m = pb.ModelInferResponse.InferOutputTensor(
        name=tensor.name, datatype=tensor.datatype, shape=tensor.shape
    )
    if not raw:
        contents: Sequence[Any] = tensor.values
        getattr(m.contents, _FIELDS[tensor.datatype]).extend(contents)
    return m


def _parameters(parameters: Mapping[str, Parameter]) -> dict[str, pb.InferParameter]:
    return {key: _build_parameter(value) for key, value in parameters.items()}


def _build_parameter(value: Parameter) -> pb.InferParameter:
    match value:
        case bool():
            return pb.InferParameter(bool_param=value)
        case int():
            return pb.InferParameter(int64_param=value)
        case float():
            return pb.InferParameter(double_param=value)
        case str():
            return pb.InferParameter(string_param=value)
