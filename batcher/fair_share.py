"""Pure. Shares among the tenants that wait at one priority: start-time fair queueing on tokens of work.

A tenant that waits has a start tag; the smallest goes first (Goyal, Vin, Cheng 1996). When one of its
requests is taken its tag grows by the work per weight. The virtual time is the tag of whoever was taken last;
who begins to wait starts there at least, so that nobody saves up what he did not use. What a request really
took is settled when it ends: the tag moves by the difference, but never behind the virtual time.

Bound: while two tenants both wait, and but for what is settled meanwhile, the work per weight that they are
given differs by at most the largest charge per weight of the one and that of the other.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush
from itertools import islice

from batcher.sequence import Sequence

TAGS_MAX = 4096  # of tenants that do not wait
Entry = tuple[float, int, Sequence]  # due, number of its arrival


class TenantLine:
    """One tenant's requests, the one that is due first in front."""

    __slots__ = ("entries", "number", "start", "weight", "work")

    def __init__(self, number: int, start: float, weight: float) -> None:
        self.number = number
        self.start = start
        self.weight = weight
        self.work = 0  # tokens
        self.entries: list[Entry] = []

    @property
    def key(self) -> tuple[float, int]:
        return self.start, self.number


class FairShare:
    def __init__(self, weights: Mapping[str, float]) -> None:
        """`weights`: of tenants; who is not named has 1."""
        assert all(weight > 0 for weight in weights.values())
        self._weights = weights
        self._lines: dict[str, TenantLine] = {}  # of tenants that wait
        self._ranked: list[tuple[tuple[float, int], TenantLine]] = []  # by start tag
        self._ahead: dict[str, float] = {}  # tags beyond the virtual time, of tenants that do not wait
        self._virtual = 0.0
        self._numbers = 0
        self._len = 0
        self.work = 0  # tokens that wait

    def __len__(self) -> int:
        return self._len

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def add(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        line = self._lines.get(tenant)
        if line is None:
            self._numbers += 1
            start = max(self._virtual, self._ahead.pop(tenant, 0.0))
            line = self._lines[tenant] = TenantLine(self._numbers, start, self.weight(tenant))
            insort(self._ranked, (line.key, line))
        insort(line.entries, _entry(sequence))
        line.work += sequence.place.charge
        self.work += sequence.place.charge
        self._len += 1

    def remove(self, sequence: Sequence) -> None:
        """It waits no longer, and nothing is charged."""
        line = self._drop(sequence)
        if not line.entries:
            self._unrank(line)
            self._leave(sequence.request.tenant, line)

    def took(self, sequence: Sequence) -> None:
        """It runs: its tenant is charged."""
        line = self._drop(sequence)
        self._unrank(line)
        self._virtual = max(self._virtual, line.start)
        line.start += sequence.place.charge / line.weight
        if line.entries:
            insort(self._ranked, (line.key, line))
        else:
            self._leave(sequence.request.tenant, line)

    def settle(self, tenant: str, difference: int) -> None:
        """What one of its requests took beyond (or, negative, below) its charge."""
        line, moved = self._lines.get(tenant), difference / self.weight(tenant)
        if line is not None:
            self._unrank(line)
            line.start = max(self._virtual, line.start + moved)
            insort(self._ranked, (line.key, line))
        else:
            self._go_ahead(tenant, max(self._ahead.get(tenant, 0.0), self._virtual) + moved)

    def first(self, count: int) -> Iterator[Sequence]:
        """The first of the order, if nobody comes meanwhile."""
        coming = [(*line.key, line, 0) for _, line in islice(self._ranked, count)]
        heapify(coming)
        while coming and count > 0:
            count -= 1
            start, number, line, index = heappop(coming)
            sequence = line.entries[index][2]
            if index + 1 < len(line.entries):
                heappush(coming, (start + sequence.place.charge / line.weight, number, line, index + 1))
            yield sequence

    def work_ahead(self, sequence: Sequence) -> float:
        """Tokens of work that are given before one that does not wait yet: of its own tenant what is due
        before it (as many of its tokens as of its requests), of the others what their share is meanwhile."""
        tenant = sequence.request.tenant
        line = self._lines.get(tenant)
        if line is None:
            return 0.0
        mine = line.work * bisect_left(line.entries, _entry(sequence)[:2]) / len(line.entries)
        weights = sum(other.weight for other in self._lines.values())
        return mine + min(self.work - line.work, mine * (weights - line.weight) / line.weight)

    def __iter__(self) -> Iterator[Sequence]:
        return (entry[2] for line in self._lines.values() for entry in line.entries)

    def _drop(self, sequence: Sequence) -> TenantLine:
        line = self._lines[sequence.request.tenant]
        index = bisect_left(line.entries, _entry(sequence)[:2])
        assert line.entries[index][2] is sequence
        del line.entries[index]
        line.work -= sequence.place.charge
        self.work -= sequence.place.charge
        self._len -= 1
        return line

    def _unrank(self, line: TenantLine) -> None:
        index = bisect_left(self._ranked, (line.key,))
        assert self._ranked[index][1] is line
        del self._ranked[index]

    def _leave(self, tenant: str, line: TenantLine) -> None:
        del self._lines[tenant]
        self._go_ahead(tenant, line.start)

    def _go_ahead(self, tenant: str, tag: float) -> None:
        """Kept while it says more than the virtual time does."""
        if tag > self._virtual:
            self._ahead[tenant] = tag
        else:
            self._ahead.pop(tenant, None)
        if len(self._ahead) > TAGS_MAX:
            self._ahead = {name: at for name, at in self._ahead.items() if at > self._virtual}
        if len(self._ahead) > TAGS_MAX:  # ahead in earnest: those that are the least lose it
            ranked = sorted(self._ahead, key=lambda name: self._ahead[name])
            self._ahead = {name: self._ahead[name] for name in ranked[TAGS_MAX // 2 :]}

    def check(self) -> None:
        assert self._len == sum(len(line.entries) for line in self._lines.values())
        assert len(self._ranked) == len(self._lines)
        assert [key for key, _ in self._ranked] == sorted(line.key for line in self._lines.values())
        for tenant, line in self._lines.items():
            assert line.entries and tenant not in self._ahead
            keys = [entry[:2] for entry in line.entries]
            assert keys == sorted(keys) and len(dict.fromkeys(keys)) == len(keys)
            assert all(entry == _entry(entry[2]) for entry in line.entries)
        assert self.work == sum(line.work for line in self._lines.values())
        assert len(self._ahead) <= TAGS_MAX


def _entry(sequence: Sequence) -> Entry:
    return sequence.place.due, sequence.order[1], sequence
