"""Pure. The public API's messages: what a client asks of a gateway, and the events it is answered with.

Other front doors speak in the same value types; only this file sees their protobuf form.
"""

from dataclasses import dataclass
from typing import NamedTuple

import orjson

from chassis.ids import RequestId
from chassis.messages import parse
from chassis.messages.request import Reason, Timings, Usage
from chassis.messages.sampling import Grammar, GrammarKind
from chassis.wire import gateway_pb2 as pb


@dataclass(frozen=True, slots=True)
class ToolCalled:
    """`arguments`: a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Turn:
    role: str
    content: str
    name: str = ""
    tool_calls: tuple[ToolCalled, ...] = ()
    tool_call_id: str = ""  # of whoever tells what a call gave


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """What a front door was asked for; None and 0 leave the choice to us. Exactly one input is to be given.

    `tenant`, `key`, `time_left_ms` and `job` are the caller's circumstances, not part of the message.
    """

    model: str = ""  # empty: the only one served
    chat: tuple[Turn, ...] | None = None
    prompt: str | None = None
    token_ids: tuple[int, ...] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    priority: int | None = None
    timeout_ms: int = 0
    resume_window_s: int = 0
    client_key: str = ""
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()  # by id
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int | None = None  # choices
    stream_interval: int = 0  # output ids of a delta, at least
    queue_timeout_ms: int = 0
    best_of: int | None = None  # so many are generated, n are told
    grammar: Grammar | None = None  # what the whole output is
    tools: tuple[str, ...] = ()  # JSON objects, as chat templates take them
    tenant: str = ""
    key: str = ""  # the name of the key it came with
    time_left_ms: int | None = None  # until the call's own deadline
    job: bool = False  # it lives without a client, for as long as it takes


@dataclass(frozen=True, slots=True)
class Accepted:
    request_id: RequestId
    prompt_tokens: int
    seed: int
    choice: int = 0


class TopLogprob(NamedTuple):
    id: int
    logprob: float
    token: bytes  # the id's


class IdLogprobs(NamedTuple):
    """Of one id. `rank` 0: not known."""

    logprob: float
    rank: int
    token: bytes
    top: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """Whole code points only; `text` may be empty. `first_index` is of `ids`."""

    text: str
    ids: tuple[int, ...]
    first_index: int
    logprobs: tuple[IdLogprobs, ...] = ()  # one an id, if asked for
    choice: int = 0


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """A piece of what is told of the prompt. `first_index`: of `ids`, in the prompt."""

    ids: tuple[int, ...]
    first_index: int
    logprobs: tuple[IdLogprobs, ...]  # one an id
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    reason: Reason
    usage: Usage  # of this choice
    timings: Timings
    choice: int = 0
    generated_tokens: int = 0  # of all candidates, where the best are told


GenerateEvent = Accepted | PromptLogprobs | Delta | Finished


@dataclass(frozen=True, slots=True)
class ModelInfo:
    name: str
    digest: str
    context_len_max: int  # tokens
    vocab_size: int
    chat: bool  # has a chat template
    tool_form: str = "hermes"  # how it writes calls of functions


# ---- what clients send -----------------------------------------------------------------------------


def parse_generate(data: bytes) -> GenerateCall:
    """Raises BadMessage. Ranges are the gateway's to check."""
    m = parse(pb.GenerateRequest, data)
    which = m.WhichOneof("input")
    return GenerateCall(
        model=m.model,
        chat=_turns(m.chat) if which == "chat" else None,
        prompt=m.prompt if which == "prompt" else None,
        token_ids=tuple(m.token_ids.ids) if which == "token_ids" else None,
        temperature=m.temperature if m.HasField("temperature") else None,
        top_k=m.top_k if m.HasField("top_k") else None,
        top_p=m.top_p if m.HasField("top_p") else None,
        seed=m.seed if m.HasField("seed") else None,
        max_tokens=m.max_tokens if m.HasField("max_tokens") else None,
        min_tokens=m.min_tokens,
        stop=tuple(m.stop),
        stop_token_ids=tuple(m.stop_token_ids),
        ignore_eos=m.ignore_eos,
        priority=m.priority if m.HasField("priority") else None,
        timeout_ms=m.timeout_ms,
        resume_window_s=m.resume_window_s,
        client_key=m.client_key,
        min_p=m.min_p if m.HasField("min_p") else None,
        typical_p=m.typical_p if m.HasField("typical_p") else None,
        repetition_penalty=m.repetition_penalty if m.HasField("repetition_penalty") else None,
        presence_penalty=m.presence_penalty if m.HasField("presence_penalty") else None,
        frequency_penalty=m.frequency_penalty if m.HasField("frequency_penalty") else None,
        logit_bias=tuple(sorted(m.logit_bias.items())),
        allowed_token_ids=tuple(m.allowed_token_ids),
        bad_words=tuple(m.bad_words),
        top_logprobs=m.top_logprobs if m.HasField("top_logprobs") else None,
        prompt_logprobs=m.prompt_logprobs if m.HasField("prompt_logprobs") else None,
        n=m.n if m.HasField("n") else None,
        stream_interval=m.stream_interval,
        queue_timeout_ms=m.queue_timeout_ms,
        best_of=m.best_of if m.HasField("best_of") else None,
        grammar=_grammar(m.grammar) if m.HasField("grammar") else None,
    )


