"""Pure. Requests and answers of the protocol's REST form: JSON, and tensors behind it in binary.

In binary, the JSON's length stands in a header; behind it the tensors that say how many bytes of it are
theirs follow in their order.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import orjson

from chassis.messages import BadMessage, check
from chassis.messages.open_inference import INPUTS_MAX, PARAMETERS_MAX, InferRequest, InferResponse, Parameter
from chassis.messages.tensors import Tensor, Value, count_of, from_raw, to_raw

JSON_LENGTH = "inference-header-content-length"
SIZE = "binary_data_size"
BINARY = "binary_data"
BINARY_ALL = "binary_data_output"
NESTING_MAX = 16
# of a request to generate: these are the request's, all else is options
CIRCUMSTANCES = ("priority", "timeout", "client_key", "resume_window_s")


def infer_request(
    model: str, version: str, body: Mapping[str, Any], binary: bytes
) -> tuple[InferRequest, frozenset[str] | None]:
    """And the names of the outputs that are to be binary; None: all. Raises BadMessage."""
    parameters = _parameters(body.get("parameters"))
    inputs = body.get("inputs")
    check(isinstance(inputs, list), "inputs: a list of tensors")
    assert isinstance(inputs, list)
    check(len(inputs) <= INPUTS_MAX, f"inputs: {len(inputs)} tensors; at most {INPUTS_MAX}")
    tensors, at = [], 0
    for i, given in enumerate(inputs):
        tensor, at = _tensor(i, given, binary, at)
        tensors.append(tensor)
    check(at == len(binary), f"body: {len(binary) - at} bytes behind its binary tensors")
    outputs, in_binary = _outputs(body.get("outputs"))
    every = parameters.get(BINARY_ALL) is True
    request = InferRequest(model, version, _id(body), parameters, tuple(tensors), outputs)
    return request, None if every else frozenset(in_binary)


def _id(body: Mapping[str, Any]) -> str:
    found = body.get("id", "")
    check(isinstance(found, str), "id: text")
    return str(found)


def _parameters(found: Any) -> dict[str, Parameter]:
    if found is None:
        return {}
    check(isinstance(found, dict), "parameters: an object")
    check(len(found) <= PARAMETERS_MAX, f"parameters: {len(found)}; at most {PARAMETERS_MAX}")
    for key, value in found.items():
        check(
            isinstance(value, bool | int | float | str), f"parameter {key[:100]!r}: text, number, true, false"
        )
    return dict(sorted(found.items()))


def _outputs(found: Any) -> tuple[tuple[str, ...], list[str]]:
    if found is None:
        return (), []
    check(isinstance(found, list) and len(found) <= INPUTS_MAX, f"outputs: a list of at most {INPUTS_MAX}")
    names, binary = [], []
    for output in found:
        check(isinstance(output, dict) and isinstance(output.get("name"), str), "outputs: each has a name")
        names.append(output["name"])
        if _parameters(output.get("parameters")).get(BINARY) is True:
            binary.append(output["name"])
    return tuple(names), binary


def _tensor(i: int, given: Any, binary: bytes, at: int) -> tuple[Tensor, int]:
    """And where the next one's bytes begin."""
    check(isinstance(given, dict), f"inputs[{i}]: an object")
    name, datatype, shape = given.get("name"), given.get("datatype"), given.get("shape")
    check(isinstance(name, str), f"inputs[{i}].name: text")
    check(isinstance(datatype, str), f"input {name[:100]!r}: datatype: text")
    whole = isinstance(shape, list) and all(type(n) is int for n in shape)
    check(whole, f"input {name[:100]!r}: shape: a list of whole numbers")
    size = _parameters(given.get("parameters")).get(SIZE)
    if size is None:
        count = count_of(name, datatype, shape)
        values = _values(name, datatype, _flat(name, given.get("data"), count))
        return Tensor(name, datatype, tuple(shape), values), at
    check(
        type(size) is int and 0 <= size <= len(binary) - at, f"input {name[:100]!r}: {SIZE}: beyond the body"
    )
    check("data" not in given, f"input {name[:100]!r}: data beside {SIZE}")
    assert isinstance(size, int)
    return from_raw(name, datatype, shape, binary[at : at + size]), at + size


