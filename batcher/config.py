"""What an operator can set on a batcher. Limits stand on everything that can grow."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Config:
    model: str = ""  # name of the model to serve; empty: the first one registered
    num_stages: int = 2
    listen: str = "tcp://127.0.0.1:0"  # where the last stage returns tokens
    # scheduling
    waiting_len_max: int = 1024
    running_len_max: int = 64
    step_tokens_max: int = 512
    steps_in_flight: int = 0  # 0: as many as there are stages, two or three for one stage
    run_ahead: bool = True  # with one stage: the next step is sent before the last one's tokens are known
    block_size_tokens: int = 16
    # time
    step_timeout_ms: int = 5_000
    reform_timeout_ms: int = 15_000
    form_timeout_ms: int = 60_000
    jitter_ms: int = 100
    # bus
    fetch_len_max: int = 32
    fetch_wait_ms: int = 1_000
    overtakes_max: int = 16  # requests fetched past one of the next lower priority that waits in the stream
    bus_timeout_ms: int = 2_000
    kvstore_timeout_ms: int = 1_000
    inbox_len_max: int = 65_536
    drain_timeout_ms: int = 10_000
    # measuring
    record_steps: str = ""  # a file for the headers of all steps sent; empty: none

    def __post_init__(self) -> None:
        assert 1 <= self.num_stages <= 64, "num_stages: 1 to 64"
        assert 1 <= self.running_len_max <= 4096, "running_len_max: 1 to 4096"
        assert 1 <= self.step_tokens_max <= 65_536, "step_tokens_max: 1 to 65536"
        assert 1 <= self.block_size_tokens <= 256, "block_size_tokens: 1 to 256"
        assert self.overtakes_max >= 1, "overtakes_max: at least 1"
        assert self.waiting_len_max >= 1, "waiting_len_max: at least 1"
