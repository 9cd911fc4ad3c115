"""Pure. What a gateway counts of its clients' streams, and tells scrapers under OpenTelemetry's GenAI names.

A stream is counted once, when it is over: nothing is added per token.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from chassis.errors import Status
from chassis.metrics import (
    DURATION_S,
    FIRST_TOKEN_S,
    OUTPUT_TOKEN_S,
    Family,
    Histogram,
    counter,
    gauge,
    histogram,
)

Stream = tuple[str, str]  # operation, model
SERIES_MAX = 1024  # of each; what would be more is not counted


class Meters:
    def __init__(self) -> None:
        self._durations: dict[tuple[Stream, str], Histogram] = {}  # and error type
        self._first_token: dict[Stream, Histogram] = {}
        self._per_token: dict[Stream, Histogram] = {}
        self._outcomes: Counter[tuple[str, str]] = Counter()  # model, reason or error type
        self._refused: Counter[str] = Counter()  # by error type

    @contextmanager
    def door(self) -> Iterator[None]:
        """What is refused within never was a stream."""
        try:
            yield
        except Status as error:
            self._refused[error.code.value] += 1
            raise

    def ended(
        self,
        operation: str,
        model: str,
        outcome: str,
        failed: bool,
        duration_s: float,
        first_token_s: float | None,
        num_tokens: int,
    ) -> None:
        """`outcome`: the reason of the end, or what went wrong. `num_tokens`: those the client took."""
        stream = (operation, model)
        _of(self._durations, (stream, outcome if failed else ""), DURATION_S).observe(duration_s)
        if (model, outcome) in self._outcomes or len(self._outcomes) < SERIES_MAX:
            self._outcomes[model, outcome] += 1
        if first_token_s is None:
            return
        _of(self._first_token, stream, FIRST_TOKEN_S).observe(first_token_s)
        if num_tokens > 1:
            each_s = max(0.0, duration_s - first_token_s) / (num_tokens - 1)
            _of(self._per_token, stream, OUTPUT_TOKEN_S).observe(each_s)

    def families(self, gauges: Mapping[str, float], counts: Mapping[str, int]) -> Iterator[Family]:
        """`gauges`: by name; `counts`: of what is rare."""
        durations = histogram("gen_ai_server_request_duration_seconds", "From the call to its end")
        for (stream, error), found in self._durations.items():
            more = {"error_type": error} if error else {}
            durations.add(found, **_labels(stream), **more)
        yield durations
        first = histogram("gen_ai_server_time_to_first_token_seconds", "From the call to the first ids")
        each = histogram("gen_ai_server_time_per_output_token_seconds", "Of those after the first")
        for family, by_stream in ((first, self._first_token), (each, self._per_token)):
            for stream, found in by_stream.items():
                family.add(found, **_labels(stream))
            yield family
        outcomes = counter("shoal_gateway_streams_total", "Streams that ended, by reason or error")
        for (model, outcome), count in self._outcomes.items():
            outcomes.add(count, gen_ai_request_model=model, outcome=outcome)
        yield outcomes
        yield counter("shoal_gateway_refused_total", "Calls refused at the door").each(
            self._refused, "error_type"
        )
        for name, value in gauges.items():
            yield gauge(name, "By now").add(value)
        yield counter("shoal_gateway_events_total", "What is rare, by kind").each(counts, "event")


def _labels(stream: Stream) -> dict[str, str]:
    return {"gen_ai_operation_name": stream[0], "gen_ai_request_model": stream[1]}


K = TypeVar("K")


def _of(found: dict[K, Histogram], key: K, bounds: tuple[float, ...]) -> Histogram:
    known = found.get(key)
    if known is None:
        if len(found) >= SERIES_MAX:
            return Histogram(bounds)  # which nobody reads
        known = found[key] = Histogram(bounds)
    return known
