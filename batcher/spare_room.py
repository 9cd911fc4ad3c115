"""Pure. How much of a step the batch class may have, so that all others hardly notice.

Beside others it has a share of the time that their step takes, saved up until it is worth a token: so it
always goes on, and a step is longer by little. Of steps with prompts, which are the longest that decodes wait
for, it has a fifth of that. A step of its own goes only while no other runs, one a stage, and is short, since
who comes waits for it: it takes as long as its share of the time in which others get their first token, but
at least `LEAST` steps of one sequence, which is what any step takes. Where no others have been seen it has
all the room.
"""

from collections.abc import Callable

from batcher.pace import Pace

BESIDE_PROMPTS = 0.2  # of its share
LEAST = 1.25
ALL = 1 << 20


class SpareRoom:
    def __init__(
        self,
        predict: Callable[[int], float],
        pace: Pace,
        share: float = 0.05,
        row_s: Callable[[], float] = float,
    ) -> None:
        """`predict`: seconds of a step of so many tokens. `row_s`: what a decode adds, which may be more than
        a prompt's token does."""
        self._predict = predict
        self._pace = pace
        self._share = share
        self._row_s = row_s
        self._saved_s = 0.0

    def beside(self, num_tokens: int, num_rows: int) -> int:
        """Tokens beside `num_tokens` of others in so many rows. Counts as given."""
        step_s, token_s = self._predict(num_tokens), self._token_s(num_tokens)
        if token_s <= 0:
            return 1
        share = self._share if num_tokens == num_rows else self._share * BESIDE_PROMPTS
        self._saved_s = min(self._saved_s, token_s) + share * step_s
        count = int(self._saved_s / token_s)
        self._saved_s = max(0.0, self._saved_s - count * token_s)
        return count

    def alone(self) -> int:
        """Tokens of a step without others."""
        first_token_s, token_s = self._pace.first_token_s, self._token_s(1)
        if first_token_s is None or token_s <= 0:
            return ALL
        step_s = max(self._share * first_token_s, LEAST * self._predict(1))
        return max(1, 1 + int((step_s - self._predict(1)) / token_s))

    def _token_s(self, num_tokens: int) -> float:
        more_s = self._predict(num_tokens + 1) - self._predict(num_tokens)
        return max(more_s, self._row_s())

    def check(self) -> None:
        assert self._saved_s >= 0
