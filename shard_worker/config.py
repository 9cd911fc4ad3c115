"""What an operator can set on a shard worker."""

import re
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
    gpudirect: bool = True  # engine device: links over NIXL read and write its memory, if they can
    threads: int = 1  # of one forward pass
    measure_costs: bool = True  # of layers and head, once a machine: stages share layers by time
    context_len: int = 0  # longest sequence; 0: the model's own (of longrope's two: the original one)
    kv_memory_mb: int = 512
    weights_mb: int = 0  # memory for weights: no more layers are taken; 0: on CUDA 0.8 of it, else no bound
    num_blocks: int | None = None  # instead of kv_memory_mb and device_memory
    digest_cache_dir: str = ""  # empty: the user's cache folder
    # tensor parallel: the stage's layers are shared out between processes
    tensor_parallel: int = 1  # ranks; all of them are told the same
    ranks_listen: str = ""  # of the leader: host:port where the others join; empty: it starts them itself
    rank: int = 0  # this one; 0 leads
    leader: str = ""  # of the others: the leader's ranks_listen
    rank_silence_ms: int = 10_000  # then a rank is taken for lost, and the stage with it
    rank_join_ms: int = 60_000  # for all of them to be there
    verify_stamps: float = (
        1.0  # share of a step's rows whose blocks are proven to hold what they should; 0: none
    )
    verify_contents: float = 1 / 16  # share of full blocks with a checksum, compared when they are reused
    # the model (fake)
    fake_layers: int = 8
    fake_step_cost_us: float = 0.0
    fake_token_cost_us: float = 0.0
    fake_layer_cost_us: float = 0.0
    fake_layers_max: int = 0  # there is memory for; 0: for all
    # the stage
    preferred_stage: int | None = None  # none: any, a spare
    preferred_layers: str = ""  # FIRST:END, of the model; followed where the wishes of workers fit together
    same_model: bool = False  # end at once where others serve a model of this name that differs
    rpc_listen: str = "127.0.0.1:0"
    listen: str = "tcp://127.0.0.1:0"  # or unix:///path
    advertise_host: str = ""  # how others reach this host; empty: as it listens
    slots: int = 16  # frames in flight per link: enough for the steps that hide a long way
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
        assert self.weights_mb >= 0, "weights_mb: 0 or more"
        assert self.fake_layers_max >= 0, "fake_layers_max: 0 or more"
        assert self.kv_memory_mb >= 1, "kv_memory_mb: at least 1"
        assert 0 < self.device_memory <= 1, "device_memory: above 0, at most 1"
        assert self.num_blocks is None or self.num_blocks >= 1, "num_blocks: at least 1"
        assert 0 <= self.verify_stamps <= 1, "verify_stamps: 0 to 1"
        assert 0 <= self.verify_contents <= 1, "verify_contents: 0 to 1"
        self._check_ranks()
        assert self.fake_layers >= 1, "fake_layers: at least 1"
        assert self.preferred_stage is None or self.preferred_stage >= 0, "preferred_stage: 0 or more"
        assert self.preferred_layers == "" or self.wish, "preferred_layers: FIRST:END, as 0:15"

    @property
    def wish(self) -> range:
        """Layers; empty: any."""
        found = re.fullmatch(r"(\d{1,6}):(\d{1,6})", self.preferred_layers)
        return range(int(found[1]), int(found[2])) if found else range(0)

    def _check_ranks(self) -> None:
        ranks = self.tensor_parallel
        assert 1 <= ranks <= 64, "tensor_parallel: 1 to 64"
        assert ranks == 1 or self.executor != "fake", "tensor_parallel: the fake model has one rank"
        assert 0 <= self.rank < ranks, f"rank: 0 to {ranks - 1}, tensor_parallel is {ranks}"
        assert bool(self.leader) == bool(self.rank), "leader: every rank but 0 has one"
        for name, address in (("ranks_listen", self.ranks_listen), ("leader", self.leader)):
            port = address.rpartition(":")[2]
            fine = not address or (":" in address and port.isdecimal() and int(port) < 1 << 16)
            assert fine, f"{name}: host:port"
        assert self.rank_silence_ms >= 2_000, "rank_silence_ms: at least 2000"
        assert self.rank_join_ms >= 1_000, "rank_join_ms: at least 1000"
