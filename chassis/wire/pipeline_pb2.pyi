from chassis.wire import request_pb2 as _request_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Step(_message.Message):
    __slots__ = ("epoch", "step", "trace_parent", "slots", "num_tokens", "starts", "flags", "output_index", "token_ids", "table_lens", "table", "fresh", "freed_slots", "timings", "prompt_asks", "stamps", "block_copies", "attachment")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TRACE_PARENT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TABLE_LENS_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    FREED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ASKS_FIELD_NUMBER: _ClassVar[int]
    STAMPS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COPIES_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    trace_parent: bytes
    slots: bytes
    num_tokens: bytes
    starts: bytes
    flags: bytes
    output_index: bytes
    token_ids: bytes
    table_lens: bytes
    table: bytes
    fresh: _containers.RepeatedCompositeFieldContainer[SlotStart]
    freed_slots: bytes
    timings: _containers.RepeatedCompositeFieldContainer[StageTiming]
    prompt_asks: _containers.RepeatedCompositeFieldContainer[PromptAsk]
    stamps: StepStamps
    block_copies: bytes
    attachment: int
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., trace_parent: _Optional[bytes] = ..., slots: _Optional[bytes] = ..., num_tokens: _Optional[bytes] = ..., starts: _Optional[bytes] = ..., flags: _Optional[bytes] = ..., output_index: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., table_lens: _Optional[bytes] = ..., table: _Optional[bytes] = ..., fresh: _Optional[_Iterable[_Union[SlotStart, _Mapping]]] = ..., freed_slots: _Optional[bytes] = ..., timings: _Optional[_Iterable[_Union[StageTiming, _Mapping]]] = ..., prompt_asks: _Optional[_Iterable[_Union[PromptAsk, _Mapping]]] = ..., stamps: _Optional[_Union[StepStamps, _Mapping]] = ..., block_copies: _Optional[bytes] = ..., attachment: _Optional[int] = ...) -> None: ...

class StepStamps(_message.Message):
    __slots__ = ("digests", "void_rows")
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    VOID_ROWS_FIELD_NUMBER: _ClassVar[int]
    digests: bytes
    void_rows: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, digests: _Optional[bytes] = ..., void_rows: _Optional[_Iterable[int]] = ...) -> None: ...

class PromptAsk(_message.Message):
    __slots__ = ("row", "first", "num_tokens", "next_id", "top")
    ROW_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NEXT_ID_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    row: int
    first: int
    num_tokens: int
    next_id: int
    top: int
    def __init__(self, row: _Optional[int] = ..., first: _Optional[int] = ..., num_tokens: _Optional[int] = ..., next_id: _Optional[int] = ..., top: _Optional[int] = ...) -> None: ...

class SlotStart(_message.Message):
    __slots__ = ("sampling", "seed", "prompt_len", "before", "min_tokens", "stop_ids")
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_IDS_FIELD_NUMBER: _ClassVar[int]
    sampling: _request_pb2.Sampling
    seed: int
    prompt_len: int
    before: bytes
    min_tokens: int
    stop_ids: bytes
    def __init__(self, sampling: _Optional[_Union[_request_pb2.Sampling, _Mapping]] = ..., seed: _Optional[int] = ..., prompt_len: _Optional[int] = ..., before: _Optional[bytes] = ..., min_tokens: _Optional[int] = ..., stop_ids: _Optional[bytes] = ...) -> None: ...

