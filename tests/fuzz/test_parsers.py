"""Every parser of chassis/messages is given what nobody of ours would send: it refuses in its own words, or
it gives a value; nothing else ever comes out of it."""

import importlib
import inspect
import pkgutil
import re
import typing
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import chassis.messages
from chassis import job_subjects, subjects
from chassis.api_keys_file import parse_keys
from chassis.config import ConfigError
from chassis.messages import BadMessage
from chassis.messages.card import parse_tokenizer
from chassis.messages.jobs import BadJob, parse_answer_line, parse_job
from tests.fuzz.garbage import TEXTS, messages, spoiled

NAMES = re.compile(r"(parse|decode|read)_\w+")
WIRE = re.compile(r"parse\(\s*pb\.(\w+)")
HEADERS = ("Content-Type", "Shoal-Timeout-Ms", "Shoal-Priority", "traceparent", "x")
OWN_WORDS: dict[str, type[Exception]] = {
    "jobs.parse_job": BadJob,
    "card.parse_tokenizer": ValueError,  # of a file that somebody gives a worker
}
FEW = 60
MANY = 2_000
BESIDE: dict[str, st.SearchStrategy[Any]] = {
    "count": st.integers(0, 5),
    "headers": st.dictionaries(st.sampled_from(HEADERS), TEXTS | st.just("application/x-protobuf")),
    "name": st.just("field"),
}

Parser = Callable[..., object]


def takes_bytes(parser: Parser) -> bool:
    hints = [hint for name, hint in typing.get_type_hints(parser).items() if name != "return"]
    return any(h in (bytes, str) or (isinstance(h, type) and issubclass(h, Message)) for h in hints)


def parsers() -> dict[str, Parser]:
    """Those that take bytes, and those that take a part of a message."""
    found: dict[str, Parser] = {}
    for module in pkgutil.iter_modules(chassis.messages.__path__):
        name = f"chassis.messages.{module.name}"
        for function, parser in inspect.getmembers(importlib.import_module(name), inspect.isfunction):
            if parser.__module__ == name and NAMES.fullmatch(function) and takes_bytes(parser):
                found[f"{module.name}.{function}"] = parser
    return found


PARSERS = parsers()


def wanted(parser: Parser) -> tuple[type, list[str]]:
    """The type of its first parameter, and the names of the others without a default."""
    hints = typing.get_type_hints(parser)
    parameters = list(inspect.signature(parser).parameters.values())
    first = next((p for p in parameters if hints[p.name] is bytes), parameters[0])
    others = [p.name for p in parameters if p is not first and p.default is p.empty]
    return hints[first.name], others


def input_of(parser: Parser) -> st.SearchStrategy[Any]:
    kind, _ = wanted(parser)
    if isinstance(kind, type) and issubclass(kind, Message):
        return messages(kind)
    source = inspect.getsource(parser)
    module = inspect.getmodule(parser)
    named = [getattr(module.pb, found) for found in WIRE.findall(source)] if hasattr(module, "pb") else []  # type: ignore[union-attr]
    anything: st.SearchStrategy[Any] = st.text(max_size=40) if kind is str else st.binary(max_size=200)
    for wire in named:
        anything |= spoiled(wire) | messages(wire).map(lambda m: m.SerializePartialToString())
    return anything


def feed(parser: Parser, data: st.DataObject) -> None:
    kind, others = wanted(parser)
    given_ = data.draw(input_of(parser))
    beside = {name: data.draw(BESIDE[name]) for name in others}
    first = next(
        name for name, hint in typing.get_type_hints(parser).items() if hint is kind and name not in others
    )
    try:
        parser(**{first: given_, **beside})
    except (
        BadMessage,
        OWN_WORDS.get(f"{parser.__module__.rpartition('.')[2]}.{parser.__name__}", BadMessage),
    ):
        pass


def test_all_of_them_are_here() -> None:
    assert len(PARSERS) > 50
    kinds = {str(wanted(parser)[0]) for parser in PARSERS.values()}
    assert len(kinds) > 20


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=FEW, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_nothing_but_a_refusal_comes_of_garbage(name: str, data: st.DataObject) -> None:
    feed(PARSERS[name], data)


@pytest.mark.slow
@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=MANY, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_for_long(name: str, data: st.DataObject) -> None:
    feed(PARSERS[name], data)


@given(st.text(max_size=60) | st.lists(TEXTS, max_size=7).map(".".join))
def test_subjects_that_anyone_may_publish_on(subject: str) -> None:
    subjects.parse_request(subject)
    job_subjects.parse_job(subject)


@given(st.text(max_size=80), st.sampled_from(["keys.toml", "keys.json"]))
def test_files_of_keys(text: str, name: str) -> None:
    try:
        parse_keys(text, name)
    except ConfigError:
        pass


def test_json_nested_without_end() -> None:
    depth = 100_000
    nested = b'{"a":' * depth + b"1" + b"}" * depth
    lists = b"[" * depth + b"]" * depth
    for parse in (lambda d: parse_job(d, {}), parse_answer_line, parse_tokenizer):
        for data in (nested, lists, nested[:-1]):
            with pytest.raises((BadMessage, BadJob, ValueError)):
                parse(data)
