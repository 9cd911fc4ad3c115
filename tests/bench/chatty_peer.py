"""A peer for tests: prints where it should not, dies when asked for 666 tokens, else answers at once."""

import os
import signal
from collections.abc import Sequence

from bench.peers.answering import Stopwatch, answer
from bench.peers.conversation import Load, Times


class Chatty:
    version, note = "9", "from a test"

    def __init__(self, load: Load) -> None:
        os.write(1, b"loading ...\n")
        if load.dtype == "float8":
            raise ValueError("no float8 here")

    def run(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> list[Times]:
        if output_tokens == 666:
            os.write(2, b"illegal instruction at 0x0\n")
            os.kill(os.getpid(), signal.SIGILL)
        watch = Stopwatch(len(prompts))
        for tokens in range(1, output_tokens + 1):
            for index in range(len(prompts)):
                watch.saw(index, tokens)
        return watch.times()

    def close(self) -> None:
        return None


if __name__ == "__main__":
    answer(Chatty)
