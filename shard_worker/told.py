"""Pure. What a step's result says beside token ids."""

from chassis.messages.pipeline import PackedStep
from chassis.messages.sampling import TokenLogprobs
from chassis.messages.step_result import PromptAnswer
from shard_worker.executor import StepOutput
from shard_worker.prompt_asks import answers, entries_of

Entry = tuple[int, TokenLogprobs]  # by place
Refused = tuple[tuple[int, str], ...]
Told = tuple[list[Entry], list[PromptAnswer], tuple[int, ...], tuple[int, ...], Refused]
NOTHING_TOLD: Told = ([], [], (), (), ())


def told_of(step: PackedStep, output: StepOutput) -> Told:
    """As results have it: log probabilities by place, prompts, places whose logits were no numbers, and those
    whose grammars let nothing be drawn."""
    entries, prompts = [], []
    if (columns := output.logprobs) is not None:
        entries = list(zip(columns.places.tolist(), entries_of(columns), strict=True))
    if output.prompts is not None:
        prompts = answers(step, output.prompts)
    return entries, prompts, output.nan_rows, output.waiting_rows, output.refused_rows
