"""Pure. What a client may ask for, and how that becomes a request.

Rules: every refusal names the field and the limit; what costs nothing to check is checked before a template
or a tokenizer runs; ids, digests and derived seeds come from length-prefixed, tagged bytes, so that the same
words from the same tenant are the same request at every gateway.
"""

import hashlib
import struct
from base64 import b32encode
from collections.abc import Iterable
from dataclasses import dataclass, replace

from chassis.errors import Code, Status
from chassis.ids import GatewayId, RequestId
from chassis.messages.gateway import GenerateCall, Turn
from chassis.messages.request import Limits, Request
from gateway.sampling import (
    U32_MAX,
    BadWords,
    check_ids,
    check_prompt_logprobs,
    check_sampling,
    sampling_of,
)

STOP_LEN_MAX = 16
STOP_BYTES_MAX = 256
STOP_IDS_LEN_MAX = 64
PRIORITY_DEFAULT = 5
PRIORITY_MAX = 9
STREAM_INTERVAL_MAX = 1024
QUEUE_TIMEOUT_MS_MAX = 3_600_000
CLIENT_KEY_BYTES_MAX = 256
ROLE_BYTES_MAX = 64
REQUEST_ID_LEN_MAX = 64
SERVED_TOLD_LEN_MAX = 1000  # of names, in a refusal
U64_MAX = 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True, slots=True)
class CallLimits:
    prompt_bytes_max: int
    chat_turns_len_max: int
    timeout_s_max: int
    resume_window_s_max: int


@dataclass(frozen=True, slots=True)
class ModelFacts:
    name: str
    context_len_max: int
    vocab_size: int


def invalid(message: str) -> Status:
    return Status(Code.INVALID_ARGUMENT, message)


def not_served(field: str, name: str, served: Iterable[str]) -> Status:
    """`served`: what the caller may use instead."""
    others = ", ".join(sorted(served))[:SERVED_TOLD_LEN_MAX]
    return Status(Code.NOT_FOUND, f"{field}: {name[:200]!r} is not served; served now: {others or 'none'}")


def check_input(call: GenerateCall, limits: CallLimits) -> None:
    """The input alone. Raises Status."""
    given = [n for n in ("chat", "prompt", "token_ids") if getattr(call, n) is not None]
    if len(given) != 1:
        raise invalid(f"input: exactly one of chat, prompt, token_ids; {' and '.join(given) or 'none'} given")
    if call.chat is not None:
        if not 0 < len(call.chat) <= limits.chat_turns_len_max:
            raise invalid(f"chat.turns: {len(call.chat)}; 1 to {limits.chat_turns_len_max}")
        for i, turn in enumerate(call.chat):
            if not 0 < _bytes(turn.role, f"chat.turns[{i}].role") <= ROLE_BYTES_MAX:
                raise invalid(f"chat.turns[{i}].role: 1 to {ROLE_BYTES_MAX} bytes")
        size = sum(_bytes(turn.content, f"chat.turns[{i}].content") for i, turn in enumerate(call.chat))
        size += sum(
            _bytes(part, f"chat.turns[{i}]") for i, turn in enumerate(call.chat) for part in _more(turn)
        )
        size += sum(_bytes(tool, "tools") for tool in call.tools)
        if size > limits.prompt_bytes_max:
            raise invalid(f"chat: {size} bytes; at most {limits.prompt_bytes_max}")
    elif call.prompt is not None:
        size = _bytes(call.prompt, "prompt")
        if not 0 < size <= limits.prompt_bytes_max:
            raise invalid(f"prompt: {size} bytes; 1 to {limits.prompt_bytes_max}")
    elif not call.token_ids:
        raise invalid("token_ids: at least 1")


def _more(turn: Turn) -> list[str]:
    """What few turns have."""
    if not (turn.name or turn.tool_calls or turn.tool_call_id):
        return []
    calls = [part for call in turn.tool_calls for part in (call.id, call.name, call.arguments)]
    return [turn.name, turn.tool_call_id, *calls]


