"""What batchers say to kvstore: value types, the remote methods, and the code between values and protobuf.

Columns of block ids are little-endian u32 in bytes fields, hashes 32 bytes each.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from chassis.ids import BlockHash, BlockId, BootId, Epoch
from chassis.messages import BadMessage
from chassis.messages.addresses import from_wire, to_wire
from chassis.rpc import Method
from chassis.wire import kvstore_pb2 as pb

HASH_BYTES = 32
CHAINS_MAX = 4096
NO_PARENT = BlockHash(bytes(HASH_BYTES))

# How long released content is to stay (`kvstore/eviction.py`).
KEEP_PINNED = 0
KEEP_DEFAULT = 1 + 5
KEEP_LEAST = 1 + 9

_SERVICE = "/shoal.kvstore.v1.KvStore/"
ATTACH = Method(_SERVICE + "Attach", pb.AttachRequest, pb.AttachReply)
MATCH = Method(_SERVICE + "Match", pb.MatchRequest, pb.MatchReply)
EXCHANGE = Method(_SERVICE + "Exchange", pb.ExchangeRequest, pb.ExchangeReply)
DETACH = Method(_SERVICE + "Detach", pb.DetachRequest, pb.DetachReply)
LOCATE = Method(_SERVICE + "Locate", pb.LocateRequest, pb.LocateReply)
STATS = Method(_SERVICE + "Stats", pb.StatsRequest, pb.StatsReply)


@dataclass(frozen=True, slots=True)
class PoolRef:
    """`attachment` is the caller's number of its attach; it grows within an epoch."""

    generation: str
    epoch: Epoch
    attachment: int


class TraceRef(NamedTuple):
    """Whose trace a match belongs to: a request id and its 25-byte context."""

    key: str
    trace_parent: bytes


class Commit(NamedTuple):
    """`parent` is zeros for the first block of a chain."""

    block: BlockId
    content: BlockHash
    parent: BlockHash


class StageAddress(NamedTuple):
    """Where a stage of the pool's pipeline is reached, and which layers it holds."""

    transport_address: str  # link addresses: best first, with spaces
    layers: range


@dataclass(frozen=True, slots=True)
class Attach:
    """`held` repeats a block for each further reference; `committed` says what held blocks hold, heads first.

    `prior_*`: the attach under which the memory was last written, at whatever kvstore. Epoch 0: not known;
    attachment 0: the last of that epoch.
    """

    pool: PoolRef
    worker_stamps: tuple[str, ...]
    num_blocks: int
    block_size_tokens: int
    namespace: str
    held: tuple[BlockId, ...] = ()
    committed: tuple[tuple[BlockId, BlockHash], ...] = ()
    prior_epoch: Epoch = Epoch(0)
    prior_attachment: int = 0
    stages: tuple[StageAddress, ...] = ()  # in order


@dataclass(frozen=True, slots=True)
class Attached:
    free: int
    cached: int
    tiers: bool = False  # a match may find what the pool lacks


@dataclass(frozen=True, slots=True)
class Match:
    """`traces`: none, or one per chain."""

    pool: PoolRef
    chains: tuple[tuple[BlockHash, ...], ...]
    traces: tuple[TraceRef, ...] = ()


@dataclass(frozen=True, slots=True)
class Locate:
    namespace: str
    block_size_tokens: int
    chains: tuple[tuple[BlockHash, ...], ...]


Located = tuple[
    tuple[str, tuple[int, ...]], ...
]  # pools, and how many blocks each holds of every chain's head


def keep_of_priority(priority: int) -> int:
    return 1 + priority


@dataclass(frozen=True, slots=True)
class Exchange:
    pool: PoolRef
    commits: tuple[Commit, ...] = ()
    releases: tuple[BlockId, ...] = ()  # head of a chain first
    lease_count: int = 0
    keeps: tuple[int, ...] = ()  # of each release: 1 + the request's priority, or a pin; none: the default
    bad: tuple[BlockId, ...] = ()  # leased: they do not hold what they were said to


