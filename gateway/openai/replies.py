"""What is answered, for the description alone.

Bodies and chunks are built by hand (`body.py`, `chunks.py`); tests hold them against these.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length", "tool_calls"]
Count = Annotated[int, Field(ge=0)]


class Told(BaseModel):
    """An object of an answer: nothing in it that is not described."""

    model_config = ConfigDict(strict=True, extra="forbid")


class ErrorDetails(Told):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Told):
    error: ErrorDetails


class PromptTokensDetails(Told):
    cached_tokens: Count


class UsageReply(Told):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails


class TokenLogprob(Told):
    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Told):
    content: list[ContentLogprob] | None
    refusal: None


class ToolFunction(Told):
    name: str
    arguments: str


class ToolCallReply(Told):
    id: str
    type: Literal["function"]
    function: ToolFunction


class MessageReply(Told):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    tool_calls: list[ToolCallReply] = []
    reasoning_content: str | None = None


class RankedLogprob(Told):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobsReply = list[dict[str, RankedLogprob] | None]


class ChatChoice(Told):
    index: Count
    message: MessageReply
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] = []


class ChatReply(Told):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReply
    system_fingerprint: str | None
    prompt_logprobs: PromptLogprobsReply | None = None
    prompt_token_ids: list[int] = []


class TextLogprobsReply(Told):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Told):
    index: Count
    text: str
    logprobs: TextLogprobsReply | None
    finish_reason: FinishReason
    prompt_logprobs: PromptLogprobsReply | None = None
    prompt_token_ids: list[int] = []
    token_ids: list[int] = []


class TextReply(Told):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageReply
    system_fingerprint: str | None


class ModelReply(Told):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: Count


class ModelListReply(Told):
    object: Literal["list"]
    data: list[ModelReply]


# ---- chunks of streams -----------------------------------------------------------------------------


class ToolFunctionDelta(Told):
    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(Told):
    index: Count
    id: str | None = None
    type: Literal["function"] | None = None
    function: ToolFunctionDelta | None = None


class DeltaReply(Told):
    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCallDelta] | None = None
    reasoning_content: str | None = None


class ChatChunkChoice(Told):
    index: Count
    delta: DeltaReply
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] = []


class ChatChunk(Told):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str | None
    usage: UsageReply | None = None
    prompt_token_ids: list[int] = []


class TextChunkChoice(Told):
    index: Count
    text: str
    logprobs: TextLogprobsReply | None
    finish_reason: FinishReason | None
    token_ids: list[int] = []
    prompt_token_ids: list[int] = []


class TextChunk(Told):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChunkChoice]
    system_fingerprint: str | None
    usage: UsageReply | None = None


REPLIES: tuple[type[BaseModel], ...] = (ErrorReply, ChatReply, TextReply, ModelReply, ModelListReply)
CHUNKS: tuple[type[BaseModel], ...] = (ChatChunk, TextChunk)
