"""The bus as services see it: core messages, durable streams, a registry, an object store.

Rules: core messages are lossy and unordered; only `append` returning means stored; a `BusTimeout` says
nothing about what happened. Handlers are plain functions that put into an inbox: they never await.
Implementations: `nats_bus` (production), `memory_bus` (one process, simulation). One contract test
holds both to the same behaviour.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from chassis.errors import BusError
from chassis.ids import AckToken
from chassis.stream_layout import ConsumerLayout, StreamLayout
from chassis.subjects import LAYOUT

Headers = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Message:
    """A core message. `reply` names where an answer goes, if one is wanted."""

    subject: str
    data: bytes
    reply: str | None = None
    headers: Headers = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stored:
    """A message of a stream. `stored_at_ns` is the broker's wall clock."""

    subject: str
    data: bytes
    seq: int
    stored_at_ns: int
    headers: Headers = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Delivery:
    """A stored message handed to a consumer. `count` is a hint: it repeats after a broker's death."""

    message: Stored
    token: AckToken
    count: int


@dataclass(frozen=True, slots=True)
class Appended:
    seq: int
    duplicate: bool  # the broker knew this message id: nothing was stored now


@dataclass(frozen=True, slots=True)
class Entry:
    """A registry entry; `value` is None when the key was deleted or expired."""

    key: str
    value: bytes | None
    revision: int


@dataclass(frozen=True, slots=True)
class Lag:
    """Of a durable consumer: messages that nobody was given yet, and that somebody was and has to settle."""

    waiting: int
    given: int


Handler = Callable[[Message], None]
Appending = Callable[[Appended | BusError], None]
EntryHandler = Callable[[Entry], None]


class Subscription(Protocol):
    async def close(self) -> None: ...


class Bus(Protocol):
    """Everything may raise `BusUnavailable`; what waits for an answer may raise `BusTimeout`."""

    @property
    def connected(self) -> bool: ...

    # set-up, by whoever needs it: what exists already is checked
    async def ensure_streams(self, layout: Sequence[StreamLayout] = LAYOUT) -> None:
        """Creates the streams that are missing. Raises LayoutDrift naming every field that differs."""

    async def ensure_consumers(self, model: str) -> None:
        """Creates a model's consumers of REQUESTS. Raises LayoutDrift."""

    async def ensure_consumer(self, layout: ConsumerLayout) -> None:
        """Creates any other durable consumer. Raises LayoutDrift."""

    # core messages
    def publish(self, subject: str, data: bytes, headers: Headers | None = None) -> None:
        """Sends and forgets. Buffered within a bound while disconnected; beyond it dropped and counted."""

    async def request(self, subject: str, data: bytes, timeout_s: float) -> Message:
        """Raises NoResponders when nobody listens."""

    def reply(self, to: Message, data: bytes) -> None:
        """Answers a request; does nothing when no answer is wanted."""

    async def subscribe(self, subject: str, handler: Handler, pending_len_max: int = 65536) -> Subscription:
        """`subject` may hold wildcards. Returns once the broker knows of it. `pending_len_max` is for buses
        where messages wait for their handler; here handlers are called as messages come."""

    # streams
    async def append(
        self,
        subject: str,
        data: bytes,
        *,
        expected_seq: int | None = None,
        message_id: str | None = None,
        headers: Headers | None = None,
        timeout_s: float = 2.0,
    ) -> Appended:
        """Stores a message. `expected_seq` is the subject's last sequence, 0 for none.

        Raises WrongSequence, SubjectTaken, StreamFull, MessageTooLarge.
        """

    def append_then(
        self,
        subject: str,
        data: bytes,
        done: Appending,
        *,
        expected_seq: int | None = None,
        message_id: str | None = None,
        headers: Headers | None = None,
        timeout_s: float = 2.0,
    ) -> None:
        """`append` for who makes thousands: no task waits. `done` is told once, later, what came of it.
        Raises BusUnavailable and MessageTooLarge: then it did not happen."""

    async def last(self, stream: str, subject: str, timeout_s: float = 2.0) -> Stored | None:
        """The newest message of a subject, from the stream's leader; None when there is none."""

    async def fetch(self, stream: str, consumer: str, count_max: int, wait_s: float) -> Sequence[Delivery]:
        """Up to `count_max` deliveries of a durable consumer; empty after `wait_s` without any."""

    async def lag(self, stream: str, consumer: str) -> Lag:
        """Raises BusUnavailable where there is no such consumer."""

    def ack(self, token: AckToken) -> None:
        """Settles a delivery for good. Lossy, like `progress` and `nak`."""

    def progress(self, token: AckToken) -> None:
        """Restarts the delivery's acknowledgement timer."""

    def nak(self, token: AckToken, delay_s: float = 0.0) -> None:
        """Gives a delivery back."""

    async def read(self, stream: str, subject: str, start_seq: int, count_max: int) -> Sequence[Stored]:
        """Stored messages of a subject (wildcards allowed) from a sequence on; for tools only."""

    def scan(self, stream: str, subject: str, since_ns: int = 0) -> AsyncGenerator[Stored, None]:
        """What is there of a subject (wildcards allowed), stored at `since_ns` or later; for tools only. It
        reads many at once."""

    async def stored_bytes(self, stream: str) -> int:
        """What a stream holds, as its bound counts. Raises BusUnavailable where there is none."""

    async def purge(self, stream: str, subject: str, timeout_s: float = 2.0) -> None:
        """Forgets all messages of a subject."""

    # registry (one bucket, keys with dots, entries expire `REGISTRY_TTL_S` after their last write)
    async def entry(self, key: str) -> Entry | None: ...

    async def put_entry(self, key: str, value: bytes, revision: int | None = None) -> int:
        """Writes a key and returns its revision. `revision`: the one expected, 0 for none.

        Raises WrongSequence.
        """

    async def delete_entry(self, key: str) -> None: ...

    async def watch(self, prefix: str, handler: EntryHandler) -> Subscription:
        """Calls back with every present entry under `prefix` before it returns, then with each change.

        Expiry need not be announced: who relies on age refreshes its view with `entries`.
        """

    async def entries(self, prefix: str) -> Sequence[Entry]: ...

    # objects (write once, named by their digest)
    async def put_object(self, name: str, data: bytes) -> None: ...

    async def object(self, name: str) -> bytes | None: ...

    async def close(self) -> None:
        """Flushes what can be flushed within a second, then disconnects."""
