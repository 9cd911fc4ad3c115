"""A peer's side of the conversation: reads questions from standard input, answers where output was.

What the peer's libraries print goes to standard error, so that a line of theirs is never an answer. The
process dies with the bench, also when it is stopped between two turns.
"""

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Protocol

from bench.peers.conversation import Ask, Failed, Load, Loaded, Ran, Times, build_answer, parse_question

_PR_SET_PDEATHSIG = 1


class Engine(Protocol):
    @property
    def version(self) -> str: ...

    @property
    def note(self) -> str:
        """What the reader of a figure must know of the setting."""

    def run(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> list[Times]:
        """All prompts at once; times since the call. Raises what the engine raises."""

    def close(self) -> None: ...


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def answer(load: Callable[[Load], Engine]) -> None:
    """Until the bench hangs up."""
    die_with_parent()
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine: Engine | None = None
    for line in sys.stdin:
        try:
            match parse_question(line):
                case Load() as setting:
                    begun = time.perf_counter()
                    engine = load(setting)
                    out.write(build_answer(Loaded(engine.version, time.perf_counter() - begun, engine.note)))
                case Ask(prompts, output_tokens):
                    if engine is None:
                        raise Failed("asked before it was loaded")
                    begun = time.perf_counter()
                    requests = engine.run(prompts, output_tokens)
                    out.write(build_answer(Ran(time.perf_counter() - begun, tuple(requests))))
        except Exception as error:
            traceback.print_exc()
            out.write(build_answer(Failed(f"{type(error).__name__}: {error}")))
    if engine is not None:
        engine.close()


class Stopwatch:
    """First and last token of each request, for engines that hand out tokens step by step."""

    def __init__(self, count: int) -> None:
        self._start = time.perf_counter()
        self._first_s: list[float | None] = [None] * count
        self._last_s = [0.0] * count
        self.tokens = [0] * count

    def saw(self, request: int, tokens: int) -> None:
        """It has so many tokens now."""
        now = time.perf_counter() - self._start
        if tokens > self.tokens[request]:
            if self._first_s[request] is None:
                self._first_s[request] = now
            self.tokens[request], self._last_s[request] = tokens, now

    def times(self) -> list[Times]:
        return [
            Times(last if first is None else first, last, tokens)
            for first, last, tokens in zip(self._first_s, self._last_s, self.tokens, strict=True)
        ]
