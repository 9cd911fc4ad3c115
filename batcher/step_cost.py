"""Pure. What a step takes, learned from those that came back."""

FORGET = 0.99  # of what was seen, with each step
SEEN_MIN = 8.0  # steps, before a slope is believed
SPREAD_MIN = 0.01  # of the mean, as a variance: steps of one size tell nothing of a token's cost


class StepCost:
    """Predicts a step's seconds from its tokens: a line through the steps seen, old ones counting less. Its
    slope stays what it was while all steps are alike."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._tokens = 0.0  # mean
        self._seconds = 0.0  # mean
        self._variance = 0.0
        self._covariance = 0.0
        self._token_s = 0.0

    def predict(self, num_tokens: int) -> float:
        return max(0.0, self._seconds + self._token_s * (num_tokens - self._tokens))

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step of `num_tokens` added `seconds`."""
        if num_tokens <= 0:
            return
        self._weight = self._weight * FORGET + 1
        share = 1 / self._weight
        off_tokens, off_seconds = num_tokens - self._tokens, seconds - self._seconds
        self._tokens += share * off_tokens
        self._seconds += share * off_seconds
        self._variance = (1 - share) * (self._variance + share * off_tokens * off_tokens)
        self._covariance = (1 - share) * (self._covariance + share * off_tokens * off_seconds)
        if self._weight >= SEEN_MIN and self._variance > SPREAD_MIN * self._tokens**2:
            slope = max(0.0, self._covariance / self._variance)
            self._token_s = min(slope, self._seconds / self._tokens)  # no step costs less than nothing

    def check(self) -> None:
        assert self._variance >= 0 and self._token_s >= 0
