"""Pure. Bodies become calls: what OpenAI's clients ask for, in the gateway's own words.

`Asked` is what the answer's shape depends on and the gateway need not know.
"""

from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import ValidationError

from chassis.messages.gateway import GenerateCall, Turn
from gateway.openai.errors import BadField, bad_field
from gateway.openai.misspelt import check_spelling
from gateway.openai.schema import ChatRequest, CompletionRequest, Message, Sampled
from gateway.openai.structured import grammar_of
from gateway.openai.tools import Tools, called, check_beside, tools_of
from gateway.sampling import U64_MAX
from gateway.tool_calls.forms import ToolForm

COMPLETION_TOKENS = 16  # where nothing is said, as OpenAI does
R = TypeVar("R", ChatRequest, CompletionRequest)


@dataclass(frozen=True, slots=True)
class Asked:
    """How the answer is told. `n`: choices a prompt."""

    calls: tuple[GenerateCall, ...]  # one a prompt
    chat: bool
    stream: bool = False
    n: int = 1
    include_usage: bool = False  # a stream's last chunk
    logprobs: int | None = None  # so many alternatives beside each token
    prompt_logprobs: int | None = None
    echo: bool = False
    drop_output: bool = False  # no tokens were asked for
    token_ids: bool = False  # tell ids beside text
    grammar_field: str = ""  # where a grammar came in
    tools: Tools | None = None  # that may be called


def parse_body(body: dict[str, Any], kind: type[R]) -> R:
    """Raises Status."""
    check_spelling(body, kind.model_fields)
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise bad_field(error, body) from None


def chat_asked(request: ChatRequest) -> Asked:
    """Raises Status."""
    if request.top_logprobs and not request.logprobs:
        raise BadField("top_logprobs", "wants logprobs to be true")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    call = _sampled(
        request,
        chat=tuple(turn_of(message, i) for i, message in enumerate(request.messages)),
        max_tokens=request.max_completion_tokens or request.max_tokens,
        top_logprobs=logprobs,
    )
    tools, listed = tools_of(request)
    asked = _asked(
        request,
        (replace(call, tools=listed),),
        chat=True,
        logprobs=logprobs,
        prompt_logprobs=call.prompt_logprobs,
        tools=tools,
    )
    answer = asked.calls[0].grammar
    if tools is not None and answer is not None:
        check_beside(tools, asked.grammar_field, answer)
    return asked


def in_form(asked: Asked, form: str) -> Asked:
    """Of a chat that may call functions, in the form of its model."""
    assert asked.tools is not None
    tools, (call,) = replace(asked.tools, form=ToolForm(form)), asked.calls
    grammar = tools.grammar(call.grammar)
    if grammar is None:
        return replace(asked, tools=tools)
    field = asked.grammar_field or "tools"
    return replace(asked, tools=tools, calls=(replace(call, grammar=grammar),), grammar_field=field)


def completion_asked(request: CompletionRequest) -> Asked:
    """Raises Status."""
    if request.suffix:
        raise BadField("suffix", "not supported")
    _check_echo(request)
    top = request.logprobs
    told = [k for k in (request.prompt_logprobs, top if request.echo else None) if k is not None]
    call = _sampled(
        request,
        max_tokens=COMPLETION_TOKENS if request.max_tokens is None else max(1, request.max_tokens),
        top_logprobs=top,
        told_of_prompt=max(told, default=None),
        best_of=request.best_of,
    )
    return _asked(
        request,
        _with_prompts(call, request),
        chat=False,
        logprobs=top,
        prompt_logprobs=request.prompt_logprobs,
        echo=bool(request.echo),
        drop_output=request.max_tokens == 0,
    )


def _asked(request: Sampled, calls: tuple[GenerateCall, ...], **shape: Any) -> Asked:
    options = request.stream_options
    if options is not None and not request.stream:
        raise BadField("stream_options", "only with stream")
    if request.stream and request.prompt_logprobs is not None:
        raise BadField("prompt_logprobs", "not with stream")
    field, grammar = grammar_of(request) or ("", None)
    return Asked(
        tuple(replace(call, grammar=grammar) for call in calls) if grammar else calls,
        grammar_field=field,
        stream=bool(request.stream),
        n=request.n or 1,
        include_usage=options is not None and bool(options.include_usage),
        token_ids=bool(request.return_token_ids),
        **shape,
    )


def _sampled(request: Sampled, told_of_prompt: int | None = None, **own: Any) -> GenerateCall:
    """`own`: what only its endpoint has. (`replace` would take longer than all of this.)"""
    stop = request.stop
    bias = request.logit_bias or {}
    return GenerateCall(
        model=request.model or "",
        temperature=request.temperature,
        top_k=max(0, request.top_k) if request.top_k is not None else None,
        top_p=request.top_p,
        min_p=request.min_p,
        typical_p=request.typical_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=tuple(sorted((int(token_id), value) for token_id, value in bias.items())),
        allowed_token_ids=tuple(request.allowed_token_ids or ()),
        bad_words=tuple(request.bad_words or ()),
        seed=None if request.seed is None else request.seed & U64_MAX,
        n=request.n,
        stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        min_tokens=request.min_tokens or 0,
        prompt_logprobs=request.prompt_logprobs if told_of_prompt is None else told_of_prompt,
        priority=request.priority,
        **own,
    )


def _with_prompts(call: GenerateCall, request: CompletionRequest) -> tuple[GenerateCall, ...]:
    prompt = request.prompt
    if isinstance(prompt, str):
        return (replace(call, prompt=prompt),)
    if isinstance(prompt[0], int):
        return (replace(call, token_ids=tuple(prompt)),)
    return tuple(
        replace(call, prompt=one) if isinstance(one, str) else replace(call, token_ids=tuple(one))
        for one in prompt
    )


def _check_echo(request: CompletionRequest) -> None:
    if request.echo and request.stream and request.logprobs is not None and (request.n or 1) > 1:
        raise BadField("echo", "with stream and logprobs only for one choice")


# ---- chat ------------------------------------------------------------------------------------------


def turn_of(message: Message, place: int) -> Turn:
    """Raises Status."""
    field = f"messages[{place}]"
    if message.tool_calls and message.role != "assistant":
        raise BadField(f"{field}.tool_calls", "only of an assistant")
    content = message.content
    if content is None:
        if message.role != "assistant":
            raise BadField(f"{field}.content", "is missing")
        content = ""
    elif not isinstance(content, str):
        content = "".join(part.text or part.refusal or "" for part in content)
    return Turn(
        "system" if message.role == "developer" else message.role,
        content,
        message.name or "",
        tuple(called(c, f"{field}.tool_calls[{i}]") for i, c in enumerate(message.tool_calls or ())),
        message.tool_call_id or "" if message.role == "tool" else "",
    )
