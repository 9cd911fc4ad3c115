"""What can be set of a gateway: section `[gateway]`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from chassis.api_keys import ApiKey


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes in bytes are of UTF-8. Limits that a client meets are named in the error it gets."""

    grpc_address: str = "127.0.0.1:50051"  # empty: no gRPC server
    advertise_address: str = ""  # in the registry; empty: the address listened on
    # streams
    streams_len_max: int = 4096
    wait_max_ms: int = 0  # for the first token, as far as it can be told: longer is refused; 0: all may wait
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
    grammar_timeout_s: float = (
        2.0  # to see whether a grammar can be followed; 0: beside nothing else, no limit
    )
    timeout_s_max: int = 12 * 3600
    default_priority: int = 5  # of a request that names none
    resume_window_s_max: int = 3600
    # models
    models_len_max: int = 64
    card_fetch_timeout_s: float = 10.0
    # jobs
    jobs_at_once_max: int = 256  # that run here; 0: this gateway takes none in
    jobs_priority_best: int = 9  # the highest that a job may ask for; 9: all are of the batch class
    jobs_model_wait_s: float = 300.0  # that a model may be missing before its jobs are told so
    # gRPC
    message_bytes_max: int = 4 * 1024 * 1024
    streams_per_connection_max: int = 2048
    keepalive_interval_ms: int = 10_000
    keepalive_timeout_ms: int = 5_000
    stream_requests_max: int = 256  # under way on one ModelStreamInfer
    sequence_idle_s: float = 60.0  # then a sequence of the Open Inference Protocol is forgotten
    # HTTP
    http_address: str = "127.0.0.1:8000"  # empty: no HTTP server
    http_body_bytes_max: int = 16 * 1024 * 1024
    http_body_timeout_s: float = 60.0
    http_head_bytes_max: int = 64 * 1024
    http_head_timeout_s: float = 10.0
    http_connections_max: int = 8192
    http_keepalive_s: int = 75  # of a connection that says nothing
    http_write_timeout_s: int = 30  # of a client that takes nothing
    # who may come in
    keys: Mapping[str, ApiKey] = field(default_factory=dict)  # by id
    keys_file: str = ""  # TOML or JSON, tables `keys.<id>`; looked at again when it changes
    operators: tuple[str, ...] = ()  # ids of keys that may load and unload models
    tenant: str = ""  # of every caller, while there are no keys
    insecure: bool = False  # without keys, listen elsewhere than on loopback too
    tls_certificate_file: str = ""  # PEM, of gRPC and HTTP both
    tls_key_file: str = ""
    tls_client_ca_file: str = ""  # signs the certificates that clients must show; empty: none asked for

    def __post_init__(self) -> None:
        assert 0 <= self.default_priority <= 9, "default_priority: 0 to 9"
        assert 0 <= self.jobs_priority_best <= 9, "jobs_priority_best: 0 to 9"
        assert self.jobs_at_once_max >= 0, "jobs_at_once_max: at least 0"
        assert self.wait_max_ms >= 0, "wait_max_ms: at least 0"
        for name in ("grpc_address", "http_address"):
            address = getattr(self, name)
            assert self.keyed or self.tls_client_ca_file or self.insecure or is_local(address), (
                f"{name}: {address} is not of this machine alone: without keys anybody could use it; "
                "set keys_file (`shoal keys add`), or insecure = true"
            )

        assert bool(self.tls_certificate_file) == bool(self.tls_key_file), (
            "tls_certificate_file, tls_key_file: both or none"
        )
        assert self.tls_key_file or not self.tls_client_ca_file, "tls_client_ca_file: without a certificate"

    @property
    def keyed(self) -> bool:
        """API keys are asked for."""
        return bool(self.keys or self.keys_file)

    @property
    def http_is_private(self) -> bool:
        """Nobody shows who he is, and nobody elsewhere is meant to come."""
        return not (self.keyed or self.tls_client_ca_file or self.insecure)


def is_local(address: str) -> bool:
    """Whether only this machine can reach it; an empty one is nowhere."""
    host = address.rpartition(":")[0].strip("[]")
    return not address or address.startswith("unix:") or host in ("localhost", "::1") or _loopback(host)


def _loopback(host: str) -> bool:
    parts = host.split(".")
    return len(parts) == 4 and parts[0] == "127" and all(part.isdecimal() for part in parts)
