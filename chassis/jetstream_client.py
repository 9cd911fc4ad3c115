"""Streams and the registry of a JetStream broker, over whatever carries its messages.

Rules: reads are answered by the stream's leader; nothing is retried here except what can't have happened.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from chassis import jetstream as js
from chassis.answers import Done
from chassis.bus import (
    Appended,
    Appending,
    Entry,
    Handler,
    Headers,
    Lag,
    Message,
    Stored,
    Subscription,
)
from chassis.errors import BusError, BusUnavailable, LayoutDrift, NoResponders, WrongSequence
from chassis.stream_layout import ConsumerLayout, StreamLayout
from chassis.subjects import REGISTRY, registry_filter, registry_key, registry_subject

CALL_TIMEOUT_S = 2.0
ENSURE_TIMEOUT_S = 10.0
ENSURE_RETRY_S = 0.1
ENTRIES_MAX = 65536

_TAKEN = (10058, 10148, 10013)  # a stream or consumer of this name exists, configured otherwise


class Wire(Protocol):
    """A connection to the broker."""

    @property
    def connected(self) -> bool: ...

    def send(self, subject: str, data: bytes, reply: str = "", headers: Headers | None = None) -> None:
        """Sends and forgets."""

    async def call(
        self, subject: str, data: bytes, timeout_s: float, headers: Headers | None = None
    ) -> Message:
        """Raises NoResponders, BusTimeout, BusUnavailable."""

    def ask(self, subject: str, data: bytes, timeout_s: float, headers: Headers | None, done: Done) -> None:
        """`call` without a task: `done` has the answer, or what `call` raises, once and later. Raises
        BusUnavailable and MessageTooLarge, and is not done then."""

    def new_inbox(self) -> str: ...

    async def listen(self, subject: str, handler: Handler) -> Subscription:
        """Subscribes. Returns once the broker knows of it."""

    async def connected_until(self, until_s: float) -> None:
        """Returns once connected. Raises BusUnavailable at `until_s` of the loop's clock."""


