"""vLLM's CPU build, its engine driven step by step in this process: no server between it and the clock."""

import os
from collections.abc import Sequence

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # a second process waits by spinning

import vllm
from vllm.sampling_params import RequestOutputKind

from bench.peers.answering import Stopwatch, answer
from bench.peers.conversation import Load, Times

STEP_TOKENS_MAX = 4096


class Vllm:
    def __init__(self, load: Load) -> None:
        eager = os.environ.get("SHOAL_BENCH_EAGER") == "1"
        self.note = "enforce_eager" if eager else "compiled"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, load.cache_mb // 1024))
        cores = sorted(os.sched_getaffinity(0))[: load.threads]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        self._engine = vllm.LLM(
            model=load.model,
            dtype=load.dtype,
            max_model_len=load.context_len_max,
            max_num_seqs=load.sequences_max,
            max_num_batched_tokens=STEP_TOKENS_MAX,
            enable_prefix_caching=True,
            enforce_eager=eager,
        ).llm_engine
        self._next_id = 0

    @property
    def version(self) -> str:
        return str(vllm.__version__)

    def run(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> list[Times]:
        params = vllm.SamplingParams(
            temperature=0.0,
            max_tokens=output_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.CUMULATIVE,
        )
        watch = Stopwatch(len(prompts))
        places = {}
        for index, prompt in enumerate(prompts):
            name = str(self._next_id)
            self._next_id += 1
            places[name] = index
            self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                watch.saw(places[output.request_id], len(output.outputs[0].token_ids))
        return watch.times()

    def close(self) -> None:
        return None


if __name__ == "__main__":
    answer(Vllm)
