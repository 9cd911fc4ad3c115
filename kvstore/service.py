"""The ledger's shell: serves it over rpc, says in the registry where, traces what it found for whom, and
tells on the bus what it holds.

Nothing is stored: after a restart the pools come back as batchers attach them. A bug found in the ledger
ends the process, because a ledger that may be wrong must not go on.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from google.protobuf.message import Message

from chassis import log, subjects
from chassis.bus import Message as BusMessage
from chassis.errors import BusError, RpcRejected
from chassis.ids import BootId
from chassis.insist import insist
from chassis.messages import BadMessage, cache
from chassis.messages import kvstore as messages
from chassis.messages.kvstore import TraceRef
from chassis.messages.registry import KvstoreEntry, build_kvstore
from chassis.ports import Ports
from chassis.rpc import Handlers
from chassis.trace import Span, TraceContext, Value
from kvstore.announcer import Announcer
from kvstore.config import Config
from kvstore.ledger import Ledger

REGISTER_RETRY_S = 0.5
DEREGISTER_TIMEOUT_S = 1.0
DRAIN_GRACE_S = 0.5
QUESTIONS_LEN_MAX = 256  # that wait to be answered


class KvStore:
    def __init__(self, config: Config, ports: Ports) -> None:
        self.boot = BootId(ports.new_id())
        self.ledger = Ledger(config.pools_max, config.blocks_max)
        self.announcer = Announcer(self.boot, self.ledger)
        self.calls = 0
        self._config = config
        self._ports = ports
        self._drained = asyncio.Event()
        self._broken: Exception | None = None

    async def run(self) -> None:
        """Serves until cancelled or drained. Raises what broke the ledger."""
        server = await self._ports.rpc.serve(self._config.rpc_address, self._handlers())
        grace_s = 0.0
        try:
            async with asyncio.TaskGroup() as group:
                registering = group.create_task(
                    self._register(self._config.advertise_address or server.address), name="register"
                )
                listening = group.create_task(self._listen(), name="listen")
                log.info("kvstore serves", address=server.address)
                await self._drained.wait()
                registering.cancel()
                listening.cancel()
            if self._broken is not None:
                raise self._broken
            await self._deregister()
            grace_s = DRAIN_GRACE_S
        finally:
            await server.close(grace_s)

    async def drain(self) -> None:
        self._drained.set()

    def _handlers(self) -> Handlers:
        return {
            messages.ATTACH: self._serve(self._attach),
            messages.MATCH: self._serve(self._match),
            messages.EXCHANGE: self._serve(self._exchange),
            messages.STATS: self._serve(self._stats),
            cache.HOLDINGS: self._serve(self._holdings),
        }

    def _serve(self, handle: Callable[[Any], Message]) -> Callable[[Any], Awaitable[Message]]:
        """A call to the ledger never awaits, so calls follow each other whole."""

        async def serve(request: Any) -> Message:
            try:
                if self._broken is not None:
                    raise RpcRejected("UNAVAILABLE", "the ledger is broken")
                reply = handle(request)
                self._tell()
                self._sample()
                return reply
            except BadMessage as error:
                raise RpcRejected("INVALID_ARGUMENT", str(error)) from None
            except RpcRejected:
                raise
            except Exception as error:
                self._broken = error
                self._drained.set()
                raise

        return serve

    def _sample(self) -> None:
        self.calls += 1
        every = self._config.check_every_calls
        if every and self.calls % every == 0:
            self.ledger.check()

    def _attach(self, request: Any) -> Message:
        call = messages.parse_attach(request)
        attached = self.ledger.attach(call, self._now())
        log.info(
            "pool attached",
            generation=call.pool.generation,
            epoch=call.pool.epoch,
            attachment=call.pool.attachment,
            held=len(call.held),
            free=attached.free,
            cached=attached.cached,
        )
        return messages.build_attached(attached, self.boot)

    def _match(self, request: Any) -> Message:
        start_ns = self._ports.wall_ns()
        call = messages.parse_match(request)
        blocks = self.ledger.match(call.pool, call.chains)
        for trace, chain, found in zip(call.traces, call.chains, blocks, strict=False):
            hits: dict[str, Value] = {"shoal.blocks_asked": len(chain), "shoal.blocks_hit": len(found)}
            self._trace("kvstore.match", start_ns, trace, hits)
        return messages.build_matched(blocks)

    def _exchange(self, request: Any) -> Message:
        done = self.ledger.exchange(messages.parse_exchange(request), self._now())
        return messages.build_exchanged(done)

    def _stats(self, request: Any) -> Message:
        return messages.build_stats(self.ledger.stats(messages.parse_stats_question(request)))

    def _holdings(self, request: Any) -> Message:
        question = cache.parse_question(request)
        return cache.build_holdings(self.announcer.asked(question, self._now()))

    # ---- on the bus

    def _tell(self) -> None:
        for changes in self.announcer.messages(self._now()):
            try:
                self._ports.bus.publish(subjects.cache_changes(self.boot), cache.build_changes(changes))
            except BusError as error:  # its number is missing now, so whoever listens will notice
                log.debug("changes not told", error=str(error))

    async def _listen(self) -> None:
        """Answers questions on the bus until cancelled."""
        subject = subjects.cache_questions(self.boot)
        subscription = await insist(
            partial(self._ports.bus.subscribe, subject, self._asked, QUESTIONS_LEN_MAX)
        )
        try:
            await self._drained.wait()
        finally:
            await subscription.close()

    def _asked(self, message: BusMessage) -> None:
        if self._broken is not None:
            return
        try:
            question = cache.decode_question(message.data)
        except BadMessage as error:
            log.warning("bad question", error=str(error))
            return
        holdings = self.announcer.asked(question, self._now())
        try:
            self._ports.bus.reply(message, cache.encode_holdings(holdings))
        except BusError as error:
            log.debug("question not answered", error=str(error))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    # ---- spans and the registry

    def _trace(self, name: str, start_ns: int, trace: TraceRef, attributes: dict[str, Value]) -> None:
        tracer, end_ns = self._ports.tracer, self._ports.wall_ns()
        parent = TraceContext.decode(trace.trace_parent)
        if parent is not None:
            context = TraceContext(parent.trace_id, tracer.new_span_id(), parent.sampled)
            tracer.record(Span(trace.key, name, context, parent.span_id, start_ns, end_ns, attributes))

    async def _register(self, address: str) -> None:
        entry = build_kvstore(KvstoreEntry(self.boot, address))
        while True:
            wait_s = subjects.REGISTRY_REFRESH_S
            try:
                await self._ports.bus.put_entry(subjects.kvstore_key(self.boot), entry)
            except BusError as error:
                log.warning("not registered", error=str(error))
                wait_s = REGISTER_RETRY_S
            await asyncio.sleep(wait_s)

    async def _deregister(self) -> None:
        """Without an answer the entry expires by itself."""
        try:
            async with asyncio.timeout(DEREGISTER_TIMEOUT_S):
                await self._ports.bus.delete_entry(subjects.kvstore_key(self.boot))
        except (BusError, TimeoutError) as error:
            log.warning("not deregistered", error=str(error))
