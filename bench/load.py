"""Clients of a workload: so many requests at once, of given lengths, and what they saw.

Prompts are random token ids drawn anew for each run, so that no run finds the last one's prefixes cached;
greedy, the end token ignored. Tokens are counted and timed where the client takes them.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.client import Accepted, AsyncClient, Delta, Finished, Params


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    concurrent: int
    prompt_tokens: int
    output_tokens: int
    shared_tokens: int = 0  # first ones of every prompt, the same in all


W1 = Workload("W1", 1, 128, 128)
W2 = Workload("W2", 16, 128, 128)
W3 = Workload("W3", 64, 128, 64)
W4 = Workload("W4", 1, 1024, 1)
W5 = Workload("W5", 16, 512 + 32, 32, shared_tokens=512)
WORKLOADS = {w.name: w for w in (W1, W2, W3, W4, W5)}


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation: each turn's prompt is all that was said, and the user's next words."""

    name: str
    turns: int
    user_tokens: int  # of each turn
    output_tokens: int

    @property
    def context_len(self) -> int:
        return self.turns * (self.user_tokens + self.output_tokens)


W6 = Chat("W6", 10, 64, 128)


@dataclass(slots=True)
class Seen:
    """One request, by the client's clock, in seconds since the run began."""

    request_id: str = ""
    sent_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)  # one per delta with ids
    ids: list[int] = field(default_factory=list)
    finished_s: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    workload: Workload
    seen: tuple[Seen, ...]
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return sum(len(s.ids) for s in self.seen) / self.seconds

    @property
    def ttft_ms(self) -> list[float]:
        return [1000 * (s.arrivals_s[0] - s.sent_s) for s in self.seen]

    @property
    def gaps_ms(self) -> list[float]:
        """Between deltas of one stream, all streams together."""
        return [
            1000 * (b - a) for s in self.seen for a, b in zip(s.arrivals_s, s.arrivals_s[1:], strict=False)
        ]

    @property
    def longest_silence_s(self) -> float:
        """Of any stream, from when it was sent to its end."""
        times = ([s.sent_s, *s.arrivals_s, s.finished_s] for s in self.seen)
        return max(b - a for t in times for a, b in zip(t, t[1:], strict=False))


def draw_prompts(workload: Workload, seed: int, vocab_size: int) -> list[list[int]]:
    rng = random.Random(seed)
    low = min(1000, vocab_size // 2)  # beyond the special tokens

    def draw(count: int) -> list[int]:
        return [rng.randrange(low, vocab_size) for _ in range(count)]

    shared = draw(workload.shared_tokens)
    own = workload.prompt_tokens - workload.shared_tokens
    return [shared + draw(own) for _ in range(workload.concurrent)]


async def ask(
    client: AsyncClient,
    prompt: Sequence[int],
    output_tokens: int,
    start: float,
    priority: int | None = None,
    interval: int = 0,
) -> Seen:
    seen = Seen()
    await listen(client, prompt, output_tokens, start, seen, priority, interval)
    return seen


async def listen(
    client: AsyncClient,
    prompt: Sequence[int],
    output_tokens: int,
    start: float,
    seen: Seen,
    priority: int | None = None,
    interval: int = 0,
) -> None:
    """Asks, and notes in `seen` while it hears. `interval`: ids of a delta, at least."""
    seen.sent_s = time.perf_counter() - start
    params = Params(
        temperature=0.0,
        max_tokens=output_tokens,
        ignore_eos=True,
        priority=priority,
        stream_interval=interval,
    )
    async for event in client.generate(prompt, params):
        match event:
            case Accepted(request_id=request_id):
                seen.request_id = request_id
            case Delta(ids=ids):
                if ids:
                    seen.arrivals_s.append(time.perf_counter() - start)
                    seen.ids.extend(ids)
            case Finished(reason=reason):
                seen.finished_s, seen.reason = time.perf_counter() - start, reason


async def converse(client: AsyncClient, chat: Chat, seed: int, vocab_size: int, known: bool) -> list[Seen]:
    """Its turns, one after another. Not `known`: each prompt begins with a token of its own, so that no
    block of the turns before can be found: what turns of the same lengths cost where nothing is cached."""
    rng = random.Random(seed)
    low = min(1000, vocab_size // 2)
    said: list[int] = []
    heard: list[Seen] = []
    start = time.perf_counter()
    for turn in range(chat.turns):
        said += [rng.randrange(low, vocab_size) for _ in range(chat.user_tokens)]
        if not known:
            said[0] = low + (seed * chat.turns + turn) % (vocab_size - low)
        seen = await ask(client, said, chat.output_tokens, start)
        assert len(seen.ids) == chat.output_tokens, f"{seen.request_id}: {len(seen.ids)} ids, {seen.reason}"
        said += seen.ids
        heard.append(seen)
    return heard


async def run(client: AsyncClient, workload: Workload, seed: int, vocab_size: int) -> Result:
    """All requests at once; ends with the last answer."""
    prompts = draw_prompts(workload, seed, vocab_size)
    start = time.perf_counter()
    seen = await asyncio.gather(*(ask(client, p, workload.output_tokens, start) for p in prompts))
    seconds = time.perf_counter() - start
    for s in seen:
        assert len(s.ids) == workload.output_tokens, f"{s.request_id}: {len(s.ids)} ids, {s.reason}"
    return Result(workload, tuple(seen), seconds)
