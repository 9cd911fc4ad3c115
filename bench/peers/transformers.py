"""transformers' continuous batching over its paged attention, its manager kept running between the turns."""

import os
from collections.abc import Sequence

import torch
import transformers

from bench.peers.answering import Stopwatch, answer
from bench.peers.conversation import Failed, Load, Times

PAGE_TOKENS = 256
STEP_TOKENS_MAX = 4096
RESULT_TIMEOUT_S = 900.0


class Transformers:
    note = "its manager, sdpa over pages, tokens streamed"

    def __init__(self, load: Load) -> None:
        torch.set_num_threads(load.threads)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            load.model, dtype=getattr(torch, load.dtype), attn_implementation="paged|sdpa"
        ).eval()  # type: ignore[no-untyped-call]
        config = transformers.GenerationConfig(do_sample=False, eos_token_id=-1)  # type: ignore[no-untyped-call]
        batching = transformers.ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=load.sequences_max * load.context_len_max // PAGE_TOKENS,
            max_batch_tokens=STEP_TOKENS_MAX,
        )
        self._manager = self._model.init_continuous_batching(config, batching)
        self._manager.start()

    @property
    def version(self) -> str:
        return str(transformers.__version__)

    def run(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> list[Times]:
        watch = Stopwatch(len(prompts))
        ids = self._manager.add_requests(
            [list(p) for p in prompts], max_new_tokens=output_tokens, streaming=True
        )
        places = {name: index for index, name in enumerate(ids)}
        left = len(prompts)
        while left:
            result = self._manager.get_result(timeout=RESULT_TIMEOUT_S)
            if result is None:
                raise Failed("its manager stopped")
            if result.error:
                raise Failed(str(result.error))
            watch.saw(places[result.request_id], len(result.generated_tokens))
            left -= result.is_finished()
        return watch.times()

    def close(self) -> None:
        self._manager.stop(block=True)


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    answer(Transformers)
