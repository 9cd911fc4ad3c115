"""Tools and structured output as the openai package uses them: `python openai_tools.py BASE_URL`.

The model draws at random: what its answers are is for grammars to say. Ends with 0 when all of it is as users
of the package know it.
"""

import asyncio
import json
import re
import sys

from openai import AsyncOpenAI, BadRequestError, LengthFinishReasonError, OpenAI
from pydantic import BaseModel, Field

MESSAGES = [{"role": "user", "content": "what is the weather?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of some days in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Rome", "Lübeck"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "additionalProperties": False}},
}
TOOLS = [WEATHER, CLOCK]
NAMED = {"type": "function", "function": {"name": "weather"}}


class Tag(BaseModel):
    kind: str = Field(pattern="^[a-c]{1,3}$")
    weight: int = Field(ge=0, le=9)


class Found(BaseModel):
    tags: list[Tag] = Field(min_length=1, max_length=3)
    fine: bool
    note: str | None = Field(max_length=12)


def fits(name: str, arguments: str) -> None:
    value = json.loads(arguments)
    if name == "clock":
        assert value == {}
    else:
        assert name == "weather" and sorted(value) == ["city", "days"], value
        assert value["city"] in ("Rome", "Lübeck") and type(value["days"]) is int and 1 <= value["days"] <= 7


