"""What can be set of a gateway: section `[gateway]`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes in bytes are of UTF-8. Limits that a client meets are named in the error it gets."""

    grpc_address: str = "127.0.0.1:50051"  # empty: no gRPC server
    advertise_address: str = ""  # in the registry; empty: the address listened on
    # streams
    streams_len_max: int = 4096
    inbox_len_max: int = 65536
    calls_at_once_max: int = 64  # to the bus: reads, attaches, cancels
    publishes_at_once_max: int = 256
    publish_timeout_s: float = 2.0
    read_timeout_s: float = 2.0
    attach_answer_timeout_s: float = 1.0
    drain_wait_s: float = 20.0  # for open streams to end
    # what a client may ask for
    prompt_bytes_max: int = 512 * 1024
    inline_encode_bytes_max: int = 4 * 1024  # some milliseconds; longer texts are encoded beside the loop
    chat_turns_len_max: int = 1024
    timeout_s_max: int = 12 * 3600
    resume_window_s_max: int = 3600
    # models
    models_len_max: int = 64
    card_fetch_timeout_s: float = 10.0
    # gRPC
    message_bytes_max: int = 4 * 1024 * 1024
    streams_per_connection_max: int = 2048
    keepalive_interval_ms: int = 10_000
    keepalive_timeout_ms: int = 5_000
    tenant: str = ""  # of every caller, while there are no keys