class JetStream:
    def __init__(self, wire: Wire, replicas: int = 1) -> None:
        self._wire = wire
        self._replicas = replicas

    async def ensure_streams(self, layout: Sequence[StreamLayout]) -> None:
        for stream in layout:
            config = js.stream_config(stream, self._replicas)
            await self._ensure(
                stream.name, config, f"STREAM.CREATE.{stream.name}", config, f"STREAM.INFO.{stream.name}"
            )

    async def ensure_consumers(self, layout: Sequence[ConsumerLayout]) -> None:
        for consumer in layout:
            config = js.consumer_config(consumer)
            place = f"{consumer.stream}.{consumer.name}"
            request = {"stream_name": consumer.stream, "config": config, "action": "create"}
            await self._ensure(
                consumer.name, config, f"CONSUMER.DURABLE.CREATE.{place}", request, f"CONSUMER.INFO.{place}"
            )

    async def _ensure(
        self, name: str, config: dict[str, Any], create: str, request: dict[str, Any], info: str
    ) -> None:
        """Creating what exists as wanted succeeds. A broker that has just started is waited for."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + ENSURE_TIMEOUT_S
        while True:
            try:
                answer = await self.api(create, request)
                if isinstance(answer, js.Refused) and answer.code in _TAKEN:
                    answer = await self.api(info, {})
                if isinstance(answer, js.Refused):
                    raise js.refusal(name, answer)
                break
            except BusError:
                if loop.time() >= until_s:
                    raise
                await asyncio.sleep(ENSURE_RETRY_S)
        if different := js.differences(answer.get("config", {}), config):
            raise LayoutDrift(f"{name}: " + "; ".join(different))

    async def api(
        self, what: str, request: dict[str, Any], timeout_s: float = CALL_TIMEOUT_S
    ) -> dict[str, Any] | js.Refused:
        return js.decode((await self._call(f"{js.API}.{what}", js.encode(request), timeout_s)).data)

    async def _call(
        self, subject: str, data: bytes, timeout_s: float, headers: Headers | None = None
    ) -> Message:
        try:
            return await self._wire.call(subject, data, timeout_s, headers)
        except NoResponders:
            raise BusUnavailable(f"{subject}: no stream, or no leader") from None

    # streams

    async def append(
        self,
        subject: str,
        data: bytes,
        expected_seq: int | None = None,
        message_id: str | None = None,
        headers: Headers | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Appended:
        all_headers = js.append_headers(headers, expected_seq, message_id)
        reply = await self._call(subject, data, timeout_s, all_headers or None)
        return js.parse_append(subject, reply.data)

    def append_then(
        self,
        subject: str,
        data: bytes,
        done: Appending,
        expected_seq: int | None = None,
        message_id: str | None = None,
        headers: Headers | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        def answered(reply: Message | BusError) -> None:
            done(_appended(subject, reply))

        all_headers = js.append_headers(headers, expected_seq, message_id)
        self._wire.ask(subject, data, timeout_s, all_headers or None, answered)

    async def get(
        self, stream: str, request: dict[str, Any], timeout_s: float = CALL_TIMEOUT_S
    ) -> Stored | None:
        subject = f"{js.API}.STREAM.MSG.GET.{stream}"
        reply = await self._call(subject, js.encode(request), timeout_s)
        return js.parse_stored(f"{stream} {request}", reply.data)

    async def last(self, stream: str, subject: str, timeout_s: float = CALL_TIMEOUT_S) -> Stored | None:
        return await self.get(stream, {"last_by_subj": subject}, timeout_s)

    async def read(self, stream: str, subject: str, start_seq: int, count_max: int) -> list[Stored]:
        found: list[Stored] = []
        seq = max(1, start_seq)
        while len(found) < count_max:
            stored = await self.get(stream, {"seq": seq, "next_by_subj": subject})
            if stored is None:
                break
            found.append(stored)
            seq = stored.seq + 1
        return found

    async def stored_bytes(self, stream: str) -> int:
        answer = await self.api(f"STREAM.INFO.{stream}", {})
        if isinstance(answer, js.Refused):
            raise js.refusal(stream, answer)
        return js.parse_bytes(stream, answer)

    async def purge(self, stream: str, subject: str, timeout_s: float = CALL_TIMEOUT_S) -> None:
        answer = await self.api(f"STREAM.PURGE.{stream}", {"filter": subject}, timeout_s)
        if isinstance(answer, js.Refused):
            raise js.refusal(subject, answer)

    async def lag(self, stream: str, consumer: str) -> Lag:
        answer = await self.api(f"CONSUMER.INFO.{stream}.{consumer}", {})
        if isinstance(answer, js.Refused):
            raise js.refusal(f"{stream} {consumer}", answer)
        return js.parse_lag(answer)

    # registry

    async def entry(self, key: str) -> Entry | None:
        stored = await self.last(REGISTRY, registry_subject(key))
        entry = None if stored is None else as_entry(stored)
        return entry if entry is not None and entry.value is not None else None

    async def put_entry(self, key: str, value: bytes, revision: int | None) -> int:
        subject = registry_subject(key)
        try:
            return (await self.append(subject, value, expected_seq=revision)).seq
        except WrongSequence:
            if revision != 0:
                raise
            last = await self.last(REGISTRY, subject)
            if last is None or as_entry(last).value is not None:
                raise
        return (await self.append(subject, value, expected_seq=last.seq)).seq  # over a deletion's marker

    async def delete_entry(self, key: str) -> None:
        await self.append(registry_subject(key), b"", headers=js.DELETED)

    async def entries(self, prefix: str) -> list[Entry]:
        """An entry that is written meanwhile moves ahead of the reading, hence is seen again, not missed."""
        found: dict[str, Entry] = {}
        for stored in await self.read(REGISTRY, registry_filter(prefix), 1, ENTRIES_MAX):
            entry = as_entry(stored)
            found.pop(entry.key, None)
            if entry.value is not None and entry.key.startswith(prefix):
                found[entry.key] = entry
        return list(found.values())


def _appended(subject: str, reply: Message | BusError) -> Appended | BusError:
    match reply:
        case NoResponders():
            return BusUnavailable(f"{subject}: no stream, or no leader")
        case BusError():
            return reply
        case _:
            try:
                return js.parse_append(subject, reply.data)
            except BusError as error:
                return error


def as_entry(stored: Stored) -> Entry:
    value = None if js.OPERATION in stored.headers else stored.data
    return Entry(registry_key(stored.subject), value, stored.seq)
