"""Requests of the Open Inference Protocol as calls: conventions, prompts, refusals and what they say."""

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chassis.errors import Code, Status
from chassis.messages.open_inference import InferRequest
from chassis.messages.sampling import Grammar, GrammarKind
from chassis.messages.tensors import DATATYPES, Tensor
from gateway.oip.asking import JSON_NESTING_MAX, PROMPTS_MAX, ROWS_MAX, asked_of
from gateway.oip.options import OPTIONS, Option


def texts(name: str, *values: bytes, shape: tuple[int, ...] | None = None) -> Tensor:
    return Tensor(name, "BYTES", shape or (len(values),), values)


def ints(name: str, *values: int, shape: tuple[int, ...] | None = None) -> Tensor:
    return Tensor(name, "INT32", shape or (len(values),), values)


def request(*inputs: Tensor, **more: Any) -> InferRequest:
    return InferRequest("m", "", "", inputs=inputs, **more)


ONE = texts("text_input", b"One")


def sampling(**options: Any) -> Tensor:
    return texts("sampling_parameters", orjson.dumps(options))


def test_the_conventions_are_one_call() -> None:
    tensors = asked_of(
        request(
            ONE,
            ints("max_tokens", 7),
            Tensor("temperature", "FP32", (1,), (0.5,)),
            Tensor("random_seed", "UINT64", (1, 1), (9,)),
            texts("stop_words", b"END", b"", shape=(1, 2)),
            Tensor("stream", "BOOL", (1,), (True,)),
        )
    )
    (call,) = tensors.calls
    assert (call.model, call.prompt, call.max_tokens, call.temperature) == ("m", "One", 7, 0.5)
    assert (call.seed, call.stop, tensors.stream, tensors.with_input) == (9, ("END",), True, False)
    options = {"max_tokens": "7", "temperature": "0.5", "seed": 9, "stop": "END", "top_k": None}
    assert asked_of(request(ONE, sampling(**options))).calls == tensors.calls
    parameters = {"max_tokens": 7, "temperature": 0.5, "seed": "9", "stop": "END", "streaming": True}
    assert asked_of(request(ONE, parameters=parameters)) == tensors


def test_what_is_said_of_one_prompt_or_each() -> None:
    two = texts("text_input", b"One", b"Two", shape=(2, 1))
    asked = asked_of(
        request(
            two, ints("max_tokens", 3, 4), ints("top_k", -1), texts("bad_words", b"a", b"b", shape=(2, 1))
        )
    )
    assert [(c.prompt, c.max_tokens, c.top_k, c.bad_words) for c in asked.calls] == [
        ("One", 3, 0, ("a",)),
        ("Two", 4, 0, ("b",)),
    ]
    rows = asked_of(request(ints("input_ids", 1, 2, 3, 4, shape=(2, 2)), ints("input_lengths", 2, 1)))
    assert [c.token_ids for c in rows.calls] == [(1, 2), (3,)]


def test_circumstances_mean_what_triton_means() -> None:
    def call(**parameters: Any) -> Any:
        return asked_of(request(ONE, parameters=parameters)).calls[0]

    assert (call(priority=1).priority, call(priority=10).priority, call(priority=0).priority) == (0, 9, None)
    assert call(timeout=1).queue_timeout_ms == 1 and call(timeout=2_500_000).queue_timeout_ms == 2500
    assert call(timeout="1500").queue_timeout_ms == 2
    assert call(triton_enable_empty_final_response=True, sequence_id=0) == call()


def test_outputs_and_what_they_need() -> None:
    assert asked_of(request(ONE)).outputs == ("text_output", "finish_reason")
    asked = asked_of(request(ONE, outputs=("cum_log_probs",)))
    assert asked.outputs == ("cum_log_probs",) and asked.calls[0].top_logprobs == 0
    lengths = Tensor("return_num_output_tokens", "BOOL", (1,), (True,))
    assert asked_of(request(ONE, lengths)).outputs == ("text_output", "finish_reason", "num_output_tokens")


def test_grammars_and_biases() -> None:
    (call,) = asked_of(request(ONE, sampling(guided_json={"type": "object"}, logit_bias={"5": "1.5"}))).calls
    assert call.grammar == Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')
    assert call.logit_bias == ((5, 1.5),)