def check_call(call: GenerateCall, limits: CallLimits) -> None:
    """Everything that needs no model. Raises Status."""
    check_input(call, limits)
    check_sampling(call)
    if call.max_tokens is not None and call.max_tokens < 1:
        raise invalid(f"max_tokens: {call.max_tokens}; at least 1")
    if call.min_tokens < 0:
        raise invalid(f"min_tokens: {call.min_tokens}; at least 0")
    if call.max_tokens is not None and call.min_tokens > call.max_tokens:
        raise invalid(f"min_tokens: {call.min_tokens}; at most max_tokens, {call.max_tokens}")
    if call.priority is not None and not 0 <= call.priority <= PRIORITY_MAX:
        raise invalid(f"priority: {call.priority}; 0 (first) to {PRIORITY_MAX}")
    _check_stops(call)
    if not 0 <= call.timeout_ms <= limits.timeout_s_max * 1000:
        raise invalid(f"timeout_ms: {call.timeout_ms}; up to {limits.timeout_s_max * 1000}")
    if not 0 <= call.resume_window_s <= limits.resume_window_s_max:
        raise invalid(f"resume_window_s: {call.resume_window_s}; up to {limits.resume_window_s_max}")
    if not 0 <= call.queue_timeout_ms <= QUEUE_TIMEOUT_MS_MAX:
        raise invalid(f"queue_timeout_ms: {call.queue_timeout_ms}; up to {QUEUE_TIMEOUT_MS_MAX}")
    if not 0 <= call.stream_interval <= STREAM_INTERVAL_MAX:
        raise invalid(f"stream_interval: {call.stream_interval}; up to {STREAM_INTERVAL_MAX}")
    if _bytes(call.client_key, "client_key") > CLIENT_KEY_BYTES_MAX:
        raise invalid(f"client_key: at most {CLIENT_KEY_BYTES_MAX} bytes")


def _check_stops(call: GenerateCall) -> None:
    if len(call.stop) > STOP_LEN_MAX:
        raise invalid(f"stop: {len(call.stop)} strings; at most {STOP_LEN_MAX}")
    for i, stop in enumerate(call.stop):
        if not 0 < _bytes(stop, f"stop[{i}]") <= STOP_BYTES_MAX:
            raise invalid(f"stop[{i}]: 1 to {STOP_BYTES_MAX} bytes")
    if len(call.stop_token_ids) > STOP_IDS_LEN_MAX:
        raise invalid(f"stop_token_ids: {len(call.stop_token_ids)}; at most {STOP_IDS_LEN_MAX}")


def admit(
    call: GenerateCall,
    model: ModelFacts,
    prompt_ids: tuple[int, ...],
    *,
    request_id: RequestId,
    gateway: GatewayId,
    fresh_seed: int,
    bad_words: BadWords = (),
    trace_parent: bytes = b"",
    priority_default: int = PRIORITY_DEFAULT,
) -> Request:
    """The request of a checked call, its prompt in tokens. Raises Status for what only the model can tell."""
    _check_tokens(call, model, prompt_ids)
    room = model.context_len_max - len(prompt_ids)
    max_tokens = room if call.max_tokens is None else min(call.max_tokens, room)
    if call.min_tokens > max_tokens:
        raise invalid(f"min_tokens: {call.min_tokens}; at most {max_tokens}, what the context leaves")
    digest = body_digest(call, model.name)
    seed = call.seed
    if seed is None:
        seed = derived_seed(request_id, digest) if call.client_key else fresh_seed
    return Request(
        id=request_id,
        tenant=call.tenant,
        gateway=gateway,
        model=model.name,
        prompt_ids=prompt_ids,
        seed=seed,
        sampling=sampling_of(call, bad_words),
        limits=Limits(
            max_tokens=max_tokens,
            min_tokens=call.min_tokens,
            stop=tuple(stop.encode() for stop in call.stop),
            stop_token_ids=call.stop_token_ids,
            ignore_eos=call.ignore_eos,
        ),
        timeout_ms=_timeout_ms(call),
        resume_window_ms=U32_MAX if call.job else call.resume_window_s * 1000,
        priority=priority_default if call.priority is None else call.priority,
        body_digest=digest,
        keyed=bool(call.client_key),
        trace_parent=trace_parent,
        stream_interval=call.stream_interval,
        queue_timeout_us=call.queue_timeout_ms * 1000,
        key=call.key,
    )


def _check_tokens(call: GenerateCall, model: ModelFacts, prompt_ids: tuple[int, ...]) -> None:
    field = "chat" if call.chat is not None else "prompt" if call.prompt is not None else "token_ids"
    if not prompt_ids:
        raise invalid(f"{field}: has no tokens")
    if len(prompt_ids) >= model.context_len_max:
        raise invalid(
            f"{field}: {len(prompt_ids)} tokens; at most {model.context_len_max - 1}, "
            f"the context of model {model.name} less one"
        )
    check_prompt_logprobs(call, len(prompt_ids))
    check_ids(call, model.name, model.vocab_size)


def _timeout_ms(call: GenerateCall) -> int:
    """The shorter of the request's and the call's; 0 is none."""
    if call.time_left_ms is None:
        return call.timeout_ms
    left = min(max(1, call.time_left_ms), U32_MAX)
    return min(call.timeout_ms, left) if call.timeout_ms else left


# ---- derived ids -----------------------------------------------------------------------------------


def request_id_of(tenant: str, client_key: str) -> RequestId:
    """52 lower-case letters and digits; tells nothing of the key."""
    digest = _digest(b"shoal.request", tenant.encode(), client_key.encode())
    return RequestId(b32encode(digest).decode().rstrip("=").lower())