def _flat(name: str, data: Any, count: int) -> list[Any]:
    """Nested as the shape is, or flat."""
    check(isinstance(data, list), f"input {name[:100]!r}: data: a list")
    for _ in range(NESTING_MAX):
        if not any(isinstance(one, list) for one in data):
            break
        check(all(isinstance(one, list) for one in data), f"input {name[:100]!r}: data: nested unevenly")
        data = [one for inner in data for one in inner]
    check(len(data) == count, f"input {name[:100]!r}: {len(data)} elements of data; {count} for its shape")
    return list(data)


def _values(name: str, datatype: str, data: list[Any]) -> tuple[Value, ...]:
    if datatype not in ("BYTES", "BOOL") and set(map(type, data)) <= {int, float}:
        return tuple(data)  # there may be a million
    return tuple([_value(name, datatype, value) for value in data])


def _value(name: str, datatype: str, value: Any) -> Value:
    match value:
        case str() if datatype == "BYTES":
            return value.encode()
        case bool() if datatype == "BOOL":
            return value
        case int() | float() if datatype not in ("BYTES", "BOOL") and not isinstance(value, bool):
            return value
    raise BadMessage(f"input {name[:100]!r}: {repr(value)[:60]} is not of {datatype}")


def infer_answer(response: InferResponse, binary: Collection[str] | None) -> tuple[bytes, int | None]:
    """The body, and the length of its JSON if tensors follow it."""
    outputs, tail = [], []
    for tensor in response.outputs:
        told = _told(tensor)
        if binary is None or tensor.name in binary:
            tail.append(to_raw(tensor))
            told["parameters"] = {SIZE: len(tail[-1])}
        else:
            told["data"] = _plain(tensor)
        outputs.append(told)
    body: dict[str, Any] = {"model_name": response.model, "model_version": response.version}
    if response.id:
        body["id"] = response.id
    if response.parameters:
        body["parameters"] = dict(response.parameters)
    head = orjson.dumps(body | {"outputs": outputs})
    return head + b"".join(tail), len(head) if tail else None


def _told(tensor: Tensor) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}


def _plain(tensor: Tensor) -> list[Any]:
    return [value.decode() if isinstance(value, bytes) else value for value in tensor.values]


# ---- generate --------------------------------------------------------------------------------------


def generate_request(model: str, version: str, body: Mapping[str, Any]) -> InferRequest:
    """Raises BadMessage."""
    parameters: dict[str, Parameter] = {}
    options: dict[str, Any] = {}
    outputs: tuple[str, ...] = ()
    tensors = []
    for key, value in [*body.items(), *_nested(body, "parameters").items()]:
        if key in ("parameters", "id") and value is body.get(key):
            continue
        if key in ("text_input", "input_ids"):
            tensors.append(_prompt(key, value))
        elif key == "outputs":
            outputs, _ = _outputs([{"name": name} for name in value] if isinstance(value, list) else value)
        elif key == "sampling_parameters":
            options |= _nested({key: _unpacked(value)}, key)
        elif key in CIRCUMSTANCES or key.startswith(("sequence_", "triton_")):
            parameters |= _parameters({key: value})
        else:
            check(key not in options, f"{key[:100]}: given twice")
            options[key] = value
    try:
        tensors.append(Tensor("sampling_parameters", "BYTES", (1,), (orjson.dumps(options),)))
    except orjson.JSONEncodeError as error:
        raise BadMessage(f"body: {error}") from None
    return InferRequest(model, version, _id(body), parameters, tuple(tensors), outputs)


def _nested(body: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = body.get(key)
    check(found is None or isinstance(found, dict), f"{key}: an object")
    return found or {}


def _unpacked(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise BadMessage(f"sampling_parameters: not JSON: {error}") from None


def _prompt(key: str, value: Any) -> Tensor:
    if key == "text_input":
        texts = value if isinstance(value, list) else [value]
        values = tuple(_value(key, "BYTES", text) for text in texts)
        return Tensor(key, "BYTES", (len(values),), values)
    check(
        isinstance(value, list) and all(type(i) is int for i in value), "input_ids: a list of whole numbers"
    )
    return Tensor(key, "INT32", (1, len(value)), tuple(value))


def generate_answer(response: InferResponse) -> bytes:
    """One element is no list."""
    body: dict[str, Any] = {"model_name": response.model, "model_version": response.version}
    if response.id:
        body["id"] = response.id
    body |= response.parameters
    for tensor in response.outputs:
        body[tensor.name] = _one(_plain(tensor))
    return orjson.dumps(body)


def _one(values: Sequence[Any]) -> Any:
    return values[0] if len(values) == 1 else list(values)
