"""What an operator can set on a kvstore."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Config:
    rpc_address: str = "127.0.0.1:0"  # where to listen; port 0: any
    advertise_address: str = ""  # what the registry says; empty: the address listened on
    pools_max: int = 16  # above it the least recently used pool is dropped
    blocks_max: int = 1 << 20  # of one pool
    check_every_calls: int = 4096  # how often the ledger proves its sums; 0: never

    def __post_init__(self) -> None:
        assert 1 <= self.pools_max <= 1024, "pools_max: 1 to 1024"
        assert 1 <= self.blocks_max <= 1 << 24, "blocks_max: 1 to 16777216"
        assert self.check_every_calls >= 0, "check_every_calls: at least 0"
