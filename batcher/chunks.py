"""Pure. How much of the prompts a step takes: so much that steps take about the same time, and that decodes
are not kept waiting.

The measure is time as the stages are known to take it (`stage_cost`), so that chunks shrink as their prefix
grows. A step takes at most, whichever is least:
- as much as its budget of tokens would take from a prompt's beginning;
- as much as brings the prompts on soonest: through several stages smaller chunks follow each other, until
  what each step costs by itself outweighs it;
- with decodes: so much that these take `slowdown_max` times what they take alone, more where many prompts
  wait for few decodes, and `max_step_ms` at most. With one stage, where all decodes wait for a prompt, what
  was not taken is saved up for the next one's first chunk; and a step without decodes, for which they would
  wait too, goes past them only if it ends a prompt;
- a share of its tokens where blocks are short, so that those that run can grow.
Before anything is known of stages tokens alone count.
"""

from dataclasses import dataclass
from math import sqrt

from batcher.stage_cost import NOTHING, Coefficients, Load, StageCost

CROWD = 16.0  # prompts per decode for which a step may take so many times its decodes' time more
SOONEST_MIN_TOKENS = 32
SAVED = 4.0  # what prompts may save up, in times of what decodes take
USUAL_TOKENS = 64
UNIT = 8  # chunks are multiples of it where they can be
LEAST_TOKENS = 4  # of the first prompt in a step, or it might never be done


@dataclass(frozen=True, slots=True)
class ChunkRules:
    step_tokens_max: int
    block_size_tokens: int
    max_step_ms: float = 0.0  # of a step with decodes, through all stages; 0: no bound
    slowdown_max: float = 1.7  # of decodes by prompts; 0: no bound


@dataclass(frozen=True, slots=True)
class Scene:
    """What a step is planned in."""

    decodes: Load  # of this step
    groups: int
    group: Load  # of a step with its share of all decodes
    decoding: int  # sequences that decode, in whichever step
    prompts: int  # sequences that compute or await their prompt, and have a place
    whole: Load  # of those that compute it, from their cached prefixes to their ends
    begins: bool  # the first of them has just got its place
    start: int  # computed of the first of them
    left: int  # and not computed
    blocks_share: float = (
        1.0  # of the blocks that prompts need, what is there beside the next block of all that run
    )


