from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PoolRef(_message.Message):
    __slots__ = ("generation", "epoch", "attachment")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    generation: str
    epoch: int
    attachment: int
    def __init__(self, generation: _Optional[str] = ..., epoch: _Optional[int] = ..., attachment: _Optional[int] = ...) -> None: ...

class TraceRef(_message.Message):
    __slots__ = ("key", "trace_parent")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TRACE_PARENT_FIELD_NUMBER: _ClassVar[int]
    key: str
    trace_parent: bytes
    def __init__(self, key: _Optional[str] = ..., trace_parent: _Optional[bytes] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("pool", "worker_stamps", "num_blocks", "block_size_tokens", "namespace", "held", "committed", "committed_hashes", "prior_epoch", "prior_attachment", "stages")
    POOL_FIELD_NUMBER: _ClassVar[int]
    WORKER_STAMPS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_HASHES_FIELD_NUMBER: _ClassVar[int]
    PRIOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PRIOR_ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    pool: PoolRef
    worker_stamps: _containers.RepeatedScalarFieldContainer[str]
    num_blocks: int
    block_size_tokens: int
    namespace: str
    held: bytes
    committed: bytes
    committed_hashes: bytes
    prior_epoch: int
    prior_attachment: int
    stages: _containers.RepeatedCompositeFieldContainer[StageAddress]
    def __init__(self, pool: _Optional[_Union[PoolRef, _Mapping]] = ..., worker_stamps: _Optional[_Iterable[str]] = ..., num_blocks: _Optional[int] = ..., block_size_tokens: _Optional[int] = ..., namespace: _Optional[str] = ..., held: _Optional[bytes] = ..., committed: _Optional[bytes] = ..., committed_hashes: _Optional[bytes] = ..., prior_epoch: _Optional[int] = ..., prior_attachment: _Optional[int] = ..., stages: _Optional[_Iterable[_Union[StageAddress, _Mapping]]] = ...) -> None: ...

class StageAddress(_message.Message):
    __slots__ = ("transport_address", "first_layer", "end_layer", "more_addresses")
    TRANSPORT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    END_LAYER_FIELD_NUMBER: _ClassVar[int]
    MORE_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    transport_address: str
    first_layer: int
    end_layer: int
    more_addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, transport_address: _Optional[str] = ..., first_layer: _Optional[int] = ..., end_layer: _Optional[int] = ..., more_addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class AttachReply(_message.Message):
    __slots__ = ("kvstore_boot", "free", "cached", "tiers")
    KVSTORE_BOOT_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    kvstore_boot: str
    free: int
    cached: int
    tiers: bool
    def __init__(self, kvstore_boot: _Optional[str] = ..., free: _Optional[int] = ..., cached: _Optional[int] = ..., tiers: _Optional[bool] = ...) -> None: ...

class DetachRequest(_message.Message):
    __slots__ = ("pool",)
    POOL_FIELD_NUMBER: _ClassVar[int]
    pool: PoolRef
    def __init__(self, pool: _Optional[_Union[PoolRef, _Mapping]] = ...) -> None: ...

class DetachReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MatchRequest(_message.Message):
    __slots__ = ("pool", "chains", "traces")
    POOL_FIELD_NUMBER: _ClassVar[int]
    CHAINS_FIELD_NUMBER: _ClassVar[int]
    TRACES_FIELD_NUMBER: _ClassVar[int]
    pool: PoolRef
    chains: _containers.RepeatedScalarFieldContainer[bytes]
    traces: _containers.RepeatedCompositeFieldContainer[TraceRef]
    def __init__(self, pool: _Optional[_Union[PoolRef, _Mapping]] = ..., chains: _Optional[_Iterable[bytes]] = ..., traces: _Optional[_Iterable[_Union[TraceRef, _Mapping]]] = ...) -> None: ...

class MatchReply(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, blocks: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ExchangeRequest(_message.Message):
    __slots__ = ("pool", "commit_blocks", "commit_hashes", "commit_parents", "release_blocks", "lease_count", "release_keeps", "bad_blocks")
    POOL_FIELD_NUMBER: _ClassVar[int]
    COMMIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_HASHES_FIELD_NUMBER: _ClassVar[int]
    COMMIT_PARENTS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASE_COUNT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_KEEPS_FIELD_NUMBER: _ClassVar[int]
    BAD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    pool: PoolRef
    commit_blocks: bytes
    commit_hashes: bytes
    commit_parents: bytes
    release_blocks: bytes
    lease_count: int
    release_keeps: bytes
    bad_blocks: bytes
    def __init__(self, pool: _Optional[_Union[PoolRef, _Mapping]] = ..., commit_blocks: _Optional[bytes] = ..., commit_hashes: _Optional[bytes] = ..., commit_parents: _Optional[bytes] = ..., release_blocks: _Optional[bytes] = ..., lease_count: _Optional[int] = ..., release_keeps: _Optional[bytes] = ..., bad_blocks: _Optional[bytes] = ...) -> None: ...

class ExchangeReply(_message.Message):
    __slots__ = ("leased_blocks", "free", "cached")
    LEASED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    leased_blocks: bytes
    free: int
    cached: int
    def __init__(self, leased_blocks: _Optional[bytes] = ..., free: _Optional[int] = ..., cached: _Optional[int] = ...) -> None: ...

class LocateRequest(_message.Message):
    __slots__ = ("namespace", "block_size_tokens", "chains")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHAINS_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    block_size_tokens: int
    chains: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, namespace: _Optional[str] = ..., block_size_tokens: _Optional[int] = ..., chains: _Optional[_Iterable[bytes]] = ...) -> None: ...

class LocateReply(_message.Message):
    __slots__ = ("generations", "blocks")
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    generations: _containers.RepeatedScalarFieldContainer[str]
    blocks: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, generations: _Optional[_Iterable[str]] = ..., blocks: _Optional[_Iterable[bytes]] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: str
    def __init__(self, generation: _Optional[str] = ...) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("total", "free", "leased", "cached", "hits", "misses", "evictions", "generations", "old_epochs", "bad_blocks", "tiers")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    OLD_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    BAD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    total: int
    free: int
    leased: int
    cached: int
    hits: int
    misses: int
    evictions: int
    generations: _containers.RepeatedScalarFieldContainer[str]
    old_epochs: int
    bad_blocks: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierCount]
    def __init__(self, total: _Optional[int] = ..., free: _Optional[int] = ..., leased: _Optional[int] = ..., cached: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., evictions: _Optional[int] = ..., generations: _Optional[_Iterable[str]] = ..., old_epochs: _Optional[int] = ..., bad_blocks: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierCount, _Mapping]]] = ...) -> None: ...