def calls(client: OpenAI, model: str, choice: object, seed: int, several: bool = True) -> int:
    asked = {
        "model": model, "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "seed": seed,
        "temperature": 1, "max_tokens": 600, "parallel_tool_calls": several,
    }  # fmt: skip
    (whole,) = client.chat.completions.create(**asked).choices
    assert whole.finish_reason == ("tool_calls" if choice == "required" else "stop")
    made = whole.message.tool_calls
    assert made and whole.message.content is None
    assert len({call.id for call in made}) == len(made) and all(call.type == "function" for call in made)
    for call in made:
        fits(call.function.name, call.function.arguments)
    with client.chat.completions.stream(**asked) as stream:  # the package's own gathering of deltas
        deltas = [e.arguments_delta for e in stream if e.type == "tool_calls.function.arguments.delta"]
        (streamed,) = stream.get_final_completion().choices
    assert streamed.finish_reason == whole.finish_reason
    told = [(c.function.name, c.function.arguments) for c in streamed.message.tool_calls]
    assert told == [(c.function.name, c.function.arguments) for c in made]
    assert "".join(deltas) == "".join(arguments for _, arguments in told)
    if any(name == "weather" for name, _ in told):
        assert len(deltas) > len(told), "arguments come in pieces"
    again = [
        *MESSAGES,
        whole.message.model_dump(exclude_none=True),
        *({"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in made),
    ]
    answer = client.chat.completions.create(model=model, messages=again, tools=TOOLS, max_tokens=5, seed=seed)
    assert answer.usage.prompt_tokens > 0 and answer.choices[0].finish_reason in (
        "stop",
        "length",
        "tool_calls",
    )
    return len(made)


def tools(client: OpenAI, model: str) -> None:
    assert all(calls(client, model, "required", seed) >= 1 for seed in range(2))
    assert calls(client, model, NAMED, 1) == 1
    assert calls(client, model, "required", 3, several=False) == 1
    for choice in ("auto", "none"):
        (free,) = client.chat.completions.create(
            model=model, messages=MESSAGES, tools=TOOLS, tool_choice=choice, max_tokens=8, seed=1
        ).choices
        assert free.message.content and not free.message.tool_calls
    cut = client.chat.completions.create(
        model=model, messages=MESSAGES, tools=TOOLS, tool_choice=NAMED, max_tokens=50, seed=1
    )
    (choice,) = cut.choices
    assert choice.finish_reason == "length"  # in the middle of a call, and it says so
    chunks = list(
        client.chat.completions.create(
            model=model, messages=MESSAGES, tools=TOOLS, tool_choice=NAMED, max_tokens=50, seed=1, stream=True
        )
    )
    assert chunks[-1].choices[0].finish_reason == "length"


def structured(client: OpenAI, model: str) -> None:
    for seed in range(2):
        parsed = client.chat.completions.parse(
            model=model, messages=MESSAGES, response_format=Found, seed=seed, temperature=1, max_tokens=2000
        )
        found = parsed.choices[0].message.parsed
        assert found is not None and parsed.choices[0].finish_reason == "stop"
        assert 1 <= len(found.tags) <= 3 and type(found.fine) is bool and len(found.note or "") <= 12
        assert all(re.fullmatch("[a-c]{1,3}", t.kind) and 0 <= t.weight <= 9 for t in found.tags)
    for extra, shape in (
        ({"guided_choice": ["yes", "no"]}, r"yes|no"),
        ({"guided_regex": r"[a-f]{3}-\d{2}"}, r"[a-f]{3}-\d{2}"),
        ({"structured_outputs": {"grammar": 'start: "<" /[a-z]{1,9}/ ">"'}}, r"<[a-z]{1,9}>"),
        ({"guided_grammar": 'root ::= "a" ("b" | "c")'}, r"ab|ac"),
    ):
        said = client.chat.completions.create(model=model, messages=MESSAGES, seed=2, extra_body=extra)
        assert re.fullmatch(shape, said.choices[0].message.content), said
        text = client.completions.create(model=model, prompt="x", max_tokens=400, seed=2, extra_body=extra)
        assert re.fullmatch(shape, text.choices[0].text), text
    several = client.chat.completions.create(
        model=model, messages=MESSAGES, n=3, extra_body={"guided_choice": ["yes", "no"]}
    )
    assert {c.message.content for c in several.choices} <= {"yes", "no"}
    try:
        client.chat.completions.parse(
            model=model, messages=MESSAGES, response_format=Found, max_tokens=3, seed=1
        )
    except LengthFinishReasonError:
        pass
    else:
        raise AssertionError("an answer that was cut off")


BAD = (
    {"guided_regex": "("},
    {"guided_json": {"type": "nonsense"}},
    {"guided_json": json.loads('{"a":' * 30 + "1" + "}" * 30) | {"not": {}}},
    {"structured_outputs": {"grammar": "start: nowhere"}},
    {"guided_choice": []},
)
DEAR = (
    {"guided_regex": "(.*a.{200}b|.*c.{200}d|.*e.{300}f)"},
    {"guided_grammar": 'start: "a" start'},
    {"guided_regex": "(((a|b){1,90}){1,90}){1,90}c"},
)


async def beside(base: str, model: str) -> None:
    """Bad grammars and dear ones are their own requests' alone: streams beside them say what they would."""
    async with AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as client:

        async def free(seed: int) -> str:
            said = await client.completions.create(
                model=model, prompt="sea", max_tokens=60, seed=seed, extra_body={"ignore_eos": True}
            )
            return said.choices[0].text

        async def bad(extra: dict[str, object]) -> None:
            try:
                await client.completions.create(model=model, prompt="x", max_tokens=40, extra_body=extra)
            except BadRequestError as error:
                assert error.param
            else:
                raise AssertionError(f"{extra} was answered")

        async def dear(extra: dict[str, object]) -> None:
            try:
                await client.completions.create(model=model, prompt="x", max_tokens=30, extra_body=extra)
            except BadRequestError as error:
                assert "grammar" in str(error)

        alone = [await free(seed) for seed in range(3)]
        async with asyncio.TaskGroup() as group:
            streams = [group.create_task(free(seed)) for seed in range(3)]
            for extra in BAD:
                group.create_task(bad(extra))
            for extra in DEAR * 2:
                group.create_task(dear(extra))
        assert [stream.result() for stream in streams] == alone


def main(base: str) -> None:
    with OpenAI(base_url=base, api_key="none", max_retries=0) as client:
        (model,) = (m.id for m in client.models.list().data)
        tools(client, model)
        structured(client, model)
    asyncio.run(beside(base, model))


if __name__ == "__main__":
    main(sys.argv[1])
