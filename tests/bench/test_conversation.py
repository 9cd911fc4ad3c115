"""A peer's words: what one side builds the other reads, and what is no answer is said to be none."""

import json

import pytest

from bench.peers.conversation import (
    Ask,
    Failed,
    Load,
    Loaded,
    Ran,
    Times,
    build_answer,
    build_question,
    parse_answer,
    parse_question,
)


@pytest.mark.parametrize(
    "question", [Load("folder", "bfloat16", 2, cache_mb=512), Ask([[1, 2], [3]], output_tokens=7)]
)
def test_questions_arrive(question: Load | Ask) -> None:
    line = build_question(question)
    assert line.endswith("\n") and line.count("\n") == 1
    assert parse_question(line) == question


@pytest.mark.parametrize(
    "answer", [Loaded("1.2", 3.5, "compiled"), Ran(2.0, (Times(0.5, 1.5, 4), Times(0.25, 2.0, 4)))]
)
def test_answers_arrive(answer: Loaded | Ran) -> None:
    assert parse_answer(build_answer(answer)) == answer


def test_a_failure_is_raised_with_its_words() -> None:
    with pytest.raises(Failed, match="no memory"):
        parse_answer(build_answer(Failed("no memory")))


@pytest.mark.parametrize(
    "line",
    [
        "INFO loading weights\n",
        "[]\n",
        json.dumps({"loaded": {"version": "1"}}),
        json.dumps({"ran": {"seconds": "2", "requests": []}}),
        json.dumps({"ran": {"seconds": 2.0, "requests": [[0.1, 0.2]]}}),
    ],
)
def test_what_is_no_answer_is_refused(line: str) -> None:
    with pytest.raises(Failed, match="no"):
        parse_answer(line)


def test_what_is_no_question_is_refused() -> None:
    with pytest.raises(Failed, match="no question"):
        parse_question(json.dumps({"stop": {}}))
