"""Pure. Who waits to be admitted, in order: priority, then fairness between tenants, then deadline, then age.

Who owns a claim goes first, by the order of the running (`order`): it lost its place, or comes from another
owner. The batch class comes last, with its own claims in front; the head of its line may run only in spare
room, unless it is its turn. Nothing passes the first of the order because it is smaller.

Starvation bound, of three parts. Between priorities: `overtakes`. Between tenants of one priority:
`fair_share`. Of one tenant's requests at one priority none is passed by one that comes `patience_ms` later,
whatever its deadline, unless its own queue policy delays it.

The cost of coming, going and being first is a few binary searches and moves of memory: nothing looks at all
that wait. Who is first is kept until somebody comes, goes, or is settled.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from itertools import islice

from batcher.fair_share import FairShare
from batcher.overtakes import Overtakes
from batcher.queueing import BATCH, PRIORITIES, Queueing
from batcher.sequence import Sequence, Status
from chassis.ids import RequestId

WAITS = (Status.WAITING, Status.MATCHING, Status.MATCHED)


class ByOrder:
    """A line by the order of the running."""

    def __init__(self) -> None:
        self._line: list[tuple[tuple[int, int], Sequence]] = []
        self.work = 0

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, sequence in self._line)

    def add(self, sequence: Sequence) -> None:
        insort(self._line, (sequence.order, sequence))
        self.work += sequence.place.charge

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self._line, (sequence.order,))
        assert self._line[index][1] is sequence
        del self._line[index]
        self.work -= sequence.place.charge

    def check(self) -> None:
        orders = [order for order, _ in self._line]
        assert orders == sorted(orders) and len(dict.fromkeys(orders)) == len(orders)
        assert all(order == sequence.order and sequence.claimed for order, sequence in self._line)
        assert self.work == sum(sequence.place.charge for sequence in self)


class Level:
    """Who waits at one priority: the fresh, and behind them those that waited too long."""

    def __init__(self, queueing: Queueing) -> None:
        self.claimed = ByOrder()  # of the batch class only
        self.fresh = FairShare(queueing.tenant_weights)
        self.delayed: dict[RequestId, Sequence] = {}

    def __len__(self) -> int:
        return len(self.claimed) + len(self.fresh) + len(self.delayed)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.claimed
        yield from self.fresh
        yield from self.delayed.values()

    def first(self, count: int) -> Iterator[Sequence]:
        yield from islice(self.claimed, count)
        count -= min(count, len(self.claimed))
        yield from self.fresh.first(count)
        yield from islice(self.delayed.values(), count - min(count, len(self.fresh)))

    @property
    def work(self) -> int:
        """Tokens of all but the delayed."""
        return self.claimed.work + self.fresh.work


class WaitingRoom:
    def __init__(self, queueing: Queueing) -> None:
        self._queueing = queueing
        self._claimed = ByOrder()
        self._levels = [Level(queueing) for _ in range(PRIORITIES)]
        self._counts = [0] * PRIORITIES
        self._overtakes = Overtakes(PRIORITIES, queueing.overtakes_max)
        self._fresh: deque[Sequence] = deque()  # by age; who does not wait any more is skipped
        self._len = 0
        self.num_ids = 0  # tokens of all that wait
        self._first: tuple[Sequence, ...] = ()  # of the order, as far as somebody asked
        self._first_asked = 0  # how many; 0: somebody came or went since

    def __len__(self) -> int:
        return self._len

    def at(self, level: int) -> int:
        """How many wait at a priority, without those that own a claim."""
        return self._counts[level]

    @property
    def num_batch(self) -> int:
        """Of the batch class."""
        return self._counts[BATCH] if self._queueing.batch_class else 0

    @property
    def work_but_batch(self) -> int:
        """Tokens, without the batch class and the delayed."""
        levels = self._levels[:BATCH] if self._queueing.batch_class else self._levels
        return self._claimed.work + sum([level.work for level in levels])

    def add(self, sequence: Sequence) -> None:
        place = sequence.place
        level = self._levels[place.level]
        self._first_asked = 0
        self._len += 1
        self.num_ids += len(sequence.ids)
        if sequence.claimed and not place.batch:
            self._claimed.add(sequence)
            return
        self._counts[place.level] += 1
        if sequence.claimed:
            level.claimed.add(sequence)
        else:
            level.fresh.add(sequence)
            self._fresh.append(sequence)
            if len(self._fresh) > 2 * self._len + 64:
                self._fresh = deque(filter(is_fresh, self._fresh))

    def remove(self, sequence: Sequence) -> None:
        """It waits no longer."""
        place = sequence.place
        level = self._levels[place.level]
        self._first_asked = 0
        self._len -= 1
        self.num_ids -= len(sequence.ids)
        if sequence.claimed and not place.batch:
            self._claimed.remove(sequence)
            return
        self._counts[place.level] -= 1
        if sequence.claimed:
            level.claimed.remove(sequence)
        elif place.delayed:
            del level.delayed[sequence.request.id]
        else:
            level.fresh.remove(sequence)

    def took(self, sequence: Sequence) -> bool:
        """It runs now: its tenant is charged. True: it was a lower priority's turn."""
        place = sequence.place
        was_turn = self._turn == place.level
        if sequence.claimed or place.delayed:
            self.remove(sequence)
        else:
            self._levels[place.level].fresh.took(sequence)
            self._counts[place.level] -= 1
            self._len -= 1
            self.num_ids -= len(sequence.ids)
            place.charged = True
        if not sequence.claimed or place.batch:
            self._overtakes.took(place.level, self._counts)
        self._first_asked = 0
        return was_turn

    def delay(self, sequence: Sequence) -> None:
        """It waited too long: behind all of its priority that have not."""
        level = self._levels[sequence.place.level]
        level.fresh.remove(sequence)
        self._first_asked = 0
        sequence.place.delayed = True
        level.delayed[sequence.request.id] = sequence

    def settle(self, sequence: Sequence, work: int) -> None:
        """What it took in earnest, of one whose tenant was charged."""
        place = sequence.place
        if place.charged:
            place.charged = False
            self._first_asked = 0
            self._levels[place.level].fresh.settle(sequence.request.tenant, work - place.charge)

    # ---- the order ---------------------------------------------------------------------------------

    @property
    def _turn(self) -> int | None:
        """The priority that is due though a higher one waits."""
        turn = self._overtakes.turn(self._counts)
        return turn if turn is not None and any(self._counts[:turn]) else None

    @property
    def head(self) -> Sequence | None:
        first = self.first(1)
        return first[0] if first else None

    def gives_way(self, sequence: Sequence) -> bool:
        """Of the head: it may run in spare room only."""
        return sequence.place.batch and self._turn != BATCH

    def first(self, count: int) -> tuple[Sequence, ...]:
        """The first of the order, as it is if nobody comes or goes."""
        if self._first_asked < count:
            self._first, self._first_asked = tuple(self._in_order(count)), count
        return self._first if self._first_asked == count else self._first[:count]

    def _in_order(self, count: int) -> Iterator[Sequence]:
        for sequence in islice(self._claimed, count):
            count -= 1
            yield sequence
        if count <= 0:
            return
        early, turn = None, self._turn
        if turn is not None:
            early = next(self._levels[turn].first(1))
            count -= 1
            yield early
        for level, waiting in zip(self._levels, self._counts, strict=True):
            if count <= 0:
                return
            for sequence in level.first(count + 1) if waiting else ():
                if sequence is not early and count > 0:
                    count -= 1
                    yield sequence

    @property
    def oldest(self) -> Sequence | None:
        """Of the fresh: who waits here longest."""
        while self._fresh and not is_fresh(self._fresh[0]):
            self._fresh.popleft()
        return self._fresh[0] if self._fresh else None

    @property
    def oldest_but_batch(self) -> Sequence | None:
        """The same, without the batch class."""
        return next((s for s in self._fresh if is_fresh(s) and not s.place.batch), None)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._claimed
        for level in self._levels:
            yield from level

    def work_ahead(self, sequence: Sequence) -> float:
        """Tokens of work that are admitted before a fresh one that does not wait yet: at least so many, if
        nobody leaves."""
        place = sequence.place
        higher = sum(level.work for level in self._levels[: place.level])
        level = self._levels[place.level]
        return self._claimed.work + higher + level.claimed.work + level.fresh.work_ahead(sequence)

    def check(self) -> None:
        everyone = list(self)
        assert self._len == len(everyone)
        assert self.num_ids == sum(len(sequence.ids) for sequence in everyone)
        if self._first_asked:
            assert self._first == tuple(self._in_order(self._first_asked)), "not the first any more"
        self._claimed.check()
        self._overtakes.check()
        for number, level in enumerate(self._levels):
            level.claimed.check()
            level.fresh.check()
            assert self._counts[number] == len(level)
            assert all(sequence.place.level == number for sequence in level)
            assert all(sequence.place.delayed for sequence in level.delayed.values())
        assert all(sequence.status in WAITS for sequence in everyone)
        assert self.head is None or self.head in everyone


def is_fresh(sequence: Sequence) -> bool:
    """It waits, and has never run here or elsewhere."""
    return not sequence.claimed and sequence.status in WAITS
