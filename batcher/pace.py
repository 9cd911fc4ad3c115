"""Pure. How fast the line moves, and when a request that comes now could have its answer.

Measured while somebody waits who cannot be admitted: only then is the pipeline as fast as it gets. Forgets by
half every `HALF_LIFE_S` of such time. What it says is meant to be too early rather than too late, so that
nobody is refused who would have had his answer; it says nothing until it has seen enough.
"""

from batcher.sequence import Sequence

HALF_LIFE_S = 10.0
WAITED_MIN_S = 1.0  # of a line that stood
ADMITTED_MIN = 8.0
ENDED_MIN = 8
LEARN = 0.1  # of each request that ends


class Pace:
    def __init__(self) -> None:
        self._since: float | None = None  # the head could not be admitted
        self._waited_s = 0.0
        self._work = 0.0  # tokens admitted in that time
        self._admitted = 0.0
        self._ended = 0
        self._prompt_token_s = 0.0
        self._output_token_s = 0.0
        self._output_len = 0.0
        self.first_token_s: float | None = None  # from the stream's door, of all but the batch class

    # ---- what happens ------------------------------------------------------------------------------

    def admitted(self, work: int) -> None:
        if self._since is not None:
            self._work += work
            self._admitted += 1

    def planned(self, now: float, stands: bool) -> None:
        """`stands`: somebody waits who cannot be admitted now."""
        if self._since is not None and now > self._since:
            kept = 0.5 ** ((now - self._since) / HALF_LIFE_S)
            self._waited_s = self._waited_s * kept + now - self._since
            self._work *= kept
            self._admitted *= kept
        self._since = now if stands else None

    def halted(self) -> None:
        """The pipeline is lost: no line moves, and that says nothing of how fast one does."""
        self._since = None

    def ended(self, sequence: Sequence, now: float) -> None:
        """It has all its output."""
        timings, usage = sequence.timings(now), sequence.usage()
        computed = usage.prompt_tokens - usage.cached_tokens
        if not sequence.place.batch:
            first_s = (timings.waiting_us + timings.prefill_us) / 1e6
            before_s = self.first_token_s if self.first_token_s is not None else first_s
            self.first_token_s = before_s + LEARN * (first_s - before_s)
        self._ended += 1
        share = max(LEARN, 1 / self._ended)
        self._output_len += share * (usage.output_tokens - self._output_len)
        if computed > 0:
            self._prompt_token_s += share * (timings.prefill_us / 1e6 / computed - self._prompt_token_s)
        if usage.output_tokens > 1:
            each_s = timings.decode_us / 1e6 / (usage.output_tokens - 1)
            self._output_token_s += share * (each_s - self._output_token_s)

    # ---- what follows ------------------------------------------------------------------------------

    def work(self, prompt_len: int, max_tokens: int) -> int:
        """Tokens that a request is expected to take."""
        output = min(max_tokens, round(self._output_len)) if self._ended >= ENDED_MIN else max_tokens
        return prompt_len + max(1, output)

    @property
    def tokens_per_s(self) -> float | None:
        """Of work, admitted while the line stood; None: not known yet."""
        if self._waited_s < WAITED_MIN_S or self._admitted < ADMITTED_MIN:
            return None
        return self._work / self._waited_s

    def wait_s(self, work_ahead: float) -> float | None:
        """Until so much work has been admitted; None: not known yet."""
        rate = self.tokens_per_s
        return work_ahead / rate if rate else None

    def service_s(self, prompt_len: int, least_output: int) -> float:
        """From its admission until it has `least_output` tokens; 0 as long as nothing is known. What of its
        prompt is cached is not known, so the prompt counts half."""
        if self._ended < ENDED_MIN:
            return 0.0
        return 0.5 * prompt_len * self._prompt_token_s + (least_output - 1) * self._output_token_s

    def check(self) -> None:
        assert self._waited_s >= 0 and self._work >= 0 and self._admitted >= 0
