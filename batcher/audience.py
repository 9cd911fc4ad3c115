"""Pure. The gateways that follow one request: where each stands, and for how long there may be none.

A gateway is sent everything from the index after what it is known to hold, in parts of the interval that the
request asks for. Only the owner counts the
time without a gateway; a count that runs is stopped, but never lengthened. While it runs the gateways are
asked again and again, because one that is content with its parts has no reason to speak.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from chassis.ids import Attempt, GatewayId, RequestId
from chassis.messages.chunk import Part
from chassis.messages.sampling import PromptTold, TokenLogprobs

Told = dict[tuple[int, ...], tuple[TokenLogprobs, ...]]
Parts = dict[GatewayId, list[Part]]
GATEWAYS_MAX = 8  # of one request; beyond, the one that joined first is forgotten and must attach again


@dataclass(slots=True)
class Audience:
    next_index: dict[GatewayId, int] = field(default_factory=dict)  # the first output index to send
    count_ends: float | None = None  # the request is cancelled then
    ask_at: float | None = None  # the next question while the count runs
    answers: dict[GatewayId, tuple[int, ...]] = field(default_factory=dict)  # to the takeover question
    told: Told = field(default_factory=dict)  # beside an answer

    def answered(
        self, gateway: GatewayId, ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...] = ()
    ) -> None:
        """Yes, to the takeover question."""
        self.answers[gateway] = ids
        if logprobs:
            self.told[ids] = logprobs

    def settle(self) -> tuple[dict[GatewayId, tuple[int, ...]], Told]:
        """The answers so far, and what was told beside them; they are forgotten."""
        answers, told = self.answers, self.told
        self.answers, self.told = {}, {}
        return answers, told

    def join(self, gateway: GatewayId, held_len: int) -> None:
        self.next_index[gateway] = held_len
        if len(self.next_index) > GATEWAYS_MAX:
            del self.next_index[next(iter(self.next_index))]
        self.count_ends = self.ask_at = None

    def leave(self, gateway: GatewayId, ends: float, ask_at: float) -> None:
        """Starts the count if it was the last."""
        self.next_index.pop(gateway, None)
        if not self.next_index:
            self.count(ends, ask_at)

    def count(self, ends: float, ask_at: float) -> None:
        if self.count_ends is None:
            self.ask_at = ask_at
        self.count_ends = ends if self.count_ends is None else min(ends, self.count_ends)

    def count_anew(self, now: float, slept_s: float) -> None:
        """Who sleeps hears nobody: that time does not count."""
        if self.count_ends is not None:
            self.count_ends += slept_s
            self.ask_at = now

    def rewind(self, output_len: int) -> None:
        """The output is another from here on."""
        for gateway, index in self.next_index.items():
            self.next_index[gateway] = min(index, output_len)

    def waits(self, output_len: int, interval: int) -> bool:
        """Whether somebody lacks the first id, or as many as a part is to have."""
        least = max(1, interval)
        for index in self.next_index.values():  # once a token: a generator takes three times as long
            if not index or output_len - index >= least:
                return True
        return False

    def serve(
        self,
        request_id: RequestId,
        attempt: Attempt,
        ids: Sequence[int],
        digest: int,
        parts: Parts,
        logprobs: Sequence[TokenLogprobs] = (),
        prompt: PromptTold | None = None,
    ) -> None:
        """Adds to `parts` what each gateway lacks of `ids`; from now on it counts as sent. `logprobs`: one an
        id, or none. `prompt` goes with the first id."""
        end = len(ids)
        for gateway, index in self.next_index.items():
            if index < end:
                told, begun = tuple(logprobs[index:]), None if index else prompt
                part = Part(request_id, attempt, index, tuple(ids[index:]), digest, told, begun)
                parts.setdefault(gateway, []).append(part)
                self.next_index[gateway] = end
