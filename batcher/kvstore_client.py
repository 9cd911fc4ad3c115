"""Performs the core's block effects on a kvstore and brings back the matching events.

Rules: an effect always ends in its event; whatever went wrong is `failed`, and then nothing but an attach
is sent. Each attach has the number of its call, so that a call that was given up and arrives late is
refused, and says who had the memory last, so that a kvstore forgets what was written while another had it.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from batcher.events import (
    AttachPool,
    BlockEffect,
    BlockEvent,
    BlocksExchanged,
    BlocksMatched,
    ExchangeBlocks,
    MatchBlocks,
    PoolAttached,
)
from chassis import log, subjects
from chassis.bus import Entry
from chassis.errors import RpcError, RpcUnavailable
from chassis.ids import BootId, Epoch
from chassis.messages import BadMessage
from chassis.messages import kvstore as messages
from chassis.messages.kvstore import PoolRef, TraceRef
from chassis.messages.registry import KvstoreEntry, parse_kvstore
from chassis.ports import Ports

KNOWN_MAX = 256


@dataclass(frozen=True, slots=True)
class Pool:
    """What a pool is; `generation` names the workers' KV memories and their layer ranges."""

    generation: str
    epoch: Epoch
    worker_stamps: tuple[str, ...]
    num_blocks: int
    block_size_tokens: int
    namespace: str
    intact: bool = False  # no other batcher had it since we did
    prior_epoch: Epoch = Epoch(0)  # in which its workers stood before; 0: not known


@dataclass(slots=True)
class _Known:
    """A registry entry; `failed_revision`: it failed since this revision was written."""

    entry: KvstoreEntry
    revision: int
    seen_at: float  # expiry is not announced
    failed_revision: int = 0
    failures: int = 0


@dataclass(slots=True)
class _Attachment:
    """Where the pool was last attached, or tried to be."""

    boot: BootId
    address: str
    pool: Pool
    number: int
    stands: bool = field(default=False)

    @property
    def ref(self) -> PoolRef:
        return PoolRef(self.pool.generation, self.pool.epoch, self.number)