def check_request_id(request_id: str) -> RequestId:
    """Raises Status."""
    if not (0 < len(request_id) <= REQUEST_ID_LEN_MAX and request_id.isascii() and request_id.isalnum()):
        raise invalid(f"request_id: 1 to {REQUEST_ID_LEN_MAX} letters and digits")
    return RequestId(request_id)


def body_digest(call: GenerateCall, model: str) -> bytes:
    """SHA-256 of what the client asked for; not of its key, nor of how long this call will wait."""
    parts = [b"shoal.body", model.encode()]
    if call.chat is not None:
        parts.append(b"chat")
        for turn in call.chat:
            parts += (turn.role.encode(), turn.content.encode())
            if more := _more(turn):
                parts += (b"shoal.turn", _numbers((len(more),)), *(part.encode() for part in more))
    elif call.prompt is not None:
        parts += (b"prompt", call.prompt.encode())
    else:
        parts += (b"ids", _numbers(call.token_ids or ()))
    parts.append(b"parameters")
    for real in (call.temperature, call.top_p):
        parts.append(b"" if real is None else struct.pack("<d", real))
    for number in (call.top_k, call.seed, call.max_tokens, call.priority):
        parts.append(b"" if number is None else struct.pack("<Q", number))
    flags = (call.min_tokens, int(call.ignore_eos), call.timeout_ms, call.resume_window_s)
    parts += (_numbers(flags), _numbers(call.stop_token_ids), *(stop.encode() for stop in call.stop))
    if call.prompt_logprobs is not None:
        parts += (b"prompt_logprobs", _numbers((call.prompt_logprobs,)))
    best_of = () if call.best_of is None else (b"shoal.best_of", _numbers((call.best_of,)))
    grammar: tuple[bytes, ...] = ()
    if call.grammar is not None:
        grammar = (b"shoal.grammar", call.grammar.kind.value.encode(), call.grammar.text.encode())
    if call.tools:
        grammar += (b"shoal.tools", _numbers((len(call.tools),)), *(tool.encode() for tool in call.tools))
    return _digest(*grammar, *best_of, *_shaping(call), *parts)


def _shaping(call: GenerateCall) -> list[bytes]:
    """Nothing, if the call says nothing of it."""
    reals = (
        call.min_p,
        call.typical_p,
        call.repetition_penalty,
        call.presence_penalty,
        call.frequency_penalty,
    )
    counts = (call.top_logprobs, call.n)
    given = *reals, *counts
    if given == (None,) * len(given) and not (call.logit_bias or call.allowed_token_ids or call.bad_words):
        return []
    parts = [b"shoal.shaped"]
    parts += [b"" if real is None else struct.pack("<d", real) for real in reals]
    parts += [b"" if number is None else struct.pack("<Q", number) for number in counts]
    parts.append(b"".join(struct.pack("<Qd", *pair) for pair in sorted(call.logit_bias)))
    parts += (_numbers(call.allowed_token_ids), _numbers((len(call.bad_words),)))
    return [*parts, *(word.encode() for word in call.bad_words)]


def choice_id(request_id: RequestId, choice: int) -> RequestId:
    """Of one of several choices; the first has the request's own, so that another number of them under the
    same key meets it."""
    return RequestId(f"{request_id}c{choice}") if choice else request_id


def of_choice(request: Request, choice: int, trace_parent: bytes) -> Request:
    """One of several: a request like any other, with an id and a seed of its own. The prompt is the same:
    only the first is told of it."""
    name, seed = choice_id(request.id, choice), choice_seed(request.seed, choice)
    sampling = replace(request.sampling, prompt_logprobs=None) if choice else request.sampling
    return replace(request, id=name, seed=seed, sampling=sampling, trace_parent=trace_parent, choice=choice)


def choice_seed(seed: int, choice: int) -> int:
    """The first choice's is the request's; SplitMix64's output function (Steele, Lea, Flood 2014) of seed and
    choice for the others. Asked for alone with this seed, a choice comes out the same."""
    if not choice:
        return seed
    x = (seed ^ (0xD1342543DE82EF95 * choice)) & U64_MAX
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & U64_MAX
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & U64_MAX
    return x ^ (x >> 31)


def derived_seed(request_id: RequestId, digest: bytes) -> int:
    """The same for every retry with the same key and body."""
    return int.from_bytes(_digest(b"shoal.seed", request_id.encode(), digest)[:8], "little")


def _numbers(numbers: tuple[int, ...]) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def _digest(*parts: bytes) -> bytes:
    state = hashlib.sha256()
    for part in parts:
        state.update(struct.pack("<Q", len(part)))
        state.update(part)
    return state.digest()


def _bytes(text: str, field: str) -> int:
    """Its size in UTF-8. Raises Status for what has none (a lone surrogate)."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise invalid(f"{field}: not valid Unicode") from None
