"""Whether grammars can be followed: seen before a request is accepted, so that the call that brings a bad one
is refused and nobody else hears of it.

Rules: they are compiled beside the loop, within a time limit, and what was found is kept. What only a model's
vocabulary can tell, or an output that has gone far, is told by the worker and fails that request.
"""

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from chassis.errors import Code, Status
from chassis.messages.sampling import Grammar
from gateway.admission import invalid
from gateway.models import Model

KNOWN_LEN_MAX = 256
THREADS = 2
WAITING_LEN_MAX = 64
RETRY_MS = 1000


class Grammars:
    def __init__(self, timeout_s: float) -> None:
        """`timeout_s` 0: none are waited for, they are compiled at once."""
        self._timeout_s = timeout_s
        self._threads: ThreadPoolExecutor | None = None
        self._known: OrderedDict[Grammar, str | None] = OrderedDict()  # why not; the one used last is last
        self._waiting = 0

    async def check(self, grammar: Grammar, model: Model) -> None:
        """Raises Status."""
        if not model.card.eos_ids:
            raise invalid(f"grammar: model {model.name} has no token that ends an output")
        if grammar in self._known:
            self._known.move_to_end(grammar)
            why = self._known[grammar]
        else:
            why = await self._seen(grammar)
        if why is not None:
            raise invalid(f"grammar.{grammar.kind.value}: {why}")

    async def _seen(self, grammar: Grammar) -> str | None:
        if self._waiting >= WAITING_LEN_MAX:
            raise Status(Code.UNAVAILABLE, "grammar: too many are being compiled", RETRY_MS)
        from chassis.grammars import refusal_of  # takes 20 ms, and only grammars need it

        if not self._timeout_s:
            return refusal_of(grammar)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, "grammars")
        self._waiting += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                why = await asyncio.get_running_loop().run_in_executor(self._threads, refusal_of, grammar)
        except TimeoutError:
            raise invalid(f"grammar: not compiled within {self._timeout_s:g} s") from None
        finally:
            self._waiting -= 1
        self._known[grammar] = why
        while len(self._known) > KNOWN_LEN_MAX:
            self._known.popitem(last=False)
        return why

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
