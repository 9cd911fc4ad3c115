"""The words of `shoal cache`: what every kvstore holds, by pool and prefix, and what its answers look like.

Read a piece of at most 4,096 blocks at a time, so that no kvstore stops for it; a pool that changes meanwhile
is shown as its pieces were when they were read.
"""

import argparse
import json
from dataclasses import asdict, dataclass, field

from chassis import subjects
from chassis.bus import Bus
from chassis.errors import RpcError
from chassis.messages import BadMessage
from chassis.messages.cache import (
    HOLDINGS,
    TIER_POOL,
    Held,
    Holdings,
    HoldingsQuestion,
    PoolTotals,
    build_question,
    parse_holdings,
)
from chassis.messages.kvstore import KEEP_PINNED
from chassis.messages.registry import KvstoreEntry, parse_kvstore
from chassis.rpc import Rpc
from shoal.cached_prefixes import Run, runs_of, top
from shoal.looking import Dial

TIMEOUT_S = 5.0
_SHOWN = 12  # characters of a hash


@dataclass(slots=True)
class PoolShown:
    totals: PoolTotals
    tier: str
    held: list[Held] = field(default_factory=list)


@dataclass(slots=True)
class CacheShown:
    """`error`: why it did not answer."""

    entry: KvstoreEntry
    pools: list[PoolShown] = field(default_factory=list)
    error: str = ""


def add_words(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--top", type=int, default=20, help="prefixes shown of a pool (default: 20)")
    parser.add_argument("--by", choices=["hits", "length"], default="hits", help="which come first")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--nats", help="URL of the bus (default: what `shoal up` runs)")


async def look(bus: Bus, rpc: Rpc) -> list[CacheShown]:
    """Every kvstore that the registry knows. Raises BusError."""
    found = []
    for entry in await bus.entries(subjects.KVSTORES):
        try:
            kvstore = parse_kvstore(entry.value or b"")
        except BadMessage:
            continue  # anyone may write there
        shown = CacheShown(kvstore)
        try:
            await _read(rpc, kvstore.rpc_address, shown)
        except (RpcError, BadMessage) as error:
            shown.error = str(error)
        found.append(shown)
    return found


async def _read(rpc: Rpc, address: str, into: CacheShown) -> None:
    async def ask(generation: str, first_block: int) -> Holdings:
        question = build_question(HoldingsQuestion(generation, first_block))
        return parse_holdings(await rpc.call(address, HOLDINGS, question, TIMEOUT_S))

    known = await ask("", 0)
    for totals in known.pools:
        pool = PoolShown(totals, totals.tier)
        into.pools.append(pool)
        following: int | None = 0
        while following is not None:
            piece = await ask(totals.ref.generation, following)
            pool.held += piece.held
            following = piece.next_block


async def tell(bus: Bus, dial: Dial, arguments: argparse.Namespace) -> tuple[str, bool]:
    """The text, and whether all answered. Raises BusError when the bus does not."""
    rpc = dial()
    try:
        caches = await look(bus, rpc)
    finally:
        await rpc.close()
    text = as_json(caches, arguments.top, arguments.by) if arguments.json else ""
    text = text or "\n".join(render(cache, arguments.top, arguments.by) for cache in caches)
    return text or "no kvstore is registered", bool(caches) and not any(c.error for c in caches)


def render(cache: CacheShown, count: int, by: str) -> str:
    lines = [f"kvstore {cache.entry.boot} at {cache.entry.rpc_address}"]
    if cache.error:
        lines.append(f"  does not answer: {cache.error}")
    elif not cache.pools:
        lines.append("  has no pool")
    for pool in cache.pools:
        lines += _pool_lines(pool, count, by)
    return "\n".join(lines)


def _pool_lines(pool: PoolShown, count: int, by: str) -> list[str]:
    t = pool.totals
    lines = _tier_lines(t) if pool.tier != TIER_POOL else _block_lines(t)
    runs = runs_of(pool.held)
    shown = top(runs, count, by)
    if shown:
        lines.append(f"  {'prefix':<28}{'tokens':>9}{'blocks':>8}{'hits':>7}{'users':>7}  last used")
    depths: dict[bytes, int] = {}
    for run in shown:
        depth = depths[run.last] = 0 if run.parent is None else depths[run.parent.last] + 1
        name = "  " * min(depth, 8) + run.last.hex()[:_SHOWN]
        length = f"{'' if run.whole else '>='}{run.depth_blocks * t.block_size_tokens:,}"
        used = "now" if run.unused_ms is None else f"{run.unused_ms / 1000:,.1f} s ago"
        pinned = ", pinned" if run.keep == KEEP_PINNED else ""
        lines.append(
            f"  {name:<28}{length:>9}{run.blocks:>8,}{run.hits:>7,}{run.references:>7,}  {used}{pinned}"
        )
    if len(shown) < len(runs):
        lines.append(f"  and {len(runs) - len(shown):,} more")
    return lines


def _block_lines(t: PoolTotals) -> list[str]:
    share = 100 * (t.total - t.free) / max(1, t.total)
    return [
        f"pool {t.ref.generation[:_SHOWN]}, epoch {t.ref.epoch}, model {t.namespace[:_SHOWN]}",
        f"  {t.tier}: {t.total:,} blocks of {t.block_size_tokens} tokens, {share:.0f} % taken: "
        f"{t.leased:,} in use, {t.cached:,} cached, {t.free:,} free",
    ]


def _tier_lines(t: PoolTotals) -> list[str]:
    """Of kvstore's own, for all pools."""
    return [
        f"tier {t.tier}: {t.total:,} blocks of {t.block_size_tokens} tokens, "
        f"{t.num_bytes / 1e6:,.1f} of {t.bytes_max / 1e6:,.1f} MB"
    ]


def as_json(caches: list[CacheShown], count: int, by: str) -> str:
    """Hashes in full; lengths in tokens from the beginning of the prompt."""
    return json.dumps(
        [
            {
                "boot": cache.entry.boot,
                "address": cache.entry.rpc_address,
                "error": cache.error,
                "pools": [_pool_object(pool, count, by) for pool in cache.pools],
            }
            for cache in caches
        ],
        indent=2,
    )


def _pool_object(pool: PoolShown, count: int, by: str) -> dict[str, object]:
    runs = runs_of(pool.held)
    size = pool.totals.block_size_tokens
    return {
        **asdict(pool.totals),
        "tiers": {pool.tier: len({h.content for h in pool.held})},
        "prefixes_all": len(runs),
        "prefixes": [_run_object(run, size) for run in top(runs, count, by)],
    }


def _run_object(run: Run, block_size_tokens: int) -> dict[str, object]:
    return {
        "hash": run.last.hex(),
        "continues": None if run.parent is None else run.parent.last.hex(),
        "tokens": run.depth_blocks * block_size_tokens,
        "whole": run.whole,
        "blocks": run.blocks,
        "hits": run.hits,
        "references": run.references,
        "unused_ms": run.unused_ms,
        "keep": run.keep,
    }
