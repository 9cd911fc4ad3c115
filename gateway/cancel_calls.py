"""Calls of cancel: of one choice, or of all that one call asked for. What is cancelled may be elsewhere."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from chassis.errors import Code, Status
from chassis.ids import RequestId
from gateway.admission import check_request_id, choice_id
from gateway.cancels import FULL
from gateway.events import CancelHeard, CancelWanted
from gateway.sampling import CHOICES_MAX
from gateway.stream_loop import RETRY_MS, StreamLoop


class CancelCalls:
    """`numbers`: of replies, no two alike. `len_max`: of calls at a time."""

    def __init__(self, streams: StreamLoop, numbers: Iterator[int], len_max: int) -> None:
        self._streams = streams
        self._numbers = numbers
        self._len_max = len_max
        self._choices: dict[RequestId, int] = {}  # of calls being answered, by the first's id

    @contextmanager
    def answering(self, first: RequestId, choices: int) -> Iterator[None]:
        """While it lasts, a cancel of the first is one of all."""
        self._choices[first] = choices
        try:
            yield
        finally:
            self._choices.pop(first, None)

    async def cancel(self, request_id: str, tenant: str) -> None:
        """Returns once it is under way or over, of all choices if it is the first's. Raises Status."""
        checked = check_request_id(request_id)
        here = self._choices.get(checked)  # elsewhere: one after the other, until there is none
        if not await self._cancel(checked, tenant):
            raise Status(Code.NOT_FOUND, f"request_id: {request_id!r} is not known")
        for choice in range(1, here or CHOICES_MAX):
            if not await self._cancel(choice_id(checked, choice), tenant) and here is None:
                return

    async def _cancel(self, checked: RequestId, tenant: str) -> bool:
        """Whether it is known. Raises Status."""
        cancels = self._streams.cancels
        if len(cancels) >= self._len_max:
            raise Status(Code.UNAVAILABLE, FULL, RETRY_MS)
        loop, reply = asyncio.get_running_loop(), next(self._numbers)
        heard: asyncio.Future[CancelHeard] = loop.create_future()
        cancels[reply] = heard
        try:
            self._streams.put(CancelWanted(loop.time(), checked, tenant, reply))
            answer = await heard
        finally:
            del cancels[reply]
        if answer.failed:
            raise Status(Code.UNAVAILABLE, answer.failed, RETRY_MS)
        return answer.found
