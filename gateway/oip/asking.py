"""Pure. A request of the Open Inference Protocol as calls, one a prompt.

Rules: `text_input` of n elements, or `input_ids` of n rows, is n prompts, whatever the shape; an option's
tensor has one element for all of them, or one (of lists: a row) for each. An option is said once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import orjson

from chassis.errors import Code, Status
from chassis.messages.gateway import GenerateCall
from chassis.messages.open_inference import InferRequest, Parameter
from chassis.messages.open_inference_models import TensorShape
from chassis.messages.sampling import TOP_LOGPROBS_MAX
from chassis.messages.tensors import Tensor
from gateway.admission import PRIORITY_MAX, QUEUE_TIMEOUT_MS_MAX, invalid
from gateway.oip.options import OPTIONS, Option, read_bool, read_ids, read_int, read_text
from gateway.oip.outputs import LOGPROBS, OUTPUTS, UNASKED
from gateway.sampling import GRAMMAR_NESTING_MAX, U32_MAX, U64_MAX, nesting_of

VERSION = "1"
PROMPTS_MAX = 256
ROWS_MAX = 256  # prompts times choices
ID_LEN_MAX = 256
JSON_BYTES_MAX = 1 << 20
JSON_NESTING_MAX = GRAMMAR_NESTING_MAX + 1  # a schema, in what it is asked with

# what is asked beside options: name, datatype
SWITCHES = {
    "stream": "stream",
    "streaming": "stream",
    "exclude_input_in_output": "exclude_input_in_output",
    "return_finish_reason": "finish_reason",
    "return_num_input_tokens": "num_input_tokens",
    "return_num_output_tokens": "num_output_tokens",
}
INPUTS = (
    TensorShape("text_input", "BYTES", (-1,)),
    TensorShape("input_ids", "INT32", (-1, -1)),
    TensorShape("input_lengths", "INT32", (-1,)),
    *(TensorShape(name, "BOOL", (-1,)) for name in SWITCHES),
    TensorShape("sampling_parameters", "BYTES", (-1,)),
    *(
        TensorShape(name, o.datatype, (-1, -1) if o.many else (-1,))
        for name, o in OPTIONS.items()
        if o.datatype
    ),
)
_KNOWN = {shape.name: shape.datatype for shape in INPUTS}
_OUTPUTS = {shape.name for shape in OUTPUTS}
_FAMILIES = {"BYTES": ("BYTES",), "BOOL": ("BOOL", "U", "INT"), "FP32": ("FP", "INT", "U")}


@dataclass(frozen=True, slots=True)
class Wanted:
    """A place in a sequence of requests."""

    id: str
    start: bool
    end: bool


@dataclass(frozen=True, slots=True)
class Asked:
    id: str
    calls: tuple[GenerateCall, ...]
    outputs: tuple[str, ...]
    stream: bool | None  # None: nothing is said of it
    with_input: bool  # answers begin with their prompts
    sequence: Wanted | None = None

    @property
    def choices(self) -> int:
        return self.calls[0].n or 1


def asked_of(request: InferRequest) -> Asked:
    """Raises Status."""
    if len(request.id) > ID_LEN_MAX:
        raise invalid(f"id: {len(request.id)} characters; at most {ID_LEN_MAX}")
    if request.version not in ("", VERSION):
        raise _no_version(request.model, request.version)
    tensors = _named(request)
    prompts = _prompts(tensors)
    said = _Said(len(prompts))
    for name, tensor in tensors.items():
        if name == "sampling_parameters":
            for key, value in _json_of(tensor).items():
                said.say(f"sampling_parameters: {key}", key, [value] * len(prompts))
        elif name in OPTIONS or name in SWITCHES:
            said.say(f"input {name}", name, _by_row(name, tensor, len(prompts)))
    circumstances = _of_parameters(request.parameters, said)
    outputs = _outputs(request, said.switches)
    calls = []
    for prompt, fields in zip(prompts, said.fields, strict=True):
        call = GenerateCall(model=request.model, **prompt, **fields, **circumstances)
        if LOGPROBS & set(outputs) and call.top_logprobs is None:
            call = replace(call, top_logprobs=0)
        if call.top_logprobs is not None and call.top_logprobs <= TOP_LOGPROBS_MAX:
            call = replace(call, top_logprobs=0)  # no output tells more than the id's own
        calls.append(call)
    _check_rows(calls)
    with_input = said.switches.get("exclude_input_in_output") is False
    if with_input and "text_input" not in tensors:
        raise invalid("exclude_input_in_output: false; only with text_input")
    sequence = _sequence(request.parameters, calls)
    return Asked(request.id, tuple(calls), outputs, said.switches.get("stream"), with_input, sequence)


def _sequence(parameters: Mapping[str, Parameter], calls: list[GenerateCall]) -> Wanted | None:
    """Raises Status."""
    name = parameters.get("sequence_id", 0)
    start, end = (
        read_bool(f"parameter {key}", parameters.get(key, False))
        for key in ("sequence_start", "sequence_end")
    )
    if isinstance(name, bool | float):
        raise invalid(f"parameter sequence_id: {name}; a whole number or text")
    if name in (0, ""):
        if start or end:
            raise invalid("parameter sequence_start, sequence_end: only with a sequence_id")
        return None
    if len(str(name)) > ID_LEN_MAX:
        raise invalid(f"parameter sequence_id: {len(str(name))} characters; at most {ID_LEN_MAX}")
    if len(calls) != 1 or (calls[0].n or 1) != 1 or calls[0].prompt is None:
        raise invalid("parameter sequence_id: only with one text_input, and one choice of it")
    return Wanted(str(name), start, end)


def _no_version(model: str, version: str) -> Status:
    return Status(
        Code.NOT_FOUND, f"model_version: {version[:40]!r} of model {model[:200]} is not served; {VERSION} is"
    )


def check_version(model: str, version: str) -> None:
    """Raises Status."""
    if version not in ("", VERSION):
        raise _no_version(model, version)


def _check_rows(calls: list[GenerateCall]) -> None:
    if len({call.n for call in calls}) > 1:
        raise invalid("n: not the same for all prompts of a request")
    rows = len(calls) * (calls[0].n or 1)
    if rows > ROWS_MAX:
        raise invalid(f"text_input: {len(calls)} prompts with {calls[0].n} choices each; at most {ROWS_MAX}")


class _Said:
    """What is asked, as it is read."""

    def __init__(self, prompts: int) -> None:
        self.fields: list[dict[str, Any]] = [{} for _ in range(prompts)]
        self.switches: dict[str, bool] = {}
        self._by: dict[str, str] = {}  # what is said already: by whom

    def say(self, where: str, name: str, values: list[Any]) -> None:
        """One value a prompt. Raises Status."""
        if (switch := SWITCHES.get(name)) is not None:
            self._once(switch, where)
            given = [read_bool(where, value) for value in values]
            if len(set(given)) > 1:
                raise invalid(f"{where}: not the same for all prompts of a request")
            self.switches[switch] = given[0]
            return
        option: Option | None = OPTIONS.get(name)
        if option is None:
            raise invalid(f"{where[:200]}: not known; known are {', '.join(OPTIONS)}")
        if all(value is values[0] for value in values):
            read = [option.read(where, values[0])] * len(values)  # a long list for many prompts is read once
        else:
            read = [option.read(where, value) for value in values]
        if option.field == "top_logprobs" and read[0] is None:
            return
        if option.field == "":
            return
        for fields, value in zip(self.fields, read, strict=True):
            if option.field == "stop_token_ids":
                fields[option.field] = (*fields.get(option.field, ()), *value)
            else:
                if option.field != "top_logprobs":
                    self._once(option.field, where)
                fields[option.field] = value

    def _once(self, what: str, where: str) -> None:
        if self._by.setdefault(what, where) != where:
            raise invalid(f"{where[:200]}: {what} is given by {self._by[what][:200]} already")


def _named(request: InferRequest) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for tensor in request.inputs:
        name = tensor.name
        expected = _KNOWN.get(name)
        if expected is None:
            raise invalid(f"input {name[:100]!r}: not known; known are {', '.join(_KNOWN)}")
        if name in found:
            raise invalid(f"input {name}: given twice")
        family = _FAMILIES.get(expected, ("INT", "UINT"))
        if not tensor.datatype.startswith(family):
            raise invalid(f"input {name}: datatype {tensor.datatype}; {expected}")
        found[name] = tensor
    return found


def _prompts(tensors: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """The fields of each."""
    text, ids = tensors.get("text_input"), tensors.get("input_ids")
    if (text is None) == (ids is None):
        raise invalid("inputs: exactly one of text_input, input_ids")
    lengths = tensors.get("input_lengths")
    if text is not None:
        if lengths is not None:
            raise invalid("input input_lengths: only beside input_ids")
        _check_count("text_input", len(text.values))
        return [{"prompt": read_text("input text_input", value)} for value in text.values]
    assert ids is not None
    width = ids.shape[-1] if ids.shape else 1
    rows = len(ids.values) // width if width else 0
    _check_count("input_ids", rows)
    values = read_ids("input input_ids", ids.values)
    ends = [width] * rows
    if lengths is not None:
        if len(lengths.values) != rows:
            raise invalid(f"input input_lengths: {len(lengths.values)} elements; {rows}, one a prompt")
        ends = [read_int("input input_lengths", value, width, 1) for value in lengths.values]
    return [{"token_ids": tuple(values[i * width : i * width + end])} for i, end in enumerate(ends)]


def _check_count(name: str, count: int) -> None:
    if not 0 < count <= PROMPTS_MAX:
        raise invalid(f"input {name}: {count} prompts; 1 to {PROMPTS_MAX}")


def _by_row(name: str, tensor: Tensor, prompts: int) -> list[Any]:
    """One value a prompt; of lists, the row."""
    values = list(tensor.values)
    many = name in OPTIONS and OPTIONS[name].many
    if many:
        if len(tensor.shape) > 1 and tensor.shape[0] == prompts:
            width = len(values) // prompts
            return [values[i * width : (i + 1) * width] for i in range(prompts)]
        return [values] * prompts
    if len(values) not in (1, prompts):
        raise invalid(f"input {name}: {len(values)} elements; 1 or {prompts}, one a prompt")
    return values * prompts if len(values) == 1 else values


def _json_of(tensor: Tensor) -> dict[str, Any]:
    if len(tensor.values) != 1:
        raise invalid(f"input sampling_parameters: {len(tensor.values)} elements; 1")
    data = tensor.values[0]
    assert isinstance(data, bytes)
    if len(data) > JSON_BYTES_MAX:
        raise invalid(f"input sampling_parameters: {len(data)} bytes; at most {JSON_BYTES_MAX}")
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise invalid(f"input sampling_parameters: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise invalid("input sampling_parameters: not a JSON object")
    if nesting_of(found) > JSON_NESTING_MAX:
        raise invalid(f"input sampling_parameters: nested deeper than {JSON_NESTING_MAX}")
    return {key: value for key, value in found.items() if value is not None}


def _of_parameters(parameters: Mapping[str, Parameter], said: _Said) -> dict[str, Any]:
    """What they say beside options. Raises Status."""
    found: dict[str, Any] = {}
    for key, value in parameters.items():
        where = f"parameter {key[:100]}"
        match key:
            case "priority":
                level = read_int(where, value, PRIORITY_MAX + 1)
                if level:  # 1 is the highest, 0 the default
                    found["priority"] = level - 1
            case "timeout":
                micros = read_int(where, value, U64_MAX)
                if micros:
                    found["queue_timeout_ms"] = min(-(-micros // 1000), QUEUE_TIMEOUT_MS_MAX)
            case "sequence_id" | "sequence_start" | "sequence_end":
                pass  # see _sequence
            case "client_key":
                found["client_key"] = read_text(where, value)
            case "resume_window_s":
                found["resume_window_s"] = read_int(where, value, U32_MAX)
            case "binary_data_output" | "headers":
                pass
            case _ if key.startswith("triton_"):
                pass
            case _:
                said.say(where, key, [value] * len(said.fields))
    return found


def _outputs(request: InferRequest, switches: Mapping[str, bool]) -> tuple[str, ...]:
    for name in request.outputs:
        if name not in _OUTPUTS:
            raise invalid(f"output {name[:100]!r}: not known; known are {', '.join(s.name for s in OUTPUTS)}")
    told = list(dict.fromkeys(request.outputs or UNASKED))
    for name in ("finish_reason", "num_input_tokens", "num_output_tokens"):
        if switches.get(name) and name not in told:
            told.append(name)
        if switches.get(name) is False and not request.outputs and name in told:
            told.remove(name)
    return tuple(told)
