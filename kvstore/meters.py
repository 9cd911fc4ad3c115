"""Pure. What a kvstore tells scrapers: its own counts, named when they are asked for."""

from collections.abc import Iterator

from chassis.messages.kvstore import Stats
from chassis.metrics import Family, counter, gauge

STATES = ("host_contents", "host_bytes", "disk_contents", "disk_bytes", "backlog")


def families(stats: Stats, calls: int) -> Iterator[Family]:
    """`stats`: of all pools."""
    blocks = {"free": stats.free, "leased": stats.leased, "cached": stats.cached}
    yield gauge("shoal_kvstore_blocks", "Blocks of all pools, by state").each(blocks, "state")
    used = (stats.total - stats.free) / stats.total if stats.total else 0.0
    yield gauge("shoal_kvstore_usage_ratio", "Blocks with content, of all").add(used)
    yield gauge("shoal_kvstore_pools", "Pools").add(len(stats.generations))
    asked = {"hit": stats.hits, "miss": stats.misses}
    yield counter("shoal_kvstore_blocks_asked_total", "Blocks of prompts asked for").each(asked, "result")
    ratio = stats.hits / (stats.hits + stats.misses) if stats.hits + stats.misses else 0.0
    yield gauge("shoal_kvstore_hit_ratio", "Hits of all blocks asked for since the start").add(ratio)
    yield counter("shoal_kvstore_evictions_total", "Blocks whose content went").add(stats.evictions)
    yield counter("shoal_kvstore_bad_blocks_total", "That did not hold what was said").add(stats.bad_blocks)
    yield counter("shoal_kvstore_old_calls_total", "Of batchers that were passed over").add(stats.old_epochs)
    yield counter("shoal_kvstore_calls_total", "Calls that changed or asked").add(calls)
    states = {name: count for name, count in stats.tiers.items() if name in STATES}
    yield gauge("shoal_kvstore_tier", "Of the tiers below, by now").each(states, "what")
    events = {name: count for name, count in stats.tiers.items() if name not in STATES}
    yield counter("shoal_kvstore_tier_events_total", "Of the tiers below").each(events, "what")
