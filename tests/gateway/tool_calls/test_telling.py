"""Tools, calls and what they gave, in the words of templates: those that know tools, and those that don't."""

import json

from chassis.messages.gateway import ToolCalled, Turn
from gateway.chat import ChatTemplate
from tests.gateway.rig import CHATML

KNOWS = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}{{ m.tool_call_id }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.id }} {{ c.function.name }} {{ c.function.arguments.x }})"
    "{% endfor %}{% endfor %}"
)
TOOL = json.dumps({"type": "function", "function": {"name": "get"}})
CALL = ToolCalled("call_1", "get", '{"x": 7}')
TURNS = (
    Turn("user", "hi"),
    Turn("assistant", "", tool_calls=(CALL, CALL)),
    Turn("tool", "seven", tool_call_id="call_1"),
    Turn("tool", "eight", tool_call_id="call_2"),
)


def test_a_template_that_knows_tools_has_them_as_transformers_gives_them() -> None:
    text = ChatTemplate(KNOWS, "", "").render(TURNS, 0, [TOOL])
    assert text == ("[get]<user>hi<assistant>(call_1 get 7)(call_1 get 7)<toolcall_1>seven<toolcall_2>eight")


def test_mistral_s_ids_have_nine_letters() -> None:
    text = ChatTemplate(KNOWS + "{# [TOOL_CALLS] #}", "", "").render(TURNS, 0)
    (first, second) = (text.split("(")[1].split()[0], text.split("<tool")[1].split(">")[0])
    assert first == second and len(first) == 9 and first.isalnum()


def test_a_template_that_knows_none_is_told_in_words() -> None:
    text = ChatTemplate(CHATML, "", "").render(TURNS, 0, [TOOL])
    system, user, assistant, given, _ = text.split("<|im_start|>")[1:]
    assert system.startswith("system\n") and TOOL in system and "<tool_call>" in system
    assert user == "user\nhi<|im_end|>\n"
    one = '<tool_call>\n{"name": "get", "arguments": {"x": 7}}\n</tool_call>'
    assert assistant == f"assistant\n{one}\n{one}<|im_end|>\n"
    results = "<tool_response>\nseven\n</tool_response>\n<tool_response>\neight\n</tool_response>"
    assert given == f"user\n{results}<|im_end|>\n"


def test_the_words_join_what_a_system_says_or_the_first_turn() -> None:
    system = ChatTemplate(CHATML, "", "").render([Turn("system", "Be kind."), Turn("user", "hi")], 0, [TOOL])
    assert "system\nBe kind.\n\nFunctions" in system and system.count("system\n") == 1
    refuses = CHATML + "{# System role not supported #}"
    user = ChatTemplate(refuses, "", "").render([Turn("user", "hi")], 0, [TOOL])
    assert user.startswith("<|im_start|>user\nhi\n\nFunctions")


def test_without_tools_nothing_changes() -> None:
    turns = [Turn("user", "hi")]
    assert (
        ChatTemplate(CHATML, "", "").render(turns, 0)
        == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
