"""The words of `shoal generate`, and what an answer looks like.

One choice is written as it comes; of several each is written when it is whole. Log probabilities are a line
a token: logarithm, rank, token, and the likeliest beside it; the prompt's come first.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from shoal.client import (
    Accepted,
    Delta,
    Event,
    Finished,
    InvalidArgument,
    Params,
    Prompt,
    PromptLogprobs,
    TokenLogprobs,
)


def add_words(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help="text, or - to read it from standard input")
    parser.add_argument("--chat", action="store_true", help="as a user's turn, in the model's chat template")
    parser.add_argument("--system", default="", help="a system turn before it (with --chat)")
    parser.add_argument("--ids", action="store_true", help="print output ids instead of text")
    add_params(parser)


def add_params(parser: argparse.ArgumentParser) -> None:
    """What `params_of` reads."""
    parser.add_argument("--model", default="", help="which one, when several are served")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--min-tokens", type=int, default=0, help="nothing ends the output before")
    parser.add_argument("--stop", action="append", default=[], help="may be given several times")
    parser.add_argument("--stop-token-id", type=int, action="append", default=[], help="also")
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--priority", type=int, help="0 (first) to 9")
    parser.add_argument("--timeout", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--client-key", default="", help="names the request: a retry is told the same answer")
    parser.add_argument(
        "--resume-window", type=int, default=0, metavar="SECONDS", help="how long it lives without a client"
    )
    _add_sampling(parser.add_argument_group("sampling"))


def _add_sampling(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--temperature", type=float, help="0 = greedy")
    group.add_argument("--top-k", type=int)
    group.add_argument("--top-p", type=float)
    group.add_argument("--min-p", type=float)
    group.add_argument("--typical-p", type=float)
    group.add_argument("--seed", type=int)
    group.add_argument("--repetition-penalty", type=float, help="1 = off")
    group.add_argument("--presence-penalty", type=float, help="-2 to 2")
    group.add_argument("--frequency-penalty", type=float, help="-2 to 2")
    group.add_argument(
        "--logit-bias", action="append", default=[], type=_bias, metavar="ID=BIAS", help="several times"
    )
    group.add_argument("--allowed-token-id", type=int, action="append", default=[], help="several times")
    group.add_argument("--bad-word", action="append", default=[], help="several times")
    group.add_argument("--logprobs", type=int, metavar="N", help="log probabilities, and of the N likeliest")
    group.add_argument("--prompt-logprobs", type=int, metavar="N", help="the same of the prompt")
    group.add_argument("-n", type=int, help="choices")
    group.add_argument("--best-of", type=int, metavar="N", help="generate N, show the likeliest")
    group.add_argument("--stream-interval", type=int, default=0, metavar="N", help="ids of a delta, at least")


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    return int(token_id), float(bias)


def prompt_of(arguments: argparse.Namespace) -> Prompt:
    text: str = arguments.prompt
    if text == "-":  # what is no UTF-8 is refused where every other value is
        text = sys.stdin.buffer.read().decode(errors="surrogateescape")
    if not arguments.chat:
        return text
    system = [("system", arguments.system)] if arguments.system else []
    return [*system, ("user", text)]


def params_of(arguments: argparse.Namespace) -> Params:
    a = arguments
    return Params(
        model=a.model,
        temperature=a.temperature,
        top_k=a.top_k,
        top_p=a.top_p,
        seed=a.seed,
        max_tokens=a.max_tokens,
        min_tokens=a.min_tokens,
        stop=tuple(a.stop),
        stop_token_ids=tuple(a.stop_token_id),
        ignore_eos=a.ignore_eos,
        priority=a.priority,
        timeout_ms=round(a.timeout * 1000),
        resume_window_s=a.resume_window,
        client_key=a.client_key,
        min_p=a.min_p,
        typical_p=a.typical_p,
        repetition_penalty=a.repetition_penalty,
        presence_penalty=a.presence_penalty,
        frequency_penalty=a.frequency_penalty,
        logit_bias=dict(a.logit_bias),
        allowed_token_ids=tuple(a.allowed_token_id),
        bad_words=tuple(a.bad_word),
        top_logprobs=a.logprobs,
        prompt_logprobs=a.prompt_logprobs,
        n=a.n,
        best_of=a.best_of,
        stream_interval=a.stream_interval,
    )


def add_resume_words(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request_id")
    parser.add_argument(
        "--held", metavar="FILE", help="output ids that you have, as --ids prints them; - is standard input"
    )
    parser.add_argument("--ids", action="store_true", help="print output ids instead of text")


def held_of(arguments: argparse.Namespace) -> list[int]:
    """Raises InvalidArgument."""
    if arguments.held is None:
        return []
    try:
        text = sys.stdin.read() if arguments.held == "-" else Path(arguments.held).read_text()
        return [int(word) for word in text.split()]
    except OSError as error:
        raise InvalidArgument("INVALID_ARGUMENT", f"--held: {error.strerror}: {arguments.held}") from None
    except ValueError:
        raise InvalidArgument("INVALID_ARGUMENT", "--held: numbers with spaces between") from None


def print_events(events: Iterable[Event], ids: bool = False, several: bool = False) -> None:
    """`several`: of more than one choice."""
    kept: dict[int, list[str]] = {}
    for event in events:
        if several and isinstance(event, Delta):
            kept.setdefault(event.choice, []).append(_shown(event, ids))
        else:
            if several and isinstance(event, Finished):
                _print(f"[{event.choice}] " + "".join(kept.pop(event.choice, [])), end="")
            print_event(event, ids)


def print_event(event: Event, ids: bool = False) -> None:
    match event:
        case Accepted(request_id):
            _say(f"request {request_id}")
        case PromptLogprobs() as told:
            _print("".join(map(_line, told.logprobs)), end="")
        case Delta() as delta:
            _print(_shown(delta, ids), end="")
        case Finished() as end:
            rate = end.output_tokens / (end.decode_us / 1e6) if end.decode_us else 0.0
            _print("")
            of_all = f", {end.generated_tokens} by all candidates" if end.generated_tokens else ""
            _say(
                f"{end.reason}: {end.output_tokens} tokens ({rate:.1f}/s) after {end.prompt_tokens}"
                f" of prompt, {end.cached_tokens} of them cached{of_all}"
            )


def _shown(delta: Delta, ids: bool) -> str:
    if delta.logprobs:
        return "".join(map(_line, delta.logprobs))
    return "".join(f"{i} " for i in delta.ids) if ids else delta.text


def _line(entry: TokenLogprobs) -> str:
    beside = "".join(f"  {_quoted(top.token)} {top.logprob:.3f}" for top in entry.top)
    return f"{entry.logprob:8.3f} {entry.rank:6} {_quoted(entry.token):16}{beside}\n"


def _quoted(token: bytes) -> str:
    return repr(token.decode(errors="backslashreplace"))


def _print(text: str, end: str = "\n") -> None:
    sys.stdout.write(text + end)
    sys.stdout.flush()


def _say(text: str) -> None:
    """For people, not for pipes."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
