"""The ledger's shell: serves it over rpc, says in the registry where, traces what it found for whom, and
tells on the bus what it holds.

Of pools nothing is stored: after a restart they come back as batchers attach them. A bug found in the ledger
ends the process, because a ledger that may be wrong must not go on.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
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
from chassis.messages.addresses import names_no_host
from chassis.messages.kvstore import TraceRef
from chassis.messages.registry import KvstoreEntry, build_kvstore
from chassis.metrics import Family
from chassis.ports import Ports
from chassis.rpc import Handlers
from chassis.trace import Span, TraceContext, Value
from kvstore.announcer import Announcer
from kvstore.config import Config
from kvstore.io_thread import Io
from kvstore.ledger import Ledger
from kvstore.meters import families
from kvstore.segment_files import Files
from kvstore.tier_service import TierService

REGISTER_RETRY_S = 0.5
DEREGISTER_TIMEOUT_S = 1.0
DRAIN_GRACE_S = 0.5
LEAVE_WAIT_S = 3.0  # for pools to move elsewhere
QUIET_S = 0.3  # without a call: whoever is left has nobody to move to, or is gone
QUESTIONS_LEN_MAX = 256  # that wait to be answered


class KvStore:
    def __init__(self, config: Config, ports: Ports, disk: tuple[Files, Io] | None = None) -> None:
        """`disk`: where the disk tier's segments lie, if not in a folder."""
        self.boot = BootId(ports.new_id())
        self.ledger = Ledger(config.pools_max, config.blocks_max)
        self.tiers = TierService(config, ports, self.boot, self.ledger, self._tell, disk)
        self.announcer = Announcer(self.boot, self.ledger, self.tiers.shelves)
        self.calls = 0
        self._config = config
        self._ports = ports
        self._serving = False
        self._drained = asyncio.Event()
        self._moved = asyncio.Event()  # a pool has left
        self._registering: asyncio.Task[None] | None = None
        self._called_at = float("-inf")
        self._leaving = False
        self._broken: Exception | None = None

    async def run(self) -> None:
        """Serves until cancelled or drained. Raises what broke the ledger."""
        server = await self._ports.rpc.serve(self._config.rpc_address, self._handlers())
        grace_s = 0.0
        try:
            async with asyncio.TaskGroup() as group:
                address = self._config.advertise_address or server.address
                if names_no_host(address):
                    log.warning("batchers can't dial this from another host", address=address)
                self._registering = group.create_task(self._register(address), name="register")
                listening = group.create_task(self._listen(), name="listen")
                moving = group.create_task(self.tiers.run(), name="tiers")
                log.info("kvstore serves", address=server.address)
                self._serving = True
                await self._drained.wait()
                self._registering.cancel()
                listening.cancel()
                moving.cancel()
            if self._broken is not None:
                raise self._broken
            grace_s = DRAIN_GRACE_S
        finally:
            await server.close(grace_s)
            await self.tiers.close(flush=self._drained.is_set())

    async def drain(self) -> None:
        """Says that it leaves, and serves until its pools have moved elsewhere, or nobody calls any more."""
        self._leaving = True
        loop = asyncio.get_running_loop()
        until = loop.time() + LEAVE_WAIT_S
        quiet_from = loop.time()
        if self._registering is not None:
            self._registering.cancel()
            await asyncio.wait({self._registering})
            await self._deregister()
        while self.ledger.pools and not self._drained.is_set():
            wait_until = min(until, max(self._called_at, quiet_from) + QUIET_S)
            if loop.time() >= wait_until:
                break
            self._moved.clear()
            try:
                async with asyncio.timeout_at(wait_until):
                    await self._moved.wait()
            except TimeoutError:
                pass
        self._drained.set()

    @property
    def ready(self) -> bool:
        return self._serving and not self._leaving

    def metrics(self) -> Iterable[Family]:
        return families(replace(self.ledger.stats(), tiers=self.tiers.stats()), self.calls)

    def _handlers(self) -> Handlers:
        return {
            messages.ATTACH: self._serve(self._attach),
            messages.MATCH: self._match_with_tiers,
            messages.EXCHANGE: self._serve(self._exchange),
            messages.DETACH: self._serve(self._detach),
            messages.LOCATE: self._serve(self._locate),
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
        self._called_at = self._now()
        every = self._config.check_every_calls
        if every and self.calls % every == 0:
            self.ledger.check()
            self.tiers.check()

    def _attach(self, request: Any) -> Message:
        call = messages.parse_attach(request)
        attached = self.ledger.attach(call, self._now())
        self.tiers.attached(call)
        log.info(
            "pool attached",
            generation=call.pool.generation,
            epoch=call.pool.epoch,
            attachment=call.pool.attachment,
            held=len(call.held),
            free=attached.free,
            cached=attached.cached,
        )
        return messages.build_attached(replace(attached, tiers=self.tiers.on), self.boot)

    def _detach(self, request: Any) -> Message:
        pool = messages.parse_detach(request)
        self.ledger.detach(pool)
        self.tiers.dropped()
        log.info("pool left", generation=pool.generation, epoch=pool.epoch)
        self._moved.set()
        return messages.build_detached()

    async def _match_with_tiers(self, request: Any) -> Message:
        """The pool's own call follows what was awaited, whole; what it refuses is refused there."""
        try:
            if self.tiers.on and self._broken is None:
                await self.tiers.prepare(messages.parse_match(request))
        except BadMessage:
            pass
        return await self._serve(self._match)(request)

    def _match(self, request: Any) -> Message:
        start_ns = self._ports.wall_ns()
        call = messages.parse_match(request)
        blocks = self.ledger.match(call.pool, call.chains)
        for trace, chain, found in zip(call.traces, call.chains, blocks, strict=False):
            hits: dict[str, Value] = {"shoal.blocks_asked": len(chain), "shoal.blocks_hit": len(found)}
            self._trace("kvstore.match", start_ns, trace, hits)
        return messages.build_matched(blocks)

    def _exchange(self, request: Any) -> Message:
        call = messages.parse_exchange(request)
        done = self.ledger.exchange(call, self._now())
        self.tiers.called(call.pool.generation)
        return messages.build_exchanged(done)

    def _locate(self, request: Any) -> Message:
        return messages.build_located(self.ledger.locate(messages.parse_locate(request)))

    def _stats(self, request: Any) -> Message:
        stats = self.ledger.stats(messages.parse_stats_question(request))
        return messages.build_stats(replace(stats, tiers=self.tiers.stats()))

    def _holdings(self, request: Any) -> Message:
        question = cache.parse_question(request)
        self._tell()  # of what moved since
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
        self._tell()  # of what moved since
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
        entry = build_kvstore(KvstoreEntry(self.boot, address, self._config.name))
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
