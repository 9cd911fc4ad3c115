"""What an operator can set on a shard worker."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Config:
    executor: Literal["torch", "fake"] = "torch"
    # the model (torch)
    model: str = "smollm2"  # a folder, a GGUF file, a packaged model, or name[:version] in the repository
    model_name: str = ""  # what users call it; empty: after the path
    repository: str = ""  # folder of models with versions; empty: in the user's data folder
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # float16: on CUDA
    quantize: Literal["none", "keep", "int8", "int4"] = "none"  # keep: as packed in the file; none: expanded
    # in products with packed weights, compiled: twice as fast, less exact; none: with int8 and int4
    int8_activations: bool | None = None
    # auto: compiled code where it runs the model; transformers: that library's own code; device: what CUDA
    # runs, on the processor too
    engine: Literal["auto", "native", "torch", "transformers", "device"] = "auto"
    device: str = "cpu"  # or cuda, cuda:N, or auto: CUDA where there is some
    device_memory: float = 0.85  # CUDA: share for KV blocks of what is free beside the weights
    threads: int = 1  # of one forward pass
    measure_costs: bool = True  # of layers and head, once a machine: stages share layers by time
    context_len: int = 0  # longest sequence; 0: the model's own (of longrope's two: the original one)
    kv_memory_mb: int = 512
    num_blocks: int | None = None  # instead of kv_memory_mb and device_memory
    digest_cache_dir: str = ""  # empty: the user's cache folder
    # the model (fake)
    fake_layers: int = 8
    fake_step_cost_us: float = 0.0
    fake_token_cost_us: float = 0.0
    # the stage
    preferred_stage: int | None = None  # none: any, a spare
    rpc_listen: str = "127.0.0.1:0"
    listen: str = "tcp://127.0.0.1:0"  # or unix:///path
    advertise_host: str = ""  # how others reach this host; empty: as it listens
    slots: int = 4  # frames in flight per link
    slot_mb: int = 64  # largest activations of one step
    send_timeout_ms: int = 5_000
    dial_timeout_ms: int = 2_000
    free_after_ms: int = 200  # without the batcher's link
    device_wait_ms: int = 5_000  # for the device to finish before it is given new layers; then Form fails
    links_max: int = 16
    drain_wait_ms: int = 10_000  # for the batcher to let go

    def __post_init__(self) -> None:
        assert 1 <= self.slots <= 64, "slots: 1 to 64"
        assert 1 <= self.slot_mb <= 4096, "slot_mb: 1 to 4096"
        assert 4 <= self.links_max <= 256, "links_max: 4 to 256"
        assert self.threads >= 1, "threads: at least 1"
        assert self.context_len == 0 or self.context_len >= 2, "context_len: 0, or 2 or more"
        assert self.kv_memory_mb >= 1, "kv_memory_mb: at least 1"
        assert 0 < self.device_memory <= 1, "device_memory: above 0, at most 1"
        assert self.num_blocks is None or self.num_blocks >= 1, "num_blocks: at least 1"
        assert self.fake_layers >= 1, "fake_layers: at least 1"
        assert self.preferred_stage is None or self.preferred_stage >= 0, "preferred_stage: 0 or more"
