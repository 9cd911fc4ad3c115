"""The tiers' shell: which pipelines have links to move contents over, and what runs for them.

Nothing here where neither tier is on. A disk that can't be opened leaves kvstore without that tier.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from chassis import log
from chassis.ids import BootId, Epoch
from chassis.messages.kvstore import Attach, Match, StageAddress
from chassis.ports import Ports
from kvstore.announcer import Shelf
from kvstore.config import Config
from kvstore.disk_tier import DiskTier
from kvstore.host_tier import HostTier
from kvstore.io_thread import Io, IoThread
from kvstore.ledger import Ledger
from kvstore.mover import Mover
from kvstore.moves import Moves
from kvstore.segment_files import Files, FolderFiles
from kvstore.stage_link import StageLink
from kvstore.tiers import Tiers

FLUSH_S = 2.0


@dataclass(slots=True)
class _Standing:
    epoch: Epoch
    stages: tuple[StageAddress, ...]
    mover: Mover
    running: "asyncio.Task[None]"


class TierService:
    def __init__(
        self,
        config: Config,
        ports: Ports,
        boot: BootId,
        ledger: Ledger,
        moved: Callable[[], None],
        disk: tuple[Files, Io] | None = None,
    ) -> None:
        """`disk`: where else than in the folder, and who waits for it."""
        self._config = config
        self._ports = ports
        self._boot = boot
        self._ledger = ledger
        self._moved = moved
        self._group: asyncio.TaskGroup | None = None
        self._standing: dict[str, _Standing] = {}  # by generation
        self.tiers = Tiers(HostTier(config.host_bytes, ledger.changes), self._disk(disk))

    def _disk(self, given: tuple[Files, Io] | None) -> DiskTier | None:
        size = self._config.disk_bytes
        if not size:
            return None
        files, io = given or (FolderFiles(Path(self._config.disk_dir)), IoThread())
        return DiskTier(files, size, io, self._ledger.changes)

    @property
    def on(self) -> bool:
        return self._config.host_bytes > 0 or self._config.disk_bytes > 0

    @property
    def shelves(self) -> tuple[Shelf, ...]:
        host, disk = self.tiers.host, self.tiers.disk
        shelves: list[Shelf] = [host.catalog] if host.bytes_max else []
        return (*shelves, *([] if disk is None else [disk.catalog]))

    @property
    def moving(self) -> tuple[Moves, ...]:
        """Of each pool that contents move from and to."""
        return tuple(s.mover.moves for s in self._standing.values() if s.mover.moves is not None)

    async def run(self) -> None:
        """Until cancelled."""
        disk = self.tiers.disk
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                if disk is not None:
                    group.create_task(self._keep(disk), name="disk tier")
                await asyncio.get_running_loop().create_future()
        finally:
            self._group = None
            self._standing.clear()

    async def _keep(self, disk: DiskTier) -> None:
        try:
            await disk.run(asyncio.get_running_loop().time())
        except OSError as error:
            log.warning("no disk tier", folder=self._config.disk_dir, error=str(error))
            self.tiers.disk = None

    async def close(self, flush: bool) -> None:
        """Once `run` has ended. `flush`: what waits to be written is."""
        if self.tiers.disk is not None:
            try:
                async with asyncio.timeout(FLUSH_S):
                    if flush:
                        await self.tiers.disk.flush()
            except TimeoutError:
                log.warning("contents not written")
            await self.tiers.disk.close()

    # ---- calls to the ledger

    def attached(self, call: Attach) -> None:
        """After an attach that was done."""
        self.dropped()
        if not self.on or self._group is None:
            return
        generation, standing = call.pool.generation, self._standing.get(call.pool.generation)
        if standing is not None and (standing.epoch, standing.stages) != (call.pool.epoch, call.stages):
            self._end(generation)
            standing = None
        if not call.stages:
            return
        if standing is None:
            timeout_s = self._config.tier_call_timeout_ms / 1000
            links = [
                StageLink(self._ports.transport, self._boot, call.pool.epoch, stage, timeout_s)
                for stage in call.stages
            ]
            mover = Mover(links, self.tiers, self._moved)
            running = self._group.create_task(mover.run(), name="mover")
            standing = _Standing(call.pool.epoch, call.stages, mover, running)
            self._standing[generation] = standing
        least = -(-self._config.restore_min_tokens // call.block_size_tokens)
        standing.mover.attached(Moves(self._ledger.pools[generation], least))

    def dropped(self) -> None:
        """Pools may have gone."""
        for generation in list(self._standing):
            if generation not in self._ledger.pools:
                self._end(generation)

    def _end(self, generation: str) -> None:
        standing = self._standing.pop(generation)
        standing.mover.attached(None)
        standing.running.cancel()

    def called(self, generation: str) -> None:
        """After a call that changed a pool."""
        standing = self._standing.get(generation)
        if standing is not None:
            standing.mover.learn()

    async def prepare(self, call: Match) -> None:
        """Before a match: contents that the tiers hold come into the pool first, within limits."""
        pool, standing = (
            self._ledger.pools.get(call.pool.generation),
            self._standing.get(call.pool.generation),
        )
        if pool is not None and standing is not None and pool.ref == call.pool:
            await standing.mover.prepare(call.chains, self._config.restore_wait_ms / 1000)

    # ---- for people

    def stats(self) -> dict[str, int]:
        """Contents and bytes by tier; blocks that moved; what went wrong."""
        if not self.on:
            return {}
        tiers, tally = self.tiers, self.tiers.tally
        counts = {
            "host_contents": len(tiers.host.catalog),
            "host_bytes": tiers.host.catalog.num_bytes,
            "host_evictions": tiers.host.evictions,
            "saved": tally.saved,
            "restored": tally.restored,
            "refused": tally.refused,
            "failed_saves": tally.failed_saves,
            "failed_restores": tally.failed_restores,
            "late_restores": tally.late_restores,
            "backlog": sum(moves.backlog for moves in self.moving),
            "wrong_pages": sum(s.mover.wrong for s in self._standing.values()),
        }
        if tiers.disk is not None:
            damage = tiers.disk.segments.damage
            counts |= {
                "disk_contents": len(tiers.disk.catalog),
                "disk_bytes": tiers.disk.catalog.num_bytes,
                "disk_evictions": tiers.disk.evictions,
                "disk_failures": tiers.disk.failures,
                "disk_left_out": tiers.disk.left_out,
                "disk_damaged": damage.torn + damage.broken + damage.wrong,
            }
        return counts

    def check(self) -> None:
        self.tiers.check()
        for moves in self.moving:
            moves.check()