class Budget:
    """What is left for prompts in one step."""

    __slots__ = ("_cost", "_first", "_least", "_seconds", "spent_s", "tokens")

    def __init__(self, cost: Coefficients, tokens: int, seconds: float, least: int) -> None:
        self._cost = cost
        self.tokens = tokens
        self._seconds = seconds
        self._least = least  # of the first chunk
        self._first = True
        self.spent_s = 0.0

    @classmethod
    def of_tokens(cls, tokens: int) -> "Budget":
        """With no measure but tokens."""
        return cls(NOTHING, tokens, float("inf"), 0)

    def chunk(self, start: int, wanted: int) -> int:
        """So many of the next `wanted` tokens of a prompt fit, `start` being computed."""
        most = min(self.tokens, wanted)
        if self._seconds == float("inf") or most <= 0:
            return max(0, most)
        fits = self._fitting(start)
        if UNIT < fits < most:  # the rest in parts alike
            parts = -(-wanted // (fits - fits % UNIT))
            fits = min(fits, UNIT * -(-wanted // (parts * UNIT)))
        if self._first:
            fits = max(fits, self._least)
        return max(0, min(most, fits))

    def _fitting(self, start: int) -> int:
        cost, seconds = self._cost, self._seconds
        seconds -= cost.read * start
        linear = cost.prompt_token + cost.read + cost.attended * (start + 0.5)
        if linear <= 0.0:  # as far as is known they cost nothing
            return self.tokens
        if seconds <= 0.0:
            return 0
        if cost.attended <= 0.0:
            return int(seconds / linear + 1e-6)
        # attended / 2 * n^2 + linear * n = seconds
        return int((sqrt(linear * linear + 2 * cost.attended * seconds) - linear) / cost.attended + 1e-6)

    def spend(self, start: int, tokens: int) -> None:
        self.tokens -= tokens
        took_s = self._cost.of_chunk(tokens, start)
        self._seconds -= took_s
        self.spent_s += took_s
        self._first = False


class Chunks:
    def __init__(self, rules: ChunkRules, cost: StageCost) -> None:
        assert rules.step_tokens_max >= 1 and rules.max_step_ms >= 0
        assert rules.slowdown_max == 0 or rules.slowdown_max > 1
        self._rules = rules
        self._cost = cost
        self._num_stages = 1
        self._saved_s = 0.0  # that prompts may take beside decodes and have not taken
        self._share_s = 0.0  # of it, what the last step with decodes brought
        self._free_s = 0.0  # of the step being planned: what it may take without it

    def open(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self._saved_s = 0.0

    def decodes_go(self, scene: Scene) -> None:
        """A step has decodes: prompts may take so much more time beside them."""
        alone_s = self._turn_cost(scene).seconds(scene.group)
        more_s = self._more_s(scene, alone_s)
        saved_s = SAVED * alone_s if self._num_stages == 1 else 0.0
        self._saved_s = min(self._saved_s + more_s, max(more_s, saved_s))
        self._share_s = more_s

    def budget(self, scene: Scene) -> Budget:
        """For a step that has its decodes, if any."""
        rules, cost = self._rules, self._cost.all
        tokens = max(0, rules.step_tokens_max - scene.decodes.decodes)
        if scene.blocks_share < 1.0:
            tokens = max(min(tokens, rules.block_size_tokens), int(tokens * scene.blocks_share))
        if not self._cost.known:
            return Budget(cost, tokens, float("inf"), 0)
        seconds = cost.of_chunk(tokens, 0)
        if self._num_stages > 1:
            seconds = min(seconds, self._soonest_s(scene, cost.seconds(scene.decodes)))
        if not scene.decoding:
            self._saved_s = 0.0
            return Budget(cost, tokens, seconds, LEAST_TOKENS)
        turn = self._turn_cost(scene)
        seconds *= turn.prompt_token / cost.prompt_token if cost.prompt_token else 1.0
        cost, alone_s = turn, turn.seconds(scene.group)
        self._free_s = 0.0 if scene.decodes.decodes else alone_s - cost.base
        if self._num_stages == 1 and not scene.decodes.decodes:  # one more that all decodes wait for
            self._free_s = -cost.base
        beside_s = (self._saved_s if scene.begins else min(self._saved_s, self._share_s)) + self._free_s
        if rules.max_step_ms:
            beside_s = min(beside_s, rules.max_step_ms / 1e3 - alone_s + self._free_s)
        budget = Budget(cost, tokens, min(seconds, beside_s), LEAST_TOKENS if scene.decodes.decodes else 0)
        if self._free_s < 0.0 and self._bound and budget.chunk(scene.start, scene.left) < scene.left:
            return Budget(cost, 0, 0.0, 0)
        return budget

    @property
    def _bound(self) -> bool:
        return bool(self._rules.max_step_ms or self._rules.slowdown_max)

    def _more_s(self, scene: Scene, alone_s: float) -> float:
        if not self._rules.slowdown_max:
            return float("inf")
        return alone_s * max(self._rules.slowdown_max - 1, CROWD * scene.prompts / scene.decoding)

    def _soonest_s(self, scene: Scene, step_s: float) -> float:
        """Of k chunks, of `all_s` together, the last leaves the last of n stages after k + n - 1 times what a
        step takes, its chunk included: least with k = sqrt((n - 1) * all_s / step_s)."""
        cost = self._cost.all
        all_s = cost.seconds(scene.whole) - cost.base
        least_s = cost.of_chunk(SOONEST_MIN_TOKENS, scene.start)
        return max(least_s, sqrt(all_s * step_s / (self._num_stages - 1)))

    def sent(self, scene: Scene, budget: Budget) -> None:
        """The step goes with what was spent of its budget."""
        if scene.decoding and budget.spent_s:
            self._saved_s = max(0.0, self._saved_s - max(0.0, budget.spent_s - self._free_s))

    def _turn_cost(self, scene: Scene) -> Coefficients:
        """By which decodes wait for their next token: of a step through all stages, or, where that takes
        longer, of the steps of all groups at the busiest stage."""
        turns = [self._cost.all]
        if self._num_stages > 1:
            turns += [stage.times(scene.groups) for stage in self._cost.stages]
        usual = scene.group._replace(prompt_tokens=USUAL_TOKENS)
        return max(turns, key=lambda turn: turn.seconds(usual))
