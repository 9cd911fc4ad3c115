"""Pure. The kinds of links, and which of them an operator lets services offer and take: `[chassis.links]`."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["unix", "nixl+rdma", "nixl+shm", "nixl+tcp", "tcp"]
KNOWN: tuple[Kind, ...] = ("unix", "nixl+rdma", "nixl+shm", "nixl+tcp", "tcp")
BY_NAME_ONLY = frozenset({"nixl+shm", "nixl+tcp"})  # slower than sockets: for tests and measuring
REQUIRED: dict[str, frozenset[str]] = {"rdma": frozenset({"unix", "nixl+rdma"})}


@dataclass(frozen=True, slots=True)
class Links:
    """`require`: "rdma" has links that leave the host take RDMA, or nothing."""

    kinds: tuple[Kind, ...] = ("unix", "nixl+rdma", "tcp")  # the best first
    require: Literal["", "rdma"] = ""

    def __post_init__(self) -> None:
        assert self.kinds, "links.kinds: at least one"
        assert len(set(self.kinds)) == len(self.kinds), "links.kinds: each once"
        if self.require == "rdma":
            assert "nixl+rdma" in self.kinds, 'links.kinds: without "nixl+rdma", but links.require = "rdma"'

    @property
    def allowed(self) -> tuple[Kind, ...]:
        """Those that `require` leaves."""
        required = REQUIRED.get(self.require)
        return tuple(kind for kind in self.kinds if required is None or kind in required)