class StageTiming(_message.Message):
    __slots__ = ("stage", "received_ns", "wait_ns", "compute_ns", "send_ns")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_NS_FIELD_NUMBER: _ClassVar[int]
    WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_NS_FIELD_NUMBER: _ClassVar[int]
    SEND_NS_FIELD_NUMBER: _ClassVar[int]
    stage: int
    received_ns: int
    wait_ns: int
    compute_ns: int
    send_ns: int
    def __init__(self, stage: _Optional[int] = ..., received_ns: _Optional[int] = ..., wait_ns: _Optional[int] = ..., compute_ns: _Optional[int] = ..., send_ns: _Optional[int] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("epoch", "step", "token_ids", "timings", "logprob_places", "logprobs", "prompts", "nan_places", "void_rows", "waiting_places", "refusals")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_PLACES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    NAN_PLACES_FIELD_NUMBER: _ClassVar[int]
    VOID_ROWS_FIELD_NUMBER: _ClassVar[int]
    WAITING_PLACES_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    token_ids: bytes
    timings: _containers.RepeatedCompositeFieldContainer[StageTiming]
    logprob_places: bytes
    logprobs: _request_pb2.Logprobs
    prompts: _containers.RepeatedCompositeFieldContainer[PromptAnswer]
    nan_places: bytes
    void_rows: bytes
    waiting_places: bytes
    refusals: _containers.RepeatedCompositeFieldContainer[Refusal]
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., timings: _Optional[_Iterable[_Union[StageTiming, _Mapping]]] = ..., logprob_places: _Optional[bytes] = ..., logprobs: _Optional[_Union[_request_pb2.Logprobs, _Mapping]] = ..., prompts: _Optional[_Iterable[_Union[PromptAnswer, _Mapping]]] = ..., nan_places: _Optional[bytes] = ..., void_rows: _Optional[bytes] = ..., waiting_places: _Optional[bytes] = ..., refusals: _Optional[_Iterable[_Union[Refusal, _Mapping]]] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("place", "why")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    place: int
    why: str
    def __init__(self, place: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class PromptAnswer(_message.Message):
    __slots__ = ("row", "first_index", "logprobs")
    ROW_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    row: int
    first_index: int
    logprobs: _request_pb2.Logprobs
    def __init__(self, row: _Optional[int] = ..., first_index: _Optional[int] = ..., logprobs: _Optional[_Union[_request_pb2.Logprobs, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("epoch", "stage", "boot", "kind")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    stage: int
    boot: str
    kind: str
    def __init__(self, epoch: _Optional[int] = ..., stage: _Optional[int] = ..., boot: _Optional[str] = ..., kind: _Optional[str] = ...) -> None: ...

class FormRequest(_message.Message):
    __slots__ = ("epoch", "batcher_boot", "model_digest", "stage", "num_stages", "first_layer", "end_layer", "next_address", "block_size_tokens", "slots_max", "step_tokens_max", "next_more_addresses")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BATCHER_BOOT_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_STAGES_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    END_LAYER_FIELD_NUMBER: _ClassVar[int]
    NEXT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_MAX_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    NEXT_MORE_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    batcher_boot: str
    model_digest: str
    stage: int
    num_stages: int
    first_layer: int
    end_layer: int
    next_address: str
    block_size_tokens: int
    slots_max: int
    step_tokens_max: int
    next_more_addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, epoch: _Optional[int] = ..., batcher_boot: _Optional[str] = ..., model_digest: _Optional[str] = ..., stage: _Optional[int] = ..., num_stages: _Optional[int] = ..., first_layer: _Optional[int] = ..., end_layer: _Optional[int] = ..., next_address: _Optional[str] = ..., block_size_tokens: _Optional[int] = ..., slots_max: _Optional[int] = ..., step_tokens_max: _Optional[int] = ..., next_more_addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class FormReply(_message.Message):
    __slots__ = ("formed", "refusal", "last_epoch", "kv_stamp", "num_blocks", "error", "prior_epoch", "prior_attachment")
    FORMED_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    LAST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    KV_STAMP_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PRIOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PRIOR_ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    formed: bool
    refusal: str
    last_epoch: int
    kv_stamp: str
    num_blocks: int
    error: str
    prior_epoch: int
    prior_attachment: int
    def __init__(self, formed: _Optional[bool] = ..., refusal: _Optional[str] = ..., last_epoch: _Optional[int] = ..., kv_stamp: _Optional[str] = ..., num_blocks: _Optional[int] = ..., error: _Optional[str] = ..., prior_epoch: _Optional[int] = ..., prior_attachment: _Optional[int] = ...) -> None: ...

class WorkerEntry(_message.Message):
    __slots__ = ("boot", "model", "model_digest", "rpc_address", "transport_address", "last_epoch", "free", "preferred_stage", "num_layers", "head_cost_layers", "loaded_first", "loaded_end", "wish_first", "wish_end", "more_addresses", "layer_us", "layers_max", "head_layers", "ends_layers")
    BOOT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    RPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LAST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    PREFERRED_STAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    HEAD_COST_LAYERS_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIRST_FIELD_NUMBER: _ClassVar[int]
    LOADED_END_FIELD_NUMBER: _ClassVar[int]
    WISH_FIRST_FIELD_NUMBER: _ClassVar[int]
    WISH_END_FIELD_NUMBER: _ClassVar[int]
    MORE_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    LAYER_US_FIELD_NUMBER: _ClassVar[int]
    LAYERS_MAX_FIELD_NUMBER: _ClassVar[int]
    HEAD_LAYERS_FIELD_NUMBER: _ClassVar[int]
    ENDS_LAYERS_FIELD_NUMBER: _ClassVar[int]
    boot: str
    model: str
    model_digest: str
    rpc_address: str
    transport_address: str
    last_epoch: int
    free: bool
    preferred_stage: int
    num_layers: int
    head_cost_layers: float
    loaded_first: int
    loaded_end: int
    wish_first: int
    wish_end: int
    more_addresses: _containers.RepeatedScalarFieldContainer[str]
    layer_us: float
    layers_max: int
    head_layers: float
    ends_layers: float
    def __init__(self, boot: _Optional[str] = ..., model: _Optional[str] = ..., model_digest: _Optional[str] = ..., rpc_address: _Optional[str] = ..., transport_address: _Optional[str] = ..., last_epoch: _Optional[int] = ..., free: _Optional[bool] = ..., preferred_stage: _Optional[int] = ..., num_layers: _Optional[int] = ..., head_cost_layers: _Optional[float] = ..., loaded_first: _Optional[int] = ..., loaded_end: _Optional[int] = ..., wish_first: _Optional[int] = ..., wish_end: _Optional[int] = ..., more_addresses: _Optional[_Iterable[str]] = ..., layer_us: _Optional[float] = ..., layers_max: _Optional[int] = ..., head_layers: _Optional[float] = ..., ends_layers: _Optional[float] = ...) -> None: ...

class BatcherEntry(_message.Message):
    __slots__ = ("boot", "model", "epoch", "standing", "pool_generation", "running", "waiting")
    BOOT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    POOL_GENERATION_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    boot: str
    model: str
    epoch: int
    standing: bool
    pool_generation: str
    running: int
    waiting: int
    def __init__(self, boot: _Optional[str] = ..., model: _Optional[str] = ..., epoch: _Optional[int] = ..., standing: _Optional[bool] = ..., pool_generation: _Optional[str] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ...) -> None: ...

class PipelineLoad(_message.Message):
    __slots__ = ("boot", "pool_generation", "accepting", "wait_us", "places", "place_us", "prompt_token_ns", "output_token_us", "running", "waiting", "pending_tokens", "oldest_wait_us", "work_us", "work_tokens")
    BOOT_FIELD_NUMBER: _ClassVar[int]
    POOL_GENERATION_FIELD_NUMBER: _ClassVar[int]
    ACCEPTING_FIELD_NUMBER: _ClassVar[int]
    WAIT_US_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    PLACE_US_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_NS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_US_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PENDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_WAIT_US_FIELD_NUMBER: _ClassVar[int]
    WORK_US_FIELD_NUMBER: _ClassVar[int]
    WORK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    boot: str
    pool_generation: str
    accepting: bool
    wait_us: int
    places: int
    place_us: int
    prompt_token_ns: int
    output_token_us: int
    running: int
    waiting: int
    pending_tokens: int
    oldest_wait_us: int
    work_us: int
    work_tokens: int
    def __init__(self, boot: _Optional[str] = ..., pool_generation: _Optional[str] = ..., accepting: _Optional[bool] = ..., wait_us: _Optional[int] = ..., places: _Optional[int] = ..., place_us: _Optional[int] = ..., prompt_token_ns: _Optional[int] = ..., output_token_us: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., pending_tokens: _Optional[int] = ..., oldest_wait_us: _Optional[int] = ..., work_us: _Optional[int] = ..., work_tokens: _Optional[int] = ...) -> None: ...

class KvstoreEntry(_message.Message):
    __slots__ = ("boot", "rpc_address", "name")
    BOOT_FIELD_NUMBER: _ClassVar[int]
    RPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    boot: str
    rpc_address: str
    name: str
    def __init__(self, boot: _Optional[str] = ..., rpc_address: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class GatewayEntry(_message.Message):
    __slots__ = ("boot", "grpc_address")
    BOOT_FIELD_NUMBER: _ClassVar[int]
    GRPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    boot: str
    grpc_address: str
    def __init__(self, boot: _Optional[str] = ..., grpc_address: _Optional[str] = ...) -> None: ...

class ModelEntry(_message.Message):
    __slots__ = ("name", "digest", "card_digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CARD_DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    card_digest: str
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., card_digest: _Optional[str] = ...) -> None: ...

class EpochEntry(_message.Message):
    __slots__ = ("epoch", "batcher_boot")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BATCHER_BOOT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    batcher_boot: str
    def __init__(self, epoch: _Optional[int] = ..., batcher_boot: _Optional[str] = ...) -> None: ...

class ModelCard(_message.Message):
    __slots__ = ("name", "model_digest", "config_json", "vocab_size", "num_layers", "context_len_max", "eos_ids", "tokenizer_json", "chat_template", "bos_token", "eos_token", "token_bytes", "token_bytes_end", "strip_leading_space", "add_bos")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LEN_MAX_FIELD_NUMBER: _ClassVar[int]
    EOS_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_JSON_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    BOS_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_END_FIELD_NUMBER: _ClassVar[int]
    STRIP_LEADING_SPACE_FIELD_NUMBER: _ClassVar[int]
    ADD_BOS_FIELD_NUMBER: _ClassVar[int]
    name: str
    model_digest: str
    config_json: str
    vocab_size: int
    num_layers: int
    context_len_max: int
    eos_ids: _containers.RepeatedScalarFieldContainer[int]
    tokenizer_json: bytes
    chat_template: str
    bos_token: str
    eos_token: str
    token_bytes: bytes
    token_bytes_end: bytes
    strip_leading_space: bool
    add_bos: bool
    def __init__(self, name: _Optional[str] = ..., model_digest: _Optional[str] = ..., config_json: _Optional[str] = ..., vocab_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., context_len_max: _Optional[int] = ..., eos_ids: _Optional[_Iterable[int]] = ..., tokenizer_json: _Optional[bytes] = ..., chat_template: _Optional[str] = ..., bos_token: _Optional[str] = ..., eos_token: _Optional[str] = ..., token_bytes: _Optional[bytes] = ..., token_bytes_end: _Optional[bytes] = ..., strip_leading_space: _Optional[bool] = ..., add_bos: _Optional[bool] = ...) -> None: ...
