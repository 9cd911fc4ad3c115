"""OpenVINO GenAI's continuous batching pipeline, step by step, on a GGUF file."""

from collections.abc import Sequence

import numpy as np
import openvino as ov
import openvino_genai as genai

from bench.peers.answering import Stopwatch, answer
from bench.peers.conversation import Load, Times

STEP_TOKENS_MAX = 4096


class OpenVino:
    note = "KV cache and activations as the library chooses"

    def __init__(self, load: Load) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = max(1, load.cache_mb // 1024)
        scheduler.max_num_batched_tokens = STEP_TOKENS_MAX
        scheduler.max_num_seqs = load.sequences_max
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        properties = {"INFERENCE_NUM_THREADS": load.threads}
        self._pipe = genai.ContinuousBatchingPipeline(load.model, scheduler, "CPU", properties)
        self._next_id = 0

    @property
    def version(self) -> str:
        return str(genai.__version__)

    def run(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> list[Times]:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = output_tokens
        config.ignore_eos = True
        config.do_sample = False
        watch = Stopwatch(len(prompts))
        handles = []
        for prompt in prompts:
            ids = ov.Tensor(np.array([prompt], dtype=np.int64))
            handles.append(self._pipe.add_request(self._next_id, ids, config))
            self._next_id += 1
        tokens = [0] * len(prompts)
        while self._pipe.has_non_finished_requests():
            self._pipe.step()
            for index, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        tokens[index] += len(output.generated_ids)
                watch.saw(index, tokens[index])
        return watch.times()

    def close(self) -> None:
        return None


if __name__ == "__main__":
    answer(OpenVino)