def _grammar(m: pb.Grammar) -> Grammar | None:
    match m.WhichOneof("kind"):
        case "json_object":
            return Grammar(GrammarKind.JSON_OBJECT) if m.json_object else None
        case "json_schema":
            return Grammar(GrammarKind.JSON_SCHEMA, m.json_schema)
        case "regex":
            return Grammar(GrammarKind.REGEX, m.regex)
        case "choice":
            return Grammar(GrammarKind.CHOICE, orjson.dumps(list(m.choice.texts)).decode())
        case "lark":
            return Grammar(GrammarKind.LARK, m.lark)
    return None


def parse_resume(data: bytes) -> tuple[str, tuple[int, ...]]:
    """Request id and the output ids that the client holds. Raises BadMessage."""
    m = parse(pb.ResumeRequest, data)
    return m.request_id, tuple(m.output_ids)


def parse_cancel(data: bytes) -> str:
    """The request id. Raises BadMessage."""
    return parse(pb.CancelRequest, data).request_id


def parse_list_models(data: bytes) -> None:
    """Raises BadMessage."""
    parse(pb.ListModelsRequest, data)


def parse_tokenize(data: bytes) -> GenerateCall:
    """As a call with the same input. Raises BadMessage."""
    m = parse(pb.TokenizeRequest, data)
    which = m.WhichOneof("input")
    return GenerateCall(
        model=m.model,
        chat=_turns(m.chat) if which == "chat" else None,
        prompt=m.prompt if which == "prompt" else None,
    )


def _turns(chat: pb.Chat) -> tuple[Turn, ...]:
    return tuple(Turn(turn.role, turn.content) for turn in chat.turns)


# ---- what they get ---------------------------------------------------------------------------------


def build_event(event: GenerateEvent) -> bytes:
    match event:
        case Delta(text, ids, first_index):
            delta = pb.Delta(text=text, ids=ids, first_index=first_index)
            if event.logprobs:
                delta.logprobs.extend(map(_logprobs, event.logprobs))
            m = pb.GenerateEvent(delta=delta)
        case PromptLogprobs(ids, first_index, entries):
            told = pb.PromptLogprobs(first_index=first_index, ids=ids, logprobs=map(_logprobs, entries))
            m = pb.GenerateEvent(prompt_logprobs=told)
        case Accepted(request_id, prompt_tokens, seed):
            accepted = pb.Accepted(request_id=request_id, prompt_tokens=prompt_tokens, seed=seed)
            m = pb.GenerateEvent(accepted=accepted)
        case Finished(reason, usage, timings):
            m = pb.GenerateEvent(
                finished=pb.Finished(
                    reason=reason.value,
                    prompt_tokens=usage.prompt_tokens,
                    cached_tokens=usage.cached_tokens,
                    output_tokens=usage.output_tokens,
                    queued_us=timings.queued_us + timings.waiting_us,
                    prefill_us=timings.prefill_us,
                    decode_us=timings.decode_us + timings.interrupted_us,
                    generated_tokens=event.generated_tokens,
                )
            )
    m.choice = event.choice
    return m.SerializeToString()


def _logprobs(entry: IdLogprobs) -> pb.TokenLogprobs:
    top = [pb.TopLogprob(id=t.id, logprob=t.logprob, token=t.token) for t in entry.top]
    return pb.TokenLogprobs(logprob=entry.logprob, rank=entry.rank, token=entry.token, top=top)


def build_cancel_reply() -> bytes:
    return pb.CancelReply().SerializeToString()


def build_models(models: list[ModelInfo]) -> bytes:
    return pb.ListModelsReply(
        models=[
            pb.Model(
                name=model.name,
                digest=model.digest,
                context_len_max=model.context_len_max,
                vocab_size=model.vocab_size,
                chat=model.chat,
            )
            for model in models
        ]
    ).SerializeToString()


def build_tokens(ids: tuple[int, ...]) -> bytes:
    return pb.TokenizeReply(ids=ids).SerializeToString()
