"""What delay between hosts must cost at least: the bound that the row `delay` is held against.

A sequence's next step can leave when its last token is back, so each has one sampling step in flight. N of
them in b groups go round in

    max( b t(N/b),  s t(N/b) + (s + 1) d )

seconds for s stages that each take t(n) for a step of n rows, and a one-way delay of d on each of the s + 1
links of the ring: as long as one stage takes for all groups, or as one group takes once round. More groups
hide more of the way, and each costs every stage its base anew; so the bound on tokens a second is N over the
least of these over b. While b t(N/b) with b = s + 1 is more than the round trip, delay costs nothing.
"""

from collections.abc import Callable, Sequence

from bench.load import Workload

StageS = Callable[[int], float]  # seconds of a step, by its tokens
CHUNK_TOKENS = 512


def round_s(stages: Sequence[StageS], sequences: int, groups: int, delay_s: float) -> float:
    """Until each sequence has its next token, in so many groups."""
    took = [stage(-(-sequences // groups)) for stage in stages]
    return max(groups * max(took), sum(took) + (len(stages) + 1) * delay_s)


def best_groups(stages: Sequence[StageS], sequences: int, delay_s: float, groups_max: int = 64) -> int:
    numbers = range(1, min(groups_max, sequences) + 1)
    return min(numbers, key=lambda groups: round_s(stages, sequences, groups, delay_s))


def decode_bound(stages: Sequence[StageS], sequences: int, delay_s: float) -> float:
    """Tokens a second of so many sequences that decode."""
    groups = best_groups(stages, sequences, delay_s)
    return sequences / round_s(stages, sequences, groups, delay_s)


def prompts_s(stages: Sequence[StageS], tokens: int, delay_s: float) -> float:
    """Of prompts whose chunks follow each other, until the last one's token is back."""
    chunks = -(-tokens // CHUNK_TOKENS)
    took = [stage(min(tokens, CHUNK_TOKENS)) for stage in stages]
    return (chunks - 1) * max(took) + sum(took) + (len(stages) + 1) * delay_s


def bound(stages: Sequence[StageS], workload: Workload, delay_s: float) -> float:
    """Output tokens a second of a workload whose requests all come at once."""
    tokens = workload.concurrent * workload.output_tokens
    prompts = prompts_s(stages, workload.concurrent * workload.prompt_tokens, delay_s)
    decodes = (workload.output_tokens - 1) * workload.concurrent
    return tokens / (prompts + decodes / decode_bound(stages, workload.concurrent, delay_s))
