"""Pure. What clients of OpenAI's API send; the one source of the description at /openapi.json.

OpenAI's fields, and those that vLLM's users know beside them. Unknown ones are ignored, misspelt ones refused
(`misspelt.py`); a known one of the wrong type or out of range is refused by its name. What needs more than
the field itself is the gateway's to refuse (`gateway/sampling.py`).
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from chassis.messages.sampling import (
    ALLOWED_IDS_LEN_MAX,
    BAD_WORDS_LEN_MAX,
    LOGIT_BIAS_LEN_MAX,
    LOGIT_BIAS_MAX,
    PENALTY_MAX,
    REPETITION_PENALTY_MAX,
    TOP_LOGPROBS_MAX,
)
from gateway.admission import PRIORITY_MAX, STOP_IDS_LEN_MAX, STOP_LEN_MAX
from gateway.sampling import CHOICES_MAX, TEMPERATURE_MAX, U32_MAX, U64_MAX

PROMPTS_LEN_MAX = 128
IDS_LEN_MAX = 1 << 20  # of a prompt; a model's context is what counts
MESSAGES_LEN_MAX = 1 << 14  # the gateway's own limit is lower (`chat_turns_len_max`)
TOOLS_LEN_MAX = 128
SEED_MIN = -(1 << 63)
EXACT_MAX = 1 << 53  # of integers in a float


def _whole(value: Any) -> Any:
    """16.0 is an integer in JSON; True is none, nor what a float only comes near to."""
    return int(value) if type(value) is float and value.is_integer() and abs(value) <= EXACT_MAX else value


def _few(value: Any) -> Any:
    """Each entry that is wrong has a complaint of its own: of many, none is looked at."""
    if isinstance(value, dict) and len(value) > LOGIT_BIAS_LEN_MAX:
        raise ValueError(f"{len(value)} ids; at most {LOGIT_BIAS_LEN_MAX}")
    return value


WHOLE = BeforeValidator(_whole)
TokenId = Annotated[int, Field(ge=0, le=U32_MAX)]  # there may be many: no WHOLE, which is Python
Penalty = Annotated[float, Field(ge=-PENALTY_MAX, le=PENALTY_MAX)]
Fraction = Annotated[float, Field(ge=0, le=1)]
AboveZero = Annotated[float, Field(gt=0, le=1)]
Top = Annotated[int, Field(ge=0, le=TOP_LOGPROBS_MAX), WHOLE]
Bias = Annotated[float, Field(ge=-LOGIT_BIAS_MAX, le=LOGIT_BIAS_MAX)]
IdText = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]


class Given(BaseModel):
    """An object of a body."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


# ---- what both endpoints take ----------------------------------------------------------------------


class StreamOptions(Given):
    include_usage: bool | None = None


class JsonSchemaFormat(Given):
    name: Annotated[str, Field(max_length=64)] | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")


class ResponseFormat(Given):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Given):
    """vLLM's; one of them."""

    json_: str | dict[str, Any] | bool | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Sampled(Given):
    """How an answer is drawn, and what is told of it."""

    model: Annotated[str, Field(max_length=256)] | None = None
    temperature: Annotated[float, Field(ge=0, le=TEMPERATURE_MAX)] | None = None
    top_p: AboveZero | None = None
    top_k: Annotated[int, Field(ge=-1, le=U32_MAX), WHOLE] | None = None
    min_p: Fraction | None = None
    typical_p: AboveZero | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=REPETITION_PENALTY_MAX)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: (
        Annotated[dict[IdText, Bias], Field(max_length=LOGIT_BIAS_LEN_MAX), BeforeValidator(_few)] | None
    ) = None
    allowed_token_ids: (
        Annotated[list[TokenId], Field(max_length=ALLOWED_IDS_LEN_MAX, fail_fast=True)] | None
    ) = None
    bad_words: Annotated[list[str], Field(max_length=BAD_WORDS_LEN_MAX, fail_fast=True)] | None = None
    seed: Annotated[int, Field(ge=SEED_MIN, le=U64_MAX), WHOLE] | None = None
    n: Annotated[int, Field(ge=1, le=CHOICES_MAX), WHOLE] | None = None
    stop: str | Annotated[list[str], Field(max_length=STOP_LEN_MAX, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=STOP_IDS_LEN_MAX, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=U32_MAX), WHOLE] | None = None
    prompt_logprobs: Top | None = None
    priority: Annotated[int, Field(ge=0, le=PRIORITY_MAX), WHOLE] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    guided_grammar: str | None = None


def _kind_of_prompt(value: Any) -> str:
    """By what its first part is, so that a complaint is about what was meant."""
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, str):
        return "texts"
    if isinstance(first, list):
        return "lists"
    return "ids" if isinstance(value, list) else "text"


Ids = Annotated[list[TokenId], Field(min_length=1, max_length=IDS_LEN_MAX, fail_fast=True)]
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=PROMPTS_LEN_MAX, fail_fast=True)]
Lists = Annotated[list[Ids], Field(min_length=1, max_length=PROMPTS_LEN_MAX, fail_fast=True)]
Prompt = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[Ids, Tag("ids")]
    | Annotated[Texts, Tag("texts")]
    | Annotated[Lists, Tag("lists")],
    Discriminator(_kind_of_prompt),
]


class CompletionRequest(Sampled):
    """POST /v1/completions."""

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0, le=U32_MAX), WHOLE] | None = None
    best_of: Annotated[int, Field(ge=1, le=CHOICES_MAX), WHOLE] | None = None
    echo: bool | None = None
    logprobs: Top | None = None
    suffix: str | None = None


# ---- chat ------------------------------------------------------------------------------------------


class ContentPart(Given):
    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None


class CalledFunction(Given):
    name: str
    arguments: str


class ToolCall(Given):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Given):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(max_length=MESSAGES_LEN_MAX, fail_fast=True)] | None = (
        None
    )
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=TOOLS_LEN_MAX, fail_fast=True)] | None = None
    tool_call_id: str | None = None


class FunctionDefinition(Given):
    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Given):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Given):
    name: Annotated[str, Field(min_length=1, max_length=64)]


class NamedTool(Given):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Sampled):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MESSAGES_LEN_MAX, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1, le=U32_MAX), WHOLE] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=U32_MAX), WHOLE] | None = None
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    tools: Annotated[list[Tool], Field(max_length=TOOLS_LEN_MAX, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
