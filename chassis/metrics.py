"""Pure. What a service counts, and how a scraper reads it: Prometheus' text format, version 0.0.4.

A service keeps plain numbers of its own and names them when it is asked, so that the paths of steps and
tokens know nothing of metrics. Only distributions are kept here: `Histogram`. Names are OpenTelemetry's
(GenAI) with underscores where it has one, else `shoal_*`; seconds, tokens and bytes, never multiples.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

Labels = tuple[tuple[str, str], ...]
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# bounds as OpenTelemetry's GenAI conventions advise
DURATION_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
OUTPUT_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
TOKEN_GAP_S = (0.001, 0.002, 0.005, *OUTPUT_TOKEN_S)
BATCH_SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)


class Histogram:
    """Counts by upper bounds, ascending, and what lies above."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


@dataclass(slots=True)
class Family:
    """One name, and its samples by their labels."""

    name: str
    kind: str  # counter, gauge, histogram
    help: str
    samples: list[tuple[Labels, float | Histogram]] = field(default_factory=list)

    def add(self, value: float | Histogram, **labels: str) -> "Family":
        self.samples.append((tuple(labels.items()), value))
        return self

    def each(self, values: Mapping[str, float], label: str, **more: str) -> "Family":
        """A sample for each of `values`, whose names are the label's."""
        for name, value in values.items():
            self.add(value, **{label: name}, **more)
        return self


def counter(name: str, told: str) -> Family:
    assert name.endswith("_total"), name
    return Family(name, "counter", told)


def gauge(name: str, told: str) -> Family:
    return Family(name, "gauge", told)


def histogram(name: str, told: str) -> Family:
    return Family(name, "histogram", told)


def render(families: Iterable[Family]) -> str:
    lines: list[str] = []
    for family in families:
        if family.samples:
            lines.append(f"# HELP {family.name} {_escaped(family.help)}")
            lines.append(f"# TYPE {family.name} {family.kind}")
        for labels, value in family.samples:
            if isinstance(value, Histogram):
                lines.extend(_of_histogram(family.name, labels, value))
            else:
                lines.append(f"{family.name}{_set(labels)} {_number(value)}")
    return "".join([f"{line}\n" for line in lines])


def _of_histogram(name: str, labels: Labels, h: Histogram) -> Iterator[str]:
    so_far = 0
    for bound, count in zip((*h.bounds, float("inf")), h.counts, strict=True):
        so_far += count
        yield f"{name}_bucket{_set((*labels, ('le', _number(bound))))} {so_far}"
    yield f"{name}_sum{_set(labels)} {_number(h.sum)}"
    yield f"{name}_count{_set(labels)} {so_far}"


def _set(labels: Labels) -> str:
    inner = ",".join([f'{name}="{_escaped(value, quoted=True)}"' for name, value in labels])
    return f"{{{inner}}}" if inner else ""


def _escaped(text: str, quoted: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quoted else text


def _number(value: float) -> str:
    if value == float("inf"):
        return "+Inf"
    return str(int(value)) if value == int(value) else repr(value)
