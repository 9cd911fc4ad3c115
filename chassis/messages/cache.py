"""What caches hold, told to routers and people: changes as they come, and pools piece by piece.

`proto/kvstore.proto` says how a listener puts both together; `chassis/cache_view.py` is one. A parent is
zeros for a first block and None where kvstore was not told, which are ones on the wire.
"""

from dataclasses import dataclass
from typing import NamedTuple

from chassis.ids import MAX_U32, BlockHash, BootId
from chassis.messages import check, check_id, parse
from chassis.messages.kvstore import (
    HASH_BYTES,
    PoolRef,
    build_pool,
    pack_ids,
    parse_column,
    parse_hashes,
    parse_ids,
    parse_pool,
)
from chassis.rpc import Method
from chassis.wire import kvstore_pb2 as pb

HOLDINGS = Method("/shoal.kvstore.v1.KvStore/Holdings", pb.HoldingsRequest, pb.HoldingsReply)
TIER_POOL = "pool"
TIER_HOST = "host"  # kvstore's memory
TIER_DISK = "disk"
_NOT_TOLD = BlockHash(b"\xff" * HASH_BYTES)


def tier_of(pool: PoolRef) -> str:
    """A tier of kvstore's own is told of like a pool, whose generation is its name."""
    return pool.generation if pool.generation in (TIER_HOST, TIER_DISK) else TIER_POOL


@dataclass(frozen=True, slots=True)
class CacheChanges:
    """`cleared` goes first: what was known of the pool is void. `stored` pairs a content with its parent."""

    boot: BootId
    number: int
    pool: PoolRef
    namespace: str
    block_size_tokens: int
    stored: tuple[tuple[BlockHash, BlockHash | None], ...] = ()
    evicted: tuple[BlockHash, ...] = ()
    cleared: bool = False
    gone: bool = False
    tier: str = TIER_POOL


@dataclass(frozen=True, slots=True)
class HoldingsQuestion:
    """`generation` empty: the pools alone."""

    generation: str = ""
    first_block: int = 0


@dataclass(frozen=True, slots=True)
class PoolTotals:
    """Counts of blocks."""

    ref: PoolRef
    namespace: str
    block_size_tokens: int
    total: int
    free: int
    leased: int
    cached: int
    num_bytes: int = 0  # of tiers alone
    bytes_max: int = 0

    @property
    def tier(self) -> str:
        return tier_of(self.ref)


class Held(NamedTuple):
    """A block with known content; `unused_ms` None: it is in use."""

    content: BlockHash
    parent: BlockHash | None
    references: int
    hits: int  # matches that ended here
    keep: int
    unused_ms: int | None


@dataclass(frozen=True, slots=True)
class Holdings:
    """True as of `number`. `next_block` None: the pool ends here."""

    boot: BootId
    number: int
    pools: tuple[PoolTotals, ...]
    generation: str = ""
    first_block: int = 0
    held: tuple[Held, ...] = ()
    next_block: int | None = None
    tier: str = TIER_POOL


def build_changes(changes: CacheChanges) -> bytes:
    return pb.CacheChanges(
        boot=changes.boot,
        number=changes.number,
        pool=build_pool(changes.pool),
        namespace=changes.namespace,
        block_size_tokens=changes.block_size_tokens,
        tier=changes.tier,
        cleared=changes.cleared,
        gone=changes.gone,
        stored=b"".join([content for content, _ in changes.stored]),
        stored_parents=b"".join([parent or _NOT_TOLD for _, parent in changes.stored]),
        evicted=b"".join(changes.evicted),
    ).SerializeToString()


def parse_changes(data: bytes) -> CacheChanges:
    m = parse(pb.CacheChanges, data)
    check_id(m.boot, "boot")
    check(m.number > 0, "number: 0")
    contents = parse_hashes("stored", m.stored)
    parents = _parents("stored_parents", m.stored_parents, len(contents))
    return CacheChanges(
        boot=BootId(m.boot),
        number=m.number,
        pool=parse_pool(m.pool),
        namespace=m.namespace,
        block_size_tokens=m.block_size_tokens,
        stored=tuple(zip(contents, parents, strict=True)),
        evicted=tuple(parse_hashes("evicted", m.evicted)),
        cleared=m.cleared,
        gone=m.gone,
        tier=m.tier,
    )


