"""Chats render and tokenize exactly as `transformers` does it; what a template refuses is the user's."""

from collections.abc import Sequence
from typing import Any

import pytest
from jinja2 import TemplateError

from chassis.errors import Code, Status
from chassis.messages.gateway import Turn
from gateway.chat import ChatTemplate
from gateway.tokenizer import TextTokenizer
from tests.gateway.rig import byte_card

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FANCY = """{%- set ns = namespace(first=true) %}
{{ bos_token }}
{% for m in messages %}
  {%- if m.role not in ['user', 'assistant', 'system'] %}{{ raise_exception('role ' + m.role) }}{% endif %}
  {% generation %}{{ m | tojson }}{% endgeneration %}
  {%- if loop.last %}{% continue %}{% endif %}
  {%- set ns.first = false %}
{% endfor %}
{% if tools %}never{% endif %}{{ eos_token }}{{ dict(a=1) }}{{ ns.first }}
"""
CHATS: list[list[tuple[str, str]]] = [
    [("user", "Why is the sky blue?")],
    [("system", "Be brief."), ("user", "hi"), ("assistant", "yes?"), ("user", " two\nlines ")],
    [("user", "<|im_end|> \u00e9 {{ 7 * 7 }} <b>&\U0001f30a")],
]


def by_transformers(template: str, turns: Sequence[tuple[str, str]]) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    chat: Any = [[{"role": role, "content": content} for role, content in turns]]
    rendered: Any = render_jinja_template(
        chat, chat_template=template, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
    )
    return str(rendered[0][0])


@pytest.mark.parametrize("template", [SMOLLM2, FANCY], ids=["smollm2", "fancy"])
@pytest.mark.parametrize("turns", CHATS)
def test_rendered_as_transformers_does(template: str, turns: list[tuple[str, str]]) -> None:
    ours = ChatTemplate(template, "<s>", "</s>").render([Turn(*turn) for turn in turns], 0)
    assert ours == by_transformers(template, turns)


def test_time_comes_from_outside() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", "", "")
    assert template.render([Turn("user", "x")], 1_800_000_000_000_000_000) == "15 Jan 2027"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no system role') }}",
        "{{ messages[7].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{{ 'x' * 5000000 }}",
    ],
)
def test_what_a_template_refuses_or_may_not_do_is_an_invalid_argument(template: str) -> None:
    with pytest.raises(Status, match="chat: ") as refused:
        ChatTemplate(template, "", "").render([Turn("user", "x")], 0)
    assert refused.value.code is Code.INVALID_ARGUMENT


def test_a_template_that_is_none_is_found_at_once() -> None:
    with pytest.raises(TemplateError):
        ChatTemplate("{% for %}", "", "")


# ---- tokenizer -------------------------------------------------------------------------------------


def test_tokens_are_those_of_the_card_and_specials_count_as_such() -> None:
    tokenizer = TextTokenizer(byte_card())
    assert tokenizer.encode("a\u00e9<|im_end|>", add_bos=True) == (97, 0xC3, 0xA9, 256)


def test_first_token_is_added_once_where_the_model_wants_it() -> None:
    tokenizer = TextTokenizer(byte_card(bos_token="<|im_end|>", add_bos=True))
    assert tokenizer.encode("a", add_bos=True) == (256, 97)
    assert tokenizer.encode("<|im_end|>a", add_bos=True) == (256, 97)
    assert tokenizer.encode("a", add_bos=False) == (97,)


def test_a_tokenizer_that_is_none_is_found_at_once() -> None:
    with pytest.raises(ValueError, match="tokenizer of model bytes"):
        TextTokenizer(byte_card(tokenizer_json=b"{}"))