@pytest.mark.parametrize(
    "asked, words",
    [
        (request(), "text_input"),
        (request(ONE, ONE), "twice"),
        (request(ONE, ints("input_ids", 1)), "exactly one"),
        (request(texts("text_input", b"\xff")), "not UTF-8 at byte 0"),
        (request(texts("text_input", *[b"x"] * (PROMPTS_MAX + 1))), f"1 to {PROMPTS_MAX}"),
        (request(texts("text_input", *[b"x"] * 200), parameters={"n": 2}), f"at most {ROWS_MAX}"),
        (request(ONE, ints("max_tokens", 1, 2)), "input max_tokens: 2 elements"),
        (request(ONE, texts("max_tokens", b"7")), "input max_tokens: datatype BYTES; INT32"),
        (request(ONE, ints("max_tokens", 1), sampling(max_tokens=2)), "given by input max_tokens already"),
        (request(ONE, ints("foo", 1)), "'foo': not known"),
        (request(ONE, sampling(temprature=1)), "temprature"),
        (request(ONE, texts("sampling_parameters", b'{"max_tokens": 1%s}' % (b"0" * 30))), "max_tokens"),
        (request(ONE, sampling(temperature="hot")), "temperature: 'hot'; a number"),
        (request(ONE, sampling(best_of=True)), "best_of: True; a whole number"),
        (request(ONE, texts("sampling_parameters", b"[" * 100_000)), "not JSON"),
        (request(ONE, parameters={"priority": 11}), "parameter priority: 11; 0 to 10"),
        (request(ONE, parameters={"sequence_id": 4, "n": 2}), "sequence_id: only with one text_input"),
        (request(ONE, parameters={"sequence_start": True}), "sequence_start"),
        (request(ONE, ints("beam_width", 4)), "beam_width: 4; only 1"),
        (request(ONE, outputs=("logits",)), "output 'logits'"),
    ],
)
def test_refusals_name_what_is_wrong(asked: InferRequest, words: str) -> None:
    with pytest.raises(Status) as refused:
        asked_of(asked)
    assert refused.value.code is Code.INVALID_ARGUMENT and words in refused.value.message


def test_options_nest_as_deep_as_a_schema_may() -> None:
    for depth in (JSON_NESTING_MAX, 1000):
        deep = b'{"temperature": ' + b"[" * depth + b"]" * depth + b"}"
        with pytest.raises(Status, match="input sampling_parameters: nested deeper than"):
            asked_of(request(ONE, texts("sampling_parameters", deep)))


def test_what_is_said_of_all_prompts_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty thousand ids for 256 prompts would keep everybody waiting for seconds."""
    read: list[Any] = []

    def noted(name: str, value: Any) -> tuple[int, ...]:
        read.append(value)
        return (1,)

    option = Option("allowed_token_ids", noted, "INT32", many=True)
    monkeypatch.setattr("gateway.oip.asking.OPTIONS", {**OPTIONS, "allowed_token_ids": option})
    two = texts("text_input", b"One", b"Two")
    for more in (ints("allowed_token_ids", 1, 2, 3), sampling(allowed_token_ids=[1, 2, 3])):
        asked = asked_of(request(two, more))
        assert [call.allowed_token_ids for call in asked.calls] == [(1,), (1,)]
    assert read == [[1, 2, 3], [1, 2, 3]]


@pytest.mark.parametrize("wrong", [-1, 1 << 32, 1.5, True])
def test_one_bad_id_among_many_is_told(wrong: Any) -> None:
    with pytest.raises(Status, match=f"input_ids: {wrong}; "):
        asked_of(request(Tensor("input_ids", "INT64", (1, 3), (1, wrong, 2))))


def test_another_version_is_not_found() -> None:
    with pytest.raises(Status) as refused:
        asked_of(InferRequest("m", "2", inputs=(ONE,)))
    assert refused.value.code is Code.NOT_FOUND and "'2'" in refused.value.message


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_NAMES = st.sampled_from(
    ["text_input", "input_ids", "input_lengths", "max_tokens", "stop", "seed", "stream", "stop_words", "x"]
)


@st.composite
def _tensors(draw: st.DrawFn) -> Tensor:
    datatype = draw(st.sampled_from(DATATYPES))
    element: Any = {"BYTES": st.binary(max_size=4), "BOOL": st.booleans()}.get(datatype)
    if element is None:
        element = st.floats() if datatype.startswith("FP") else st.integers(-(2**63), 2**64)
    values = tuple(draw(st.lists(element, max_size=4)))
    shape = draw(st.sampled_from([(len(values),), (1, len(values)), (len(values), 1)]))
    return Tensor(draw(_NAMES), datatype, shape, values)


@settings(max_examples=300, deadline=None)
@given(st.lists(_tensors(), max_size=4), st.dictionaries(st.sampled_from([*"ab", "n", "stop", "logprobs",
    "logit_bias", "guided_json", "min_tokens", "lora_name"]), _JSON, max_size=4))  # fmt: skip
def test_nothing_but_a_status_comes_of_it(inputs: list[Tensor], options: dict[str, Any]) -> None:
    try:
        given_options = sampling(**options)
    except orjson.JSONEncodeError:
        given_options = sampling()
    try:
        asked_of(request(*inputs, given_options))
    except Status:
        pass