def build_question(question: HoldingsQuestion) -> pb.HoldingsRequest:
    return pb.HoldingsRequest(generation=question.generation, first_block=question.first_block)


def parse_question(m: pb.HoldingsRequest) -> HoldingsQuestion:
    return HoldingsQuestion(m.generation, m.first_block)


def encode_question(question: HoldingsQuestion) -> bytes:
    """For the bus."""
    return build_question(question).SerializeToString()


def decode_question(data: bytes) -> HoldingsQuestion:
    return parse_question(parse(pb.HoldingsRequest, data))


def build_holdings(holdings: Holdings) -> pb.HoldingsReply:
    held = holdings.held
    return pb.HoldingsReply(
        boot=holdings.boot,
        number=holdings.number,
        pools=[_totals(pool) for pool in holdings.pools],
        generation=holdings.generation,
        tier=holdings.tier,
        contents=b"".join([h.content for h in held]),
        parents=b"".join([h.parent or _NOT_TOLD for h in held]),
        references=pack_ids([h.references for h in held]),
        hits=pack_ids([min(h.hits, MAX_U32) for h in held]),
        keeps=bytes([h.keep for h in held]),
        unused_ms=pack_ids([MAX_U32 if h.unused_ms is None else min(h.unused_ms, MAX_U32 - 1) for h in held]),
        first_block=holdings.first_block,
        next_block=holdings.next_block or 0,
    )


def parse_holdings(m: pb.HoldingsReply) -> Holdings:
    check_id(m.boot, "boot")
    contents = parse_hashes("contents", m.contents)
    count = len(contents)
    check(len(m.keeps) == count, f"keeps: {len(m.keeps)} for {count} blocks")
    columns = zip(
        contents,
        _parents("parents", m.parents, count),
        _parse_u32("references", m.references, count),
        _parse_u32("hits", m.hits, count),
        m.keeps,
        [None if ms == MAX_U32 else ms for ms in _parse_u32("unused_ms", m.unused_ms, count)],
        strict=True,
    )
    return Holdings(
        boot=BootId(m.boot),
        number=m.number,
        pools=tuple(_parse_totals(pool) for pool in m.pools),
        generation=m.generation,
        first_block=m.first_block,
        held=tuple(map(Held._make, columns)),
        next_block=m.next_block or None,
        tier=m.tier,
    )


def encode_holdings(holdings: Holdings) -> bytes:
    """For the bus."""
    return build_holdings(holdings).SerializeToString()


def decode_holdings(data: bytes) -> Holdings:
    return parse_holdings(parse(pb.HoldingsReply, data))


def _totals(pool: PoolTotals) -> pb.CachePool:
    return pb.CachePool(
        ref=build_pool(pool.ref),
        namespace=pool.namespace,
        block_size_tokens=pool.block_size_tokens,
        total=pool.total,
        free=pool.free,
        leased=pool.leased,
        cached=pool.cached,
        bytes=pool.num_bytes,
        bytes_max=pool.bytes_max,
    )


def _parse_totals(m: pb.CachePool) -> PoolTotals:
    ref = parse_pool(m.ref)
    counts = (m.total, m.free, m.leased, m.cached, m.bytes, m.bytes_max)
    return PoolTotals(ref, m.namespace, m.block_size_tokens, *counts)


def _parents(name: str, data: bytes, count: int) -> list[BlockHash | None]:
    return [None if parent == _NOT_TOLD else parent for parent in parse_column(name, data, count)]


def _parse_u32(name: str, data: bytes, count: int) -> tuple[int, ...]:
    values = parse_ids(name, data)
    check(len(values) == count, f"{name}: {len(values)} for {count} blocks")
    return values
