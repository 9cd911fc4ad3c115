"""Pure. One alarm per request, the earliest first: a heap that forgets lazily.

Setting an alarm replaces the one before. What the heap holds beyond the alarms that are set is stale,
and never more than half of it.
"""

import heapq

from chassis.ids import RequestId


class Alarms:
    def __init__(self) -> None:
        self._at: dict[RequestId, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, RequestId]] = []
        self._count = 0

    def set(self, request_id: RequestId, at: float | None) -> None:
        """`at` in seconds on the core's clock; None: no alarm."""
        old = self._at.get(request_id)
        if at is None:
            self._at.pop(request_id, None)
        elif old is None or old[0] != at:
            self._count += 1
            self._at[request_id] = (at, self._count)
            heapq.heappush(self._heap, (at, self._count, request_id))
        if len(self._heap) > 2 * len(self._at) + 16:
            self._heap = [(at, n, request_id) for request_id, (at, n) in self._at.items()]
            heapq.heapify(self._heap)

    def next(self) -> float | None:
        while self._heap:
            at, n, request_id = self._heap[0]
            if self._at.get(request_id) == (at, n):
                return at
            heapq.heappop(self._heap)
        return None

    def due(self, now: float) -> list[RequestId]:
        """Takes the alarms up to `now`, in the order of their times."""
        taken: list[RequestId] = []
        while (at := self.next()) is not None and at <= now:
            request_id = heapq.heappop(self._heap)[2]
            del self._at[request_id]
            taken.append(request_id)
        return taken

    def at(self, request_id: RequestId) -> float | None:
        alarm = self._at.get(request_id)
        return None if alarm is None else alarm[0]
