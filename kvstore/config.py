"""What an operator can set on a kvstore."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Config:
    rpc_address: str = "127.0.0.1:0"  # where to listen; port 0: any
    advertise_address: str = ""  # what the registry says; empty: the address listened on
    name: str = ""  # by which pools are spread over kvstores: keep it over restarts; empty: the boot
    pools_max: int = 16  # above it the least recently used pool is dropped
    blocks_max: int = 1 << 20  # of one pool
    check_every_calls: int = 4096  # how often the ledger proves its sums; 0: never
    # contents of blocks below the workers' memory; off unless one of these is above 0
    host_bytes: int = 0  # in our own memory: the longest unused goes first
    disk_bytes: int = 0  # in `disk_dir`: the oldest written goes first; kept over restarts
    disk_dir: str = ""  # ours alone
    restore_min_tokens: int = 64  # fewer are computed again: see `bench/tiers.py`
    restore_wait_ms: int = 200  # a prompt's match waits no longer
    tier_call_timeout_ms: int = 5000  # then the link to the worker is given up

    def __post_init__(self) -> None:
        assert 1 <= self.pools_max <= 1024, "pools_max: 1 to 1024"
        assert 1 <= self.blocks_max <= 1 << 24, "blocks_max: 1 to 16777216"
        assert self.check_every_calls >= 0, "check_every_calls: at least 0"
        assert self.host_bytes >= 0, "host_bytes: at least 0"
        assert self.disk_bytes >= 0, "disk_bytes: at least 0"
        assert bool(self.disk_bytes) == bool(self.disk_dir), "disk_bytes and disk_dir: both or none"
        assert self.restore_min_tokens >= 1, "restore_min_tokens: at least 1"
        assert self.restore_wait_ms >= 1, "restore_wait_ms: at least 1"
        assert self.tier_call_timeout_ms >= 1, "tier_call_timeout_ms: at least 1"