@dataclass(frozen=True, slots=True)
class Exchanged:
    leased: tuple[BlockId, ...]
    free: int
    cached: int


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts of blocks; hits, misses and evictions since kvstore started."""

    total: int
    free: int
    leased: int
    cached: int
    hits: int
    misses: int
    evictions: int
    generations: tuple[str, ...] = field(default=())
    old_epochs: int = 0
    bad_blocks: int = 0
    tiers: Mapping[str, int] = field(default_factory=dict)


def pack_ids(blocks: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(blocks)}I", *blocks)


def parse_ids(name: str, data: bytes) -> tuple[BlockId, ...]:
    if len(data) % 4:
        raise BadMessage(f"{name}: {len(data)} bytes are not whole ids of 4")
    return struct.unpack(f"<{len(data) // 4}I", data)


def parse_hashes(name: str, data: bytes) -> list[BlockHash]:
    if len(data) % HASH_BYTES:
        raise BadMessage(f"{name}: {len(data)} bytes are not whole hashes of {HASH_BYTES}")
    return [BlockHash(data[i : i + HASH_BYTES]) for i in range(0, len(data), HASH_BYTES)]


def parse_column(name: str, data: bytes, count: int) -> list[BlockHash]:
    hashes = parse_hashes(name, data)
    if len(hashes) != count:
        raise BadMessage(f"{name}: {len(hashes)} hashes for {count} blocks")
    return hashes


def build_pool(ref: PoolRef) -> pb.PoolRef:
    return pb.PoolRef(generation=ref.generation, epoch=ref.epoch, attachment=ref.attachment)


def parse_pool(m: pb.PoolRef) -> PoolRef:
    return PoolRef(m.generation, Epoch(m.epoch), m.attachment)


def _traces(traces: Sequence[TraceRef]) -> list[pb.TraceRef]:
    return [pb.TraceRef(key=t.key, trace_parent=t.trace_parent) for t in traces]


def _parse_traces(traces: Sequence[pb.TraceRef]) -> tuple[TraceRef, ...]:
    return tuple(TraceRef(t.key, t.trace_parent) for t in traces)


def build_attach(call: Attach) -> pb.AttachRequest:
    return pb.AttachRequest(
        pool=build_pool(call.pool),
        worker_stamps=call.worker_stamps,
        num_blocks=call.num_blocks,
        block_size_tokens=call.block_size_tokens,
        namespace=call.namespace,
        held=pack_ids(call.held),
        committed=pack_ids([block for block, _ in call.committed]),
        committed_hashes=b"".join(content for _, content in call.committed),
        prior_epoch=call.prior_epoch,
        prior_attachment=call.prior_attachment,
        stages=[_build_stage(stage) for stage in call.stages],
    )


def parse_attach(m: pb.AttachRequest) -> Attach:
    blocks = parse_ids("committed", m.committed)
    return Attach(
        pool=parse_pool(m.pool),
        worker_stamps=tuple(m.worker_stamps),
        num_blocks=m.num_blocks,
        block_size_tokens=m.block_size_tokens,
        namespace=m.namespace,
        held=parse_ids("held", m.held),
        committed=tuple(
            zip(blocks, parse_column("committed_hashes", m.committed_hashes, len(blocks)), strict=True)
        ),
        prior_epoch=Epoch(m.prior_epoch),
        prior_attachment=m.prior_attachment,
        stages=tuple(
            StageAddress(from_wire(s.transport_address, s.more_addresses), range(s.first_layer, s.end_layer))
            for s in m.stages
        ),
    )


def _build_stage(stage: StageAddress) -> pb.StageAddress:
    known, others = to_wire(stage.transport_address)
    return pb.StageAddress(
        transport_address=known,
        first_layer=stage.layers.start,
        end_layer=stage.layers.stop,
        more_addresses=others,
    )


def build_attached(attached: Attached, boot: BootId) -> pb.AttachReply:
    return pb.AttachReply(kvstore_boot=boot, free=attached.free, cached=attached.cached, tiers=attached.tiers)


def parse_attached(m: pb.AttachReply) -> Attached:
    return Attached(m.free, m.cached, m.tiers)


def build_detach(pool: PoolRef) -> pb.DetachRequest:
    return pb.DetachRequest(pool=build_pool(pool))


def parse_detach(m: pb.DetachRequest) -> PoolRef:
    return parse_pool(m.pool)


def build_detached() -> pb.DetachReply:
    return pb.DetachReply()


def build_match(call: Match) -> pb.MatchRequest:
    return pb.MatchRequest(
        pool=build_pool(call.pool),
        chains=[b"".join(chain) for chain in call.chains],
        traces=_traces(call.traces),
    )


def parse_match(m: pb.MatchRequest) -> Match:
    if len(m.chains) > CHAINS_MAX:
        raise BadMessage(f"chains: {len(m.chains)} is above {CHAINS_MAX}")
    if m.traces and len(m.traces) != len(m.chains):
        raise BadMessage(f"traces: {len(m.traces)} for {len(m.chains)} chains")
    return Match(
        pool=parse_pool(m.pool),
        chains=tuple(tuple(parse_hashes("chains", chain)) for chain in m.chains),
        traces=_parse_traces(m.traces),
    )


def build_matched(blocks: Sequence[Sequence[BlockId]]) -> pb.MatchReply:
    return pb.MatchReply(blocks=[pack_ids(found) for found in blocks])


def parse_matched(m: pb.MatchReply, count: int) -> tuple[tuple[BlockId, ...], ...]:
    """`count`: how many chains were asked for."""
    if len(m.blocks) != count:
        raise BadMessage(f"blocks: {len(m.blocks)} answers for {count} chains")
    return tuple(parse_ids("blocks", found) for found in m.blocks)


def build_locate(call: Locate) -> pb.LocateRequest:
    return pb.LocateRequest(
        namespace=call.namespace,
        block_size_tokens=call.block_size_tokens,
        chains=[b"".join(chain) for chain in call.chains],
    )


def parse_locate(m: pb.LocateRequest) -> Locate:
    if len(m.chains) > CHAINS_MAX:
        raise BadMessage(f"chains: {len(m.chains)} is above {CHAINS_MAX}")
    chains = tuple(tuple(parse_hashes("chains", chain)) for chain in m.chains)
    return Locate(m.namespace, m.block_size_tokens, chains)


def build_located(found: Located) -> pb.LocateReply:
    return pb.LocateReply(
        generations=[generation for generation, _ in found], blocks=[pack_ids(held) for _, held in found]
    )


def parse_located(m: pb.LocateReply, count: int) -> Located:
    """`count`: how many chains were asked for."""
    if len(m.generations) != len(m.blocks):
        raise BadMessage(f"blocks: {len(m.blocks)} answers of {len(m.generations)} pools")
    columns = tuple(tuple(int(held) for held in parse_ids("blocks", blocks)) for blocks in m.blocks)
    if any(len(column) != count for column in columns):
        raise BadMessage(f"blocks: not one number for each of {count} chains")
    return tuple(zip(m.generations, columns, strict=True))


def build_exchange(call: Exchange) -> pb.ExchangeRequest:
    return pb.ExchangeRequest(
        pool=build_pool(call.pool),
        commit_blocks=pack_ids([c.block for c in call.commits]),
        commit_hashes=b"".join([c.content for c in call.commits]),
        commit_parents=b"".join([c.parent for c in call.commits]),
        release_blocks=pack_ids(call.releases),
        lease_count=call.lease_count,
        release_keeps=bytes(call.keeps),
        bad_blocks=pack_ids(call.bad),
    )


def parse_exchange(m: pb.ExchangeRequest) -> Exchange:
    blocks = parse_ids("commit_blocks", m.commit_blocks)
    contents = parse_column("commit_hashes", m.commit_hashes, len(blocks))
    parents = parse_column("commit_parents", m.commit_parents, len(blocks))
    return Exchange(
        pool=parse_pool(m.pool),
        commits=tuple(map(Commit, blocks, contents, parents)),
        releases=parse_ids("release_blocks", m.release_blocks),
        lease_count=m.lease_count,
        keeps=tuple(m.release_keeps),
        bad=parse_ids("bad_blocks", m.bad_blocks),
    )


def build_exchanged(done: Exchanged) -> pb.ExchangeReply:
    return pb.ExchangeReply(leased_blocks=pack_ids(done.leased), free=done.free, cached=done.cached)


def parse_exchanged(m: pb.ExchangeReply) -> Exchanged:
    return Exchanged(parse_ids("leased_blocks", m.leased_blocks), m.free, m.cached)


def build_stats_question(generation: str) -> pb.StatsRequest:
    return pb.StatsRequest(generation=generation)


def parse_stats_question(m: pb.StatsRequest) -> str:
    return m.generation


def build_stats(stats: Stats) -> pb.StatsReply:
    return pb.StatsReply(
        total=stats.total,
        free=stats.free,
        leased=stats.leased,
        cached=stats.cached,
        hits=stats.hits,
        misses=stats.misses,
        evictions=stats.evictions,
        generations=stats.generations,
        old_epochs=stats.old_epochs,
        bad_blocks=stats.bad_blocks,
        tiers=[pb.TierCount(name=name, count=count) for name, count in stats.tiers.items()],
    )


def parse_stats(m: pb.StatsReply) -> Stats:
    return Stats(
        total=m.total,
        free=m.free,
        leased=m.leased,
        cached=m.cached,
        hits=m.hits,
        misses=m.misses,
        evictions=m.evictions,
        generations=tuple(m.generations),
        old_epochs=m.old_epochs,
        bad_blocks=m.bad_blocks,
        tiers={count.name: count.count for count in m.tiers},
    )
