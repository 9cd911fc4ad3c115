"""What reaches the batcher over the bus, checked and told to the core as events: deliveries and questions.

Garbage is counted, told to whoever can be told, and disturbs nothing. Questions that want an answer are
remembered by a number until the core has one.
"""

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Iterator
from itertools import chain
from typing import Any

from batcher import events as ev
from batcher.account import Account
from batcher.records import Records
from chassis import log, subjects
from chassis.bus import Bus, Delivery, Message
from chassis.ids import AckToken, BootId
from chassis.messages import BadMessage
from chassis.messages.card import ModelCard
from chassis.messages.load import parse_load
from chassis.messages.ownership import (
    Attach,
    OwnerQuestion,
    Take,
    TakeoverAnswer,
    build_owner_answer,
    parse_to_batcher,
)
from chassis.messages.request import Request, parse_request
from chassis.messages.sampling import NO_SHAPING

REPLIES_MAX = 65_536


class Arrivals:
    def __init__(
        self,
        bus: Bus,
        boot: BootId,
        card: ModelCard,
        account: Account,
        records: Records,
        wall_ns: Callable[[], int],
        tell: Callable[[ev.OwnershipEvent | ev.LoadHeard], None],
        count: Callable[[str], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._bus = bus
        self._boot = boot
        self._card = card
        self._account = account
        self._records = records
        self._wall_ns = wall_ns
        self._tell = tell
        self._count = count
        self._spawn = spawn
        self._replies: dict[int, Message] = {}
        self._next_reply = 0
        self.closed = False  # whatever is still delivered goes back at once

    def deliver(self, delivery: Delivery) -> None:
        if self.closed:
            self._bus.nak(delivery.token)
            return
        now, wall_ns = asyncio.get_running_loop().time(), self._wall_ns()  # one moment on two clocks
        message = delivery.message
        try:
            request = parse_request(message.data)
        except BadMessage as error:
            self._spawn(self._refuse_garbage(delivery, str(error)))
            return
        why = self._misfit(message.subject, request)
        if why:
            self._spawn(self._refuse_garbage(delivery, why))
            return
        self._account.delivered(request, message.stored_at_ns, wall_ns, delivery.count)
        self._tell(
            ev.Delivered(
                now,
                request,
                delivery.token,
                delivery.count,
                max(0.0, (wall_ns - message.stored_at_ns) / 1e9),
                hashlib.sha256(message.data).digest(),
                message.stored_at_ns // 1_000_000,
            )
        )

    def _misfit(self, subject: str, request: Request) -> str:
        """Why this model cannot run it; empty if it can. A worker that were asked to would end the epoch."""
        said, card = subjects.parse_request(subject), self._card
        if said is None or said.request_id != request.id or not said.model == request.model == card.name:
            return "the subject names another request or model"
        return self._unfit(request)

    def _unfit(self, request: Request) -> str:
        card = self._card
        if len(request.prompt_ids) >= card.context_len_max:
            return f"prompt_ids: {len(request.prompt_ids)}; at most {card.context_len_max - 1}"
        if max(request.prompt_ids) >= card.vocab_size:
            return f"prompt_ids: {max(request.prompt_ids)}; below {card.vocab_size}, the vocabulary"
        largest = max(_named_ids(request), default=0)
        if largest >= card.vocab_size:
            return f"sampling or stops name id {largest}; below {card.vocab_size}, the vocabulary"
        return ""

    async def _refuse_garbage(self, delivery: Delivery, why: str) -> None:
        """Whoever published it finds a failed record under the id of the subject; the message goes."""
        self._count("garbage request")
        log.warning("garbage on a request subject", error=why)
        said = subjects.parse_request(delivery.message.subject)
        accepted_ms = delivery.message.stored_at_ns // 1_000_000
        if said is None or await self._records.refuse(said, self._boot, why, accepted_ms):
            self._bus.ack(delivery.token)

    def heard(self, message: Message) -> None:
        now = asyncio.get_running_loop().time()
        try:
            said = parse_to_batcher(message.data)
        except BadMessage:
            self._count("garbage message")
            return
        match said:
            case OwnerQuestion(request_id, attempt, token, cancelled):
                reply = self._remember(message)
                self._tell(ev.OwnerAsked(now, request_id, attempt, AckToken(token), cancelled, reply))
            case TakeoverAnswer(request_id, gateway, attempt, ids, minimum, told, prompt):
                self._tell(ev.TakeoverAnswered(now, request_id, gateway, attempt, ids, minimum, told, prompt))
            case Attach():
                self._tell(ev.Heard(now, said, self._remember(message)))
            case Take():
                self._take(said, self._remember(message), now)
            case _:
                self._tell(ev.Heard(now, said))

    def load_heard(self, message: Message) -> None:
        try:
            load = parse_load(message.data)
        except BadMessage:
            self._count("garbage message")
            return
        if load.boot != self._boot:
            self._tell(ev.LoadHeard(asyncio.get_running_loop().time(), load))

    def _take(self, said: Take, reply: int, now: float) -> None:
        """A given request is judged like a delivered one; whoever gave one that does not fit keeps it."""
        request, wall_ns = said.request, self._wall_ns()
        why = self._unfit(request)
        if self.closed or why or request.model != self._card.name:
            self.answer(reply, build_owner_answer(False))
            return
        age_s = said.age_us / 1e6
        stored_ns = wall_ns - said.age_us * 1000
        self._account.delivered(request, stored_ns, wall_ns, 1)
        token = AckToken(said.ack_token)
        self._tell(ev.TakeAsked(now, request, token, age_s, reply, stored_ns // 1_000_000))

    def _remember(self, message: Message) -> int:
        self._next_reply += 1
        if len(self._replies) >= REPLIES_MAX:
            self._replies.pop(next(iter(self._replies)))
        self._replies[self._next_reply] = message
        return self._next_reply

    def answer(self, reply: int, data: bytes) -> None:
        message = self._replies.pop(reply, None)
        if message is not None:
            self._bus.reply(message, data)


def _named_ids(request: Request) -> Iterator[int]:
    """Beside those of the prompt."""
    shaping = request.sampling.shaping or NO_SHAPING
    biased = (token_id for token_id, _ in shaping.logit_bias)
    return chain(request.limits.stop_token_ids, biased, shaping.allowed_ids, *shaping.bad_words)
