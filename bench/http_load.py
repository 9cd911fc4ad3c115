"""Load over HTTP, from a process of its own: what it costs is nobody's but its own, and it costs little.

`python -m bench.http_load` reads one plan (JSON) from standard input and writes what it saw to standard
output. Requests go out when they are due, whether or not earlier ones have come back (an open loop): a
server that falls behind is seen to. Latency counts from when a request was due.
"""

import asyncio
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise

from chassis.service import loop_factory

DRAIN_TIMEOUT_S = 30.0
_EVENT = b"data: {"


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Poisson at `rate_per_s`, and at so many times that for a second after each of `bursts_at_s`."""

    host: str
    port: int
    rate_per_s: float
    seconds: float
    prompt_tokens: int
    output_tokens: int
    burst: float = 10.0
    bursts_at_s: Sequence[float] = ()
    seed: int = 1

    def due_s(self) -> list[float]:
        rng, now, due = random.Random(self.seed), 0.0, list[float]()
        while True:
            bursting = any(at <= now < at + 1.0 for at in self.bursts_at_s)
            now += rng.expovariate(self.rate_per_s * (self.burst if bursting else 1.0))
            if now >= self.seconds:
                return due
            due.append(now)


@dataclass(frozen=True, slots=True)
class Streams:
    """So many at once, every token an event. The first `settle_tokens` of each, while others are still being
    admitted, and as many of the last are not looked at."""

    host: str
    port: int
    streams: int
    prompt_tokens: int
    output_tokens: int
    seed: int = 1
    settle_tokens: int = 40


@dataclass(slots=True)
class Answers:
    """Entry i of each list is about request i. `statuses`: 0 where the connection ended before the answer."""

    due_s: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    retry_after: int = 0  # refusals that said when to come again


@dataclass(slots=True)
class Gaps:
    """Between events of one stream, of all streams."""

    ms: list[float] = field(default_factory=list)
    events: list[int] = field(default_factory=list)  # by stream


class Exchange(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._bytes = bytearray()
        self.events_s: list[float] = []
        self.status = 0
        self.retry_after = False
        self.open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.open = transport, True  # type: ignore[assignment]  # uvloop's is no asyncio.Transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    async def ask(self, request: bytes) -> None:
        """Returns at the answer's end, or the connection's."""
        assert self._transport is not None
        self._bytes.clear()
        self.events_s, self.status, self.retry_after = [], 0, False
        self._done = self._loop.create_future()
        self._transport.write(request)
        await self._done

    def data_received(self, data: bytes) -> None:
        self._bytes += data
        if self.status == 0 and not self._head():
            return
        if found := self._bytes.count(_EVENT):
            self.events_s += [self._loop.time()] * found
        if self._over():
            self.status = self._seen_status
            assert self._done is not None
            if not self._done.done():
                self._done.set_result(None)
        elif self._chunked:
            del self._bytes[:-6]  # an event or the end may have begun in what stays, and no more

    def _head(self) -> bool:
        end = self._bytes.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = bytes(self._bytes[:end]).lower()
        self._seen_status = int(head[9:12])
        self._chunked = b"transfer-encoding: chunked" in head
        self.retry_after = b"\r\nretry-after:" in head
        length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
        self._left = int(length or 0)
        del self._bytes[: end + 4]
        self.status = -1  # the head is there
        return True

    def _over(self) -> bool:
        if self._chunked:
            return self._bytes.endswith(b"\r\n0\r\n\r\n")
        return len(self._bytes) >= self._left


def request_of(host: str, prompt: Sequence[int], output_tokens: int, stream: bool) -> bytes:
    body = json.dumps(
        {
            "model": "fake",
            "prompt": list(prompt),
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
            "return_token_ids": stream,
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def prompt_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(256) for _ in range(length)]


async def arrive(plan: Arrivals) -> Answers:
    loop, answers, idle = asyncio.get_running_loop(), Answers(), list[Exchange]()
    rng = random.Random(plan.seed + 1)
    begin = loop.time() + 0.1

    async def one(i: int, due: float, request: bytes) -> None:
        exchange = idle.pop() if idle else None
        if exchange is None or not exchange.open:
            _, exchange = await loop.create_connection(Exchange, plan.host, plan.port)
        await exchange.ask(request)
        answers.latency_s[i] = loop.time() - begin - due
        answers.statuses[i] = max(0, exchange.status)
        answers.retry_after += exchange.retry_after
        if exchange.open:
            idle.append(exchange)

    due_s = plan.due_s()
    answers.due_s, answers.latency_s, answers.statuses = due_s, [0.0] * len(due_s), [0] * len(due_s)
    async with asyncio.timeout(plan.seconds + DRAIN_TIMEOUT_S), asyncio.TaskGroup() as group:
        for i, due in enumerate(due_s):
            request = request_of(plan.host, prompt_of(rng, plan.prompt_tokens), plan.output_tokens, False)
            if (wait := begin + due - loop.time()) > 0:
                await asyncio.sleep(wait)
            group.create_task(one(i, due, request))
    return answers


async def drip(plan: Streams) -> Gaps:
    loop, gaps, rng = asyncio.get_running_loop(), Gaps(), random.Random(plan.seed)

    async def one(prompt: Sequence[int]) -> None:
        transport, exchange = await loop.create_connection(Exchange, plan.host, plan.port)
        await exchange.ask(request_of(plan.host, prompt, plan.output_tokens, True))
        transport.close()
        gaps.events.append(len(exchange.events_s))
        steady = exchange.events_s[plan.settle_tokens : -plan.settle_tokens]
        gaps.ms += [1000 * (b - a) for a, b in pairwise(steady)]

    async with asyncio.TaskGroup() as group:
        for _ in range(plan.streams):
            group.create_task(one(prompt_of(rng, plan.prompt_tokens)))
    return gaps


def main() -> None:
    given = json.load(sys.stdin)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        if "rate_per_s" in given:
            json.dump(asdict(runner.run(arrive(Arrivals(**given)))), sys.stdout)
        else:
            json.dump(asdict(runner.run(drip(Streams(**given)))), sys.stdout)


if __name__ == "__main__":
    main()
