"""Calls in what models say: each form, whatever is cut where, and what only looks like one."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.tool_calls.forms import ToolForm, form_of, short_id
from gateway.tool_calls.reading import CALLS_MAX, Argued, Called, Read, Said, ToolReader

NAMES = frozenset({"get", "add", "a.b-c"})
Joined = tuple[str, list[tuple[str, str]]]


def joined(read: list[Read]) -> Joined:
    text, calls = "", list[tuple[str, str]]()
    for event in read:
        match event:
            case Said(said):
                assert said
                text += said
            case Called(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case Argued(index, part):
                assert index == len(calls) - 1 and part
                calls[-1] = (calls[-1][0], calls[-1][1] + part)
    return text, calls


def read(form: ToolForm, *parts: str) -> Joined:
    reader = ToolReader(form, NAMES)
    return joined([event for part in parts for event in reader.feed(part)] + reader.end())


H, L, M, P = ToolForm.HERMES, ToolForm.LLAMA, ToolForm.MISTRAL, ToolForm.PHI
ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, "}"]}}'
ADDED = ("add", '{"a": 1, "b": [2, "}"]}')
CASES: list[tuple[ToolForm, str, Joined]] = [
    (H, "hello  world\n", ("hello  world\n", [])),
    (H, "", ("", [])),
    (H, "  \n", ("  \n", [])),
    (H, f"<tool_call>{ADD}</tool_call>", ("", [ADDED])),
    (H, f"Sure.\n\n<tool_call>\n{ADD}\n</tool_call>\n", ("Sure.", [ADDED])),
    (H, f"<tool_call>\n{ADD}\n</tool_call>\n<tool_call>{ADD}</tool_call>", ("", [ADDED, ADDED])),
    (H, f"<tool_call>[{ADD}, {ADD}]</tool_call>", ("", [ADDED, ADDED])),
    (H, f"<tool_call>{ADD}</tool_call> done <", (" done <", [ADDED])),
    (H, f"<tool_call>{ADD}<tool_call>{ADD}</tool_call>", ("", [ADDED, ADDED])),  # a mark was forgotten
    (H, f"<tool_call>{ADD}", ("", [ADDED])),
    (H, f"<tool_call>{ADD}</tool_c", ("", [ADDED])),
    (H, '<tool_call>{"arguments": {"x": 1}, "name": "get"}</tool_call>', ("", [("get", '{"x": 1}')])),
    (H, '<tool_call>{"name": "get"}</tool_call>', ("", [("get", "{}")])),
    (
        H,
        '<tool_call>{"id": "7", "name": "get", "arguments": {}, "n": null}</tool_call>',
        ("", [("get", "{}")]),
    ),
    (
        H,
        '<tool_call>{"name": "get", "arguments": "{\\"x\\": \\"\\u00e9\\"}"}</tool_call>',
        ("", [("get", '{"x": "é"}')]),
    ),
    (
        H,
        '<tool_call>{"name": "g\\u0065t", "arguments": {"q": "\\"\\\\"}}</tool_call>',
        ("", [("get", '{"q": "\\"\\\\"}')]),
    ),
    (H, '<tool_call>{"name": "get", "arguments": {"x": "unfin', ("", [("get", '{"x": "unfin')])),
    (H, '<tool_call>{"name": "ge', ('<tool_call>{"name": "ge', [])),
    (
        H,
        '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>',
        ('<tool_call>{"name": "nobody", "arguments": {}}</tool_call>', []),
    ),
    (H, "<tool_call>\nno json</tool_call>", ("<tool_call>\nno json</tool_call>", [])),
    (H, f" <tool_call> <tool_call>{ADD}</tool_call>", (" <tool_call>", [ADDED])),
    (H, '<tool_call>{"name": 5}', ('<tool_call>{"name": 5}', [])),
    (H, '<tool_call>{"x": "<tool_call>", "y"; }', ('<tool_call>{"x": "<tool_call>", "y"; }', [])),
    (H, "<tool_call>[]</tool_call>", ("", [])),
    (H, "a <tool_ca", ("a <tool_ca", [])),
    (L, '{"name": "add", "parameters": {"a": 1}}', ("", [("add", '{"a": 1}')])),
    (
        L,
        '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": 1}}',
        ("", [("add", '{"a": 1}')]),
    ),
    (
        L,
        '\n{"name": "add", "parameters": {}}; {"name": "get", "parameters": {}}',
        ("", [("add", "{}"), ("get", "{}")]),
    ),
    (L, '{"answer": 42}', ('{"answer": 42}', [])),
    (L, 'It is {"name": "add", "parameters": {}}', ('It is {"name": "add", "parameters": {}}', [])),
    (L, '<|python_tag|>print("x")', ('<|python_tag|>print("x")', [])),
    (L, "<|pyth", ("<|pyth", [])),
    (L, '{"name": "add", "parameters": {"a": ', ("", [("add", '{"a": ')])),
    (M, f"[TOOL_CALLS] [{ADD}, {ADD}]", ("", [ADDED, ADDED])),
    (M, f"Well. [TOOL_CALLS][{ADD}] then", ("Well. then", [ADDED])),
    (
        M,
        '[TOOL_CALLS]get[ARGS]{"x": {"y": 1}}[TOOL_CALLS]a.b-c[CALL_ID]abcdefghi[ARGS]{}',
        ("", [("get", '{"x": {"y": 1}}'), ("a.b-c", "{}")]),
    ),
    (M, '[TOOL_CALLS]get{"x": 1}', ("", [("get", '{"x": 1}')])),
    (M, "[TOOL_CALLS]nobody[ARGS]{}", ("[TOOL_CALLS]nobody[ARGS]{}", [])),
    (M, "[TOOL_CALLS]get out", ("[TOOL_CALLS]get out", [])),
    (M, "[TOOL", ("[TOOL", [])),
    (P, f"<|tool_call|>[{ADD}]<|/tool_call|>", ("", [ADDED])),
]


@pytest.mark.parametrize(("form", "text", "wanted"), CASES)
def test_each_form_is_read_however_it_is_cut(form: ToolForm, text: str, wanted: Joined) -> None:
    if form is M and text.startswith("Well."):
        wanted = ("Well. then", [ADDED])
    assert read(form, text) == wanted
    assert read(form, *text) == wanted
    for cut in range(len(text) + 1):
        assert read(form, text[:cut], text[cut:]) == wanted, cut


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.sampled_from(list(ToolForm)),
    st.lists(
        st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                "[TOOL_CALLS]",
                "[ARGS]",
                "<|tool_call|>",
                "<|python_tag|>",
                "{",
                "}",
                "[",
                "]",
                '"',
                '"name"',
                ":",
                '"get"',
                '"arguments"',
                ",",
                " ",
                "\n",
                "\\",
                "x",
                "get",
                "<",
                ADD,
                "1",
            ]
        ),
        max_size=14,
    ),
    st.lists(st.integers(0, 200), max_size=6),
)
def test_no_cut_changes_what_is_read(form: ToolForm, pieces: list[str], cuts: list[int]) -> None:
    text = "".join(pieces)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [text[a:b] for a, b in zip(places, places[1:], strict=False)]
    assert read(form, *parts) == read(form, text) == read(form, *text)


def test_arguments_come_as_they_are_written() -> None:
    reader = ToolReader(H, NAMES)
    seen = [
        reader.feed(part) for part in ("<tool_call>", '{"name": "get", ', '"arguments": {"x"', ": 1", "}}")
    ]
    assert seen == [[], [Called(0, "get")], [Argued(0, '{"x"')], [Argued(0, ": 1")], [Argued(0, "}")]]


def test_text_is_held_back_only_while_it_may_be_a_call() -> None:
    reader = ToolReader(H, NAMES)
    assert reader.feed("a < b <tool") == [Said("a < b")]
    assert reader.feed("s> c") == [Said(" <tools> c")]


def test_so_many_calls_are_read_and_the_rest_is_text() -> None:
    one = '<tool_call>{"name": "get", "arguments": {}}</tool_call>'
    text, calls = read(H, one * (CALLS_MAX + 1))
    assert len(calls) == CALLS_MAX and text == one


def test_long_arguments_take_time_by_their_length() -> None:
    long = json.dumps({"x": "y" * 300_000})
    text, calls = read(H, f'<tool_call>{{"name": "get", "arguments": {long}}}</tool_call>')
    assert (text, calls) == ("", [("get", long)])


def test_templates_tell_their_form() -> None:
    assert form_of("{% for tool in tools %}<tool_call>") is H
    assert form_of("no tools at all") is H
    assert form_of("[TOOL_CALLS] [") is M
    assert form_of("<|tool_call|>") is P
    assert form_of('ipython {"name": function name, "parameters": x}') is L
    assert form_of("<|python_tag|>") is L


def test_mistral_s_ids_are_short() -> None:
    assert short_id("abcDEF123") == "abcDEF123"
    assert len(short_id("call_1")) == 9 and short_id("call_1") != short_id("call_2")
