"""Performs the core's block effects on a kvstore and brings back the matching events.

Rules: an effect always ends in its event; whatever went wrong is `failed`, and then nothing but an attach
is sent. Each attach has the number of its call, so that a call that was given up and arrives late is
refused, and says who had the memory last, so that a kvstore forgets what was written while another had it.
A pool lies where `kvstores` says; when another kvstore is to have it, the core is told (`PoolMoves`) once
that one has answered, and where it was before is told that it left.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from batcher.events import (
    AttachPool,
    BlockEffect,
    BlockEvent,
    BlocksExchanged,
    BlocksMatched,
    ExchangeBlocks,
    MatchBlocks,
    PoolAttached,
    PoolMoves,
)
from batcher.kvstores import Known, Kvstores
from chassis import log, subjects
from chassis.bus import Entry
from chassis.errors import RpcError, RpcRejected, RpcUnavailable
from chassis.ids import BlockHash, BootId, Epoch
from chassis.messages import BadMessage
from chassis.messages import kvstore as messages
from chassis.messages.kvstore import PoolRef, StageAddress, TraceRef
from chassis.ports import Ports

LOCATE_TIMEOUT_S = 0.1
LOCATE_KVSTORES_MAX = 16
PROBE_TIMEOUT_S = 1.0


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
    prior_attachment: int = 0  # the newest that they heard of in it; 0: of none
    stages: tuple[StageAddress, ...] = ()  # in order: where a kvstore with tiers finds blocks' contents


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
    def __init__(self, ports: Ports, tell: Callable[[PoolMoves], None], timeout_s: float = 1.0) -> None:
        self._ports = ports
        self._tell = tell
        self._timeout_s = timeout_s
        self._kvstores = Kvstores(self._now)
        self._group: asyncio.TaskGroup | None = None
        self._learned = asyncio.Event()  # of kvstores, or where the pool is
        self._pool: Pool | None = None
        self._attachment: _Attachment | None = None
        self._last: _Attachment | None = None  # that stood
        self._moving: _Attachment | None = None  # which the core was told to leave
        self._closed = asyncio.Event()

    @property
    def generation(self) -> str:
        """Of the open pool; empty when there is none."""
        return "" if self._pool is None else self._pool.generation

    @property
    def attachment(self) -> int:
        """The number of the newest attach that stood in this epoch: steps tell it to workers, who then let no
        kvstore of an older one touch a block. 0: none."""
        last, pool = self._last, self._pool
        return last.number if last is not None and pool is not None and last.pool.epoch == pool.epoch else 0

    async def start(self, group: asyncio.TaskGroup) -> None:
        """Learns which kvstores there are, and keeps learning until `close`. Raises BusError."""
        self._group = group
        subscription = await self._ports.bus.watch(subjects.KVSTORES, self._learn)

        async def watch() -> None:
            try:
                while not self._closed.is_set():
                    await self._learned.wait()
                    self._learned.clear()
                    await self._look()
            finally:
                self._group = None
                await subscription.close()

        group.create_task(watch(), name="kvstores")

    def close(self) -> None:
        self._pool = None
        self._closed.set()
        self._learned.set()

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

    async def locate(
        self, chains: Sequence[Sequence[BlockHash]], generations: Sequence[str] = ()
    ) -> messages.Located:
        """What pools of this model hold of each chain, where this pool and those of `generations` are kept.
        Who does not answer holds nothing."""
        pool = self._pool
        if pool is None:
            return ()
        call = messages.Locate(pool.namespace, pool.block_size_tokens, tuple(map(tuple, chains)))
        request = messages.build_locate(call)

        async def ask(known: Known) -> messages.Located:
            try:
                reply = await self._ports.rpc.call(known.address, messages.LOCATE, request, LOCATE_TIMEOUT_S)
                located = messages.parse_located(reply, len(chains))
            except (RpcError, BadMessage) as error:
                log.debug("not located", kvstore=known.boot, error=str(error))
                return ()
            return tuple(pool for pool in located if keepers.get(pool[0], known) is known)

        keepers = self._keepers((pool.generation, *generations))
        asked = list({known.boot: known for known in keepers.values()}.values())[:LOCATE_KVSTORES_MAX]
        return tuple(pool for located in await asyncio.gather(*map(ask, asked)) for pool in located)

    def _keepers(self, generations: Iterable[str]) -> dict[str, Known]:
        """Who has these pools, if all batchers know the same; of this one's own that is certain. Who else
        tells of one did not hear that it left."""
        keepers: dict[str, Known] = {}
        for generation in generations:
            used = self._used if generation == self.generation else None
            at = [k for k in self._kvstores.present(used) if k.boot == used]
            keeper = at[0] if at else self._kvstores.owner(generation)
            if keeper is not None:
                keepers[generation] = keeper
        return keepers

    async def _attach(self, effect: AttachPool) -> PoolAttached:
        failed = PoolAttached(self._now(), effect.call, 0, 0, failed=True)
        pool, used = self._pool, self._used
        known = None if pool is None else self._kvstores.owner(pool.generation, used)
        if pool is None or known is None:
            return failed
        boot = known.boot
        prior_epoch, prior_attachment = self._prior(pool, alone=len(self._kvstores.present(used)) == 1)
        attachment = _Attachment(boot, known.address, pool, effect.call)
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
                stages=pool.stages,
            )
        )
        try:
            reply = await self._ports.rpc.call(attachment.address, messages.ATTACH, request, self._timeout_s)
            if reply.kvstore_boot != boot:
                raise RpcUnavailable(f"{attachment.address} is now {reply.kvstore_boot}")
        except RpcError as error:
            self._blame(attachment, "attach", error)
            if isinstance(error, RpcRejected) and error.code == "INVALID_ARGUMENT":
                self._kvstores.refuses(boot, pool.generation)
            return PoolAttached(self._now(), effect.call, 0, 0, failed=True)
        if self._attachment is not attachment or self._pool is not pool:
            return PoolAttached(self._now(), effect.call, 0, 0, failed=True)
        attachment.stands = True
        before, self._last = self._last, attachment
        known.failures = 0
        self._leave(before, attachment)
        self._learned.set()  # another may be better since
        attached = messages.parse_attached(reply)
        return PoolAttached(self._now(), effect.call, attached.free, attached.cached, tiers=attached.tiers)

    def _prior(self, pool: Pool, alone: bool) -> tuple[Epoch, int]:
        """The attach under which the memory was last written. Another batcher may have moved between kvstores
        within its epoch: its workers heard of it. Who heard of none may have been older than that message, so
        its epoch says enough only where there is one kvstore.
        """
        last = self._last
        if last is not None and (last.pool.epoch == pool.epoch or pool.intact):
            return last.pool.epoch, last.number
        if pool.prior_attachment:
            return pool.prior_epoch, pool.prior_attachment
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
                    keeps=effect.keeps,
                    bad=effect.bad,
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
        if isinstance(error, RpcUnavailable):
            self._kvstores.blame(attachment.boot)

    # ---- where the pool is to be

    @property
    def _used(self) -> BootId | None:
        """Where it was last attached."""
        return self._last.boot if self._last is not None else None

    def _learn(self, entry: Entry) -> None:
        self._kvstores.learn(entry)
        self._learned.set()

    async def _look(self) -> None:
        """Whether the pool is to move: only to one that answers, lest it go to and fro."""
        attachment = self._standing()
        if attachment is None or attachment is self._moving:
            return
        better = self._kvstores.better(attachment.pool.generation, attachment.boot)
        if better is None:
            return
        try:
            question = messages.build_stats_question("")
            await self._ports.rpc.call(better.address, messages.STATS, question, PROBE_TIMEOUT_S)
        except RpcError as error:
            log.warning("kvstore does not answer", kvstore=better.boot, error=str(error))
            self._kvstores.blame(better.boot)
            return
        if self._standing() is attachment:
            self._moving = attachment
            log.info("pool moves", generation=attachment.pool.generation, to=better.boot)
            self._tell(PoolMoves(self._now()))

    def _leave(self, before: _Attachment | None, now: _Attachment) -> None:
        """Where the pool was before is told that it is gone; who does not hear forgets it later."""
        if before is None or before.boot == now.boot or before.pool.generation != now.pool.generation:
            return

        async def leave() -> None:
            request = messages.build_detach(before.ref)
            try:
                await self._ports.rpc.call(before.address, messages.DETACH, request, self._timeout_s)
            except RpcError as error:
                log.debug("not detached", kvstore=before.boot, error=str(error))

        self._spawn(leave())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        if self._group is None:
            work.close()
        else:
            self._group.create_task(work, name="detach")

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
