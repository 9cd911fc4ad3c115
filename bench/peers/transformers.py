"""transformers' continuous batching over its paged attention, as a process without a server."""

import os
from collections.abc import Sequence

import torch
import transformers

from bench.peers.answering import Stopwatch, answer
from bench.peers.conversation import Load, Times

POLL_S = 1.0
PAD_ID = 2


class Transformers:
    note = "generate_batch, sdpa over pages"

    def __init__(self, load: Load) -> None:
        torch.set_num_threads(load.threads)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            load.model, dtype=getattr(torch, load.dtype), attn_implementation="paged|sdpa"
        ).eval()  # type: ignore[no-untyped-call]

    @property
    def version(self) -> str:
        return str(transformers.__version__)

    def run(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> list[Times]:
        config = transformers.GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=output_tokens,
            min_new_tokens=output_tokens,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=PAD_ID,
        )
        watch = Stopwatch(len(prompts))
        with torch.inference_mode():
            outputs = self._model.generate_batch(
                inputs=[list(p) for p in prompts], generation_config=config, progress_bar=False
            )
        for index, output in enumerate(outputs.values()):
            watch.saw(index, len(output.generated_tokens))
        return watch.times()

    def close(self) -> None:
        return None


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    answer(Transformers)
