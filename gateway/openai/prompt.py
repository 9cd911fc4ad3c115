"""Pure. What an answer says again of its prompt: text, ids, and its first token."""

from dataclasses import dataclass

from chassis.messages.gateway import GenerateCall
from gateway.openai.call import Asked


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str = ""  # where it is echoed
    ids: tuple[int, ...] = ()  # where they are told
    first: bytes = b""  # the first token, of which no log probability is known


NO_PROMPT = Prompt()


def wants_ids(asked: Asked, call: GenerateCall) -> bool:
    """Whether the prompt must be tokens before it is asked for."""
    return asked.token_ids or (asked.echo and asked.logprobs is not None)


def wants_text_of_ids(asked: Asked, call: GenerateCall) -> bool:
    return asked.echo and (call.prompt is None or asked.logprobs is not None)


def prompt_of(call: GenerateCall, ids: tuple[int, ...], tokens: tuple[bytes, ...]) -> Prompt:
    """`call`: as it came. `tokens`: of the ids, where they are wanted."""
    text = call.prompt
    if text is None:
        text = b"".join(tokens).decode(errors="replace")
    return Prompt(text, ids, tokens[0] if tokens else b"")
