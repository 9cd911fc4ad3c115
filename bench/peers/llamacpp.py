"""llama.cpp built for this processor, through its own library: a small driver has the model and the clock."""

import os
import subprocess
import sys
from collections.abc import Sequence

from bench.peers.answering import answer, die_with_parent
from bench.peers.conversation import Failed, Load, Times
from bench.peers.environments import LLAMA_VERSION

DRIVER = "SHOAL_BENCH_LLAMA_DRIVER"  # the path of the program


class LlamaCpp:
    version = LLAMA_VERSION
    note = "its library: no server, no sampler, the KV cache per sequence, threads waiting as it likes"

    def __init__(self, load: Load) -> None:
        sizes = [load.threads, load.sequences_max, load.context_len_max]
        self._driver = subprocess.Popen(
            [os.environ[DRIVER], load.model, *map(str, sizes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sys.stderr,
            text=True,
            preexec_fn=die_with_parent,
        )
        sys.stderr.write(self._line())

    def run(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> list[Times]:
        words = [output_tokens, len(prompts)]
        for prompt in prompts:
            words += [len(prompt), *prompt]
        assert self._driver.stdin is not None
        self._driver.stdin.write(" ".join(map(str, words)) + "\n")
        self._driver.stdin.flush()
        _, *values = self._line().split()
        triples = zip(values[::3], values[1::3], values[2::3], strict=True)
        return [Times(float(first), float(last), int(tokens)) for first, last, tokens in triples]

    def close(self) -> None:
        assert self._driver.stdin is not None
        self._driver.stdin.close()
        self._driver.wait(10)

    def _line(self) -> str:
        assert self._driver.stdout is not None
        line = self._driver.stdout.readline()
        if not line:
            raise Failed(f"the driver ended with {self._driver.wait(10)}")
        return line


if __name__ == "__main__":
    answer(LlamaCpp)