class KvstoreClient:
    def __init__(self, ports: Ports, timeout_s: float = 1.0) -> None:
        self._ports = ports
        self._timeout_s = timeout_s
        self._known: dict[str, _Known] = {}  # by registry key
        self._pool: Pool | None = None
        self._attachment: _Attachment | None = None
        self._last: _Attachment | None = None  # that stood
        self._closed = asyncio.Event()

    @property
    def generation(self) -> str:
        """Of the open pool; empty when there is none."""
        return "" if self._pool is None else self._pool.generation

    async def start(self, group: asyncio.TaskGroup) -> None:
        """Learns which kvstores there are, and keeps learning until `close`. Raises BusError."""
        subscription = await self._ports.bus.watch(subjects.KVSTORES, self._learn)

        async def watch() -> None:
            try:
                await self._closed.wait()
            finally:
                await subscription.close()

        group.create_task(watch(), name="kvstores")

    def close(self) -> None:
        self._pool = None
        self._closed.set()

    def open(self, pool: Pool) -> None:
        """A pipeline stands: later effects are about this pool, and the first must attach it."""
        self._pool = pool
        if self._attachment is not None:
            self._attachment.stands = False

    async def call(self, effect: BlockEffect, traces: Sequence[TraceRef] = ()) -> BlockEvent:
        """Performs one effect. `traces`: for a match, one per chain or none."""
        match effect:
            case AttachPool():
                return await self._attach(effect)
            case MatchBlocks():
                return await self._match(effect, tuple(traces))
            case ExchangeBlocks():
                return await self._exchange(effect)

    async def _attach(self, effect: AttachPool) -> PoolAttached:
        failed = PoolAttached(self._now(), effect.call, 0, 0, failed=True)
        pool, present = self._pool, self._present()
        if pool is None or not present:
            return failed
        known = self._choose(present)
        boot = known.entry.boot
        prior_epoch, prior_attachment = self._prior(pool, alone=len(present) == 1)
        attachment = _Attachment(boot, known.entry.rpc_address, pool, effect.call)
        self._attachment = attachment
        request = messages.build_attach(
            messages.Attach(
                pool=attachment.ref,
                worker_stamps=pool.worker_stamps,
                num_blocks=pool.num_blocks,
                block_size_tokens=pool.block_size_tokens,
                namespace=pool.namespace,
                held=effect.held,
                committed=effect.committed,
                prior_epoch=prior_epoch,
                prior_attachment=prior_attachment,
            )
        )
        try:
            reply = await self._ports.rpc.call(attachment.address, messages.ATTACH, request, self._timeout_s)
            if reply.kvstore_boot != boot:
                raise RpcUnavailable(f"{attachment.address} is now {reply.kvstore_boot}")
        except RpcError as error:
            self._blame(attachment, "attach", error)
            return PoolAttached(self._now(), effect.call, 0, 0, failed=True)
        if self._attachment is not attachment or self._pool is not pool:
            return PoolAttached(self._now(), effect.call, 0, 0, failed=True)
        attachment.stands = True
        self._last = attachment
        known.failures = 0
        attached = messages.parse_attached(reply)
        return PoolAttached(self._now(), effect.call, attached.free, attached.cached)

    def _prior(self, pool: Pool, alone: bool) -> tuple[Epoch, int]:
        """The attach under which the memory was last written. Another batcher may have moved between kvstores
        within its epoch, and only it knew: so its epoch says enough only where there is one.
        """
        last = self._last
        if last is not None and (last.pool.epoch == pool.epoch or pool.intact):
            return last.pool.epoch, last.number
        return (pool.prior_epoch, 0) if alone else (Epoch(0), 0)

    async def _match(self, effect: MatchBlocks, traces: tuple[TraceRef, ...]) -> BlocksMatched:
        attachment = self._standing()
        if attachment is not None:
            request = messages.build_match(messages.Match(attachment.ref, effect.chains, traces))
            try:
                reply = await self._ports.rpc.call(
                    attachment.address, messages.MATCH, request, self._timeout_s
                )
                blocks = messages.parse_matched(reply, len(effect.chains))
                if self._standing() is attachment:
                    return BlocksMatched(self._now(), effect.call, blocks)
            except (RpcError, BadMessage) as error:
                self._blame(attachment, "match", error)
        return BlocksMatched(self._now(), effect.call, (), failed=True)

    async def _exchange(self, effect: ExchangeBlocks) -> BlocksExchanged:
        attachment = self._standing()
        if attachment is not None:
            request = messages.build_exchange(
                messages.Exchange(
                    pool=attachment.ref,
                    commits=tuple(messages.Commit(*commit) for commit in effect.commits),
                    releases=effect.releases,
                    lease_count=effect.lease,
                )
            )
            try:
                reply = await self._ports.rpc.call(
                    attachment.address, messages.EXCHANGE, request, self._timeout_s
                )
                done = messages.parse_exchanged(reply)
                if self._standing() is attachment:
                    return BlocksExchanged(self._now(), effect.call, done.leased, done.free, done.cached)
            except (RpcError, BadMessage) as error:
                self._blame(attachment, "exchange", error)
        return BlocksExchanged(self._now(), effect.call, (), 0, 0, failed=True)

    def _standing(self) -> _Attachment | None:
        attachment = self._attachment
        return attachment if attachment is not None and attachment.stands else None

    def _blame(self, attachment: _Attachment, what: str, error: Exception) -> None:
        """Whoever did not answer is asked again only when nobody else is left, or after it wrote anew."""
        log.warning("kvstore call failed", call=what, kvstore=attachment.boot, error=str(error))
        attachment.stands = False
        known = self._known.get(subjects.kvstore_key(attachment.boot))
        if known is not None and isinstance(error, RpcUnavailable):
            known.failed_revision = known.revision
            known.failures += 1

    def _present(self) -> list[_Known]:
        """Those that did not expire; all, when the registry itself has gone silent."""
        since = self._now() - subjects.REGISTRY_TTL_S
        known = list(self._known.values())
        return [k for k in known if k.seen_at >= since] or known

    def _choose(self, present: Sequence[_Known]) -> _Known:
        """The one in use if it did not fail, else the last to have written, else who failed least."""
        last = self._attachment.boot if self._attachment is not None else None

        def rank(known: _Known) -> tuple[int, bool, int]:
            used = known.entry.boot == last
            if known.failed_revision == known.revision:
                return (known.failures, used, -known.revision)
            return (0, not used, -known.revision)

        return min(present, key=rank)

    def _learn(self, entry: Entry) -> None:
        if entry.value is None:
            self._known.pop(entry.key, None)
            return
        try:
            kvstore = parse_kvstore(entry.value)
        except BadMessage as error:
            log.warning("bad registry entry", key=entry.key, error=str(error))
            return
        known = self._known.setdefault(entry.key, _Known(kvstore, entry.revision, 0.0))
        known.entry, known.revision, known.seen_at = kvstore, entry.revision, self._now()
        if len(self._known) > KNOWN_MAX:
            del self._known[min(self._known, key=lambda key: self._known[key].revision)]

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
