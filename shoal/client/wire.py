"""Pure. Between what callers say and are told, and the messages of `gateway.proto`."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from chassis.wire import gateway_pb2 as pb
from shoal.client.errors import InvalidArgument
from shoal.client.events import (
    Accepted,
    Delta,
    Event,
    Finished,
    PromptLogprobs,
    TokenLogprobs,
    TopLogprob,
)
from shoal.client.params import Grammar, Messages, Model, Params, Prompt

_ERROR_LEN_MAX = 200


def build_generate(prompt: Prompt, params: Params) -> pb.GenerateRequest:
    """The request for a raw prompt (str), a chat ((role, content) pairs) or token ids (ints).

    Raises ShoalError for a value that the message cannot carry."""
    request = pb.GenerateRequest()
    for param in fields(params):
        value = getattr(params, param.name)
        if isinstance(value, Grammar):
            _grammar(request.grammar, value)
        elif value is not None:
            _set(request, param.name, value)
    if isinstance(prompt, str):
        _set(request, "prompt", prompt)
    elif prompt and isinstance(prompt[0], tuple | list):
        _chat(request.chat, prompt)  # type: ignore[arg-type]
    else:
        _set(request.token_ids, "ids", prompt, "token_ids")
        request.token_ids.SetInParent()
    return request


def _grammar(message: pb.Grammar, grammar: Grammar) -> None:
    """Raises ShoalError unless it is one."""
    given = [field.name for field in fields(grammar) if getattr(grammar, field.name)]
    if len(given) != 1:
        said = " and ".join(given) or "nothing"
        raise InvalidArgument("INVALID_ARGUMENT", f"grammar: {said} given; one of its kinds")
    name, value = given[0], getattr(grammar, given[0])
    if name == "choice":
        _set(message.choice, "texts", value, "grammar.choice")
    else:
        _set(message, name, value, f"grammar.{name}")


def _chat(chat: pb.Chat, messages: Messages) -> None:
    for i, (role, content) in enumerate(messages):
        turn = chat.turns.add()
        _set(turn, "role", role, f"chat.turns[{i}].role")
        _set(turn, "content", content, f"chat.turns[{i}].content")


def _set(message: Any, name: str, value: Any, called: str = "") -> None:
    """Raises ShoalError, as the gateway would say it, for what has no place in the field."""
    try:
        if isinstance(value, Mapping):
            getattr(message, name).update(value)
        elif isinstance(value, str) or not isinstance(value, Sequence):
            setattr(message, name, value)
        else:
            getattr(message, name).extend(value)
    except UnicodeEncodeError:
        raise InvalidArgument("INVALID_ARGUMENT", f"{called or name}: not valid Unicode") from None
    except TypeError:
        raise InvalidArgument(
            "INVALID_ARGUMENT", f"{called or name}: {value!r} has the wrong type"[:_ERROR_LEN_MAX]
        ) from None
    except ValueError:
        bits = 64 if message.DESCRIPTOR.fields_by_name[name].type == FieldDescriptor.TYPE_UINT64 else 32
        limit = f"{called or name}: {value}; 0 to {2**bits - 1}"
        raise InvalidArgument("INVALID_ARGUMENT", limit[:_ERROR_LEN_MAX]) from None


def build_resume(request_id: str, output_ids: Sequence[int]) -> pb.ResumeRequest:
    request = pb.ResumeRequest()
    _set(request, "request_id", request_id)
    _set(request, "output_ids", output_ids)
    return request


def build_cancel(request_id: str) -> pb.CancelRequest:
    request = pb.CancelRequest()
    _set(request, "request_id", request_id)
    return request


def build_tokenize(text: str | Messages, model: str) -> pb.TokenizeRequest:
    request = pb.TokenizeRequest()
    _set(request, "model", model)
    if isinstance(text, str):
        _set(request, "prompt", text)
    else:
        _chat(request.chat, text)
        request.chat.SetInParent()
    return request


def event_of(message: pb.GenerateEvent) -> Event | None:
    """None for a kind of a later version."""
    match message.WhichOneof("event"):
        case "accepted":
            a = message.accepted
            return Accepted(a.request_id, a.prompt_tokens, a.seed, message.choice)
        case "prompt_logprobs":
            p = message.prompt_logprobs
            return PromptLogprobs(
                tuple(p.ids), p.first_index, tuple(map(_logprobs, p.logprobs)), message.choice
            )
        case "delta":
            d = message.delta
            logprobs = tuple(map(_logprobs, d.logprobs)) if d.logprobs else ()
            return Delta(d.text, tuple(d.ids), d.first_index, logprobs, message.choice)
        case "finished":
            f = message.finished
            return Finished(
                f.reason,
                f.prompt_tokens,
                f.cached_tokens,
                f.output_tokens,
                f.queued_us,
                f.prefill_us,
                f.decode_us,
                message.choice,
                f.generated_tokens,
            )
        case _:
            return None


def _logprobs(m: pb.TokenLogprobs) -> TokenLogprobs:
    top = tuple(TopLogprob(t.id, t.logprob, t.token) for t in m.top)
    return TokenLogprobs(m.logprob, m.rank, m.token, top)


def model_of(m: pb.Model) -> Model:
    return Model(m.name, m.digest, m.context_len_max, m.vocab_size, m.chat)