class TierCount(_message.Message):
    __slots__ = ("name", "count")
    NAME_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    name: str
    count: int
    def __init__(self, name: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class CacheChanges(_message.Message):
    __slots__ = ("boot", "number", "pool", "namespace", "block_size_tokens", "tier", "cleared", "gone", "stored", "stored_parents", "evicted")
    BOOT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    STORED_PARENTS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    boot: str
    number: int
    pool: PoolRef
    namespace: str
    block_size_tokens: int
    tier: str
    cleared: bool
    gone: bool
    stored: bytes
    stored_parents: bytes
    evicted: bytes
    def __init__(self, boot: _Optional[str] = ..., number: _Optional[int] = ..., pool: _Optional[_Union[PoolRef, _Mapping]] = ..., namespace: _Optional[str] = ..., block_size_tokens: _Optional[int] = ..., tier: _Optional[str] = ..., cleared: _Optional[bool] = ..., gone: _Optional[bool] = ..., stored: _Optional[bytes] = ..., stored_parents: _Optional[bytes] = ..., evicted: _Optional[bytes] = ...) -> None: ...

class HoldingsRequest(_message.Message):
    __slots__ = ("generation", "first_block")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    generation: str
    first_block: int
    def __init__(self, generation: _Optional[str] = ..., first_block: _Optional[int] = ...) -> None: ...

class CachePool(_message.Message):
    __slots__ = ("ref", "namespace", "block_size_tokens", "total", "free", "leased", "cached", "bytes", "bytes_max")
    REF_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    ref: PoolRef
    namespace: str
    block_size_tokens: int
    total: int
    free: int
    leased: int
    cached: int
    bytes: int
    bytes_max: int
    def __init__(self, ref: _Optional[_Union[PoolRef, _Mapping]] = ..., namespace: _Optional[str] = ..., block_size_tokens: _Optional[int] = ..., total: _Optional[int] = ..., free: _Optional[int] = ..., leased: _Optional[int] = ..., cached: _Optional[int] = ..., bytes: _Optional[int] = ..., bytes_max: _Optional[int] = ...) -> None: ...

class HoldingsReply(_message.Message):
    __slots__ = ("boot", "number", "pools", "generation", "tier", "contents", "parents", "references", "hits", "keeps", "unused_ms", "first_block", "next_block")
    BOOT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    CONTENTS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    REFERENCES_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    KEEPS_FIELD_NUMBER: _ClassVar[int]
    UNUSED_MS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NEXT_BLOCK_FIELD_NUMBER: _ClassVar[int]
    boot: str
    number: int
    pools: _containers.RepeatedCompositeFieldContainer[CachePool]
    generation: str
    tier: str
    contents: bytes
    parents: bytes
    references: bytes
    hits: bytes
    keeps: bytes
    unused_ms: bytes
    first_block: int
    next_block: int
    def __init__(self, boot: _Optional[str] = ..., number: _Optional[int] = ..., pools: _Optional[_Iterable[_Union[CachePool, _Mapping]]] = ..., generation: _Optional[str] = ..., tier: _Optional[str] = ..., contents: _Optional[bytes] = ..., parents: _Optional[bytes] = ..., references: _Optional[bytes] = ..., hits: _Optional[bytes] = ..., keeps: _Optional[bytes] = ..., unused_ms: _Optional[bytes] = ..., first_block: _Optional[int] = ..., next_block: _Optional[int] = ...) -> None: ...
