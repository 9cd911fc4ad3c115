"""Pure. Where the services of one machine listen: on one address that others reach, or on loopback.

What is dialled by others is told to the registry as it is listened on, so an address of this machine and not
of all its interfaces. Gateways are for clients: without keys and TLS they serve this machine only, unless the
operator says otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

LOOPBACK = "127.0.0.1"
NATS_PORT = 4222
_ANY = ("0.0.0.0", "::", "")
_FLAGS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "shard_worker": (("--listen", "tcp://{host}:{port}"), ("--rpc-listen", "{host}:{port}")),
    "batcher": (("--listen", "tcp://{host}:{port}"),),
    "kvstore": (("--rpc-address", "{host}:{port}"),),
}


def is_dialled(host: str) -> bool:
    """Whether others can be told this address."""
    return host not in _ANY


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


@dataclass(slots=True)
class Listening:
    """`host`: for other services; `first_port`: of what they listen on, one after another; 0: any."""

    host: str = LOOPBACK
    first_port: int = 0
    _given: dict[str, int] = field(default_factory=dict)  # a service's first, by name
    _taken: int = 0  # ports

    def flags(self, name: str, module: str) -> tuple[str, ...]:
        """Of a service, the same whenever it starts again."""
        wanted = _FLAGS.get(module, ())
        port = self._first_of(name, len(wanted))
        words: list[str] = []
        for index, (flag, address) in enumerate(wanted):
            own = port + index if port else 0
            words += [flag, address.format(host=bracketed(self.host), port=own)]
        return tuple(words)

    def _first_of(self, name: str, count: int) -> int:
        if not self.first_port:
            return 0
        if name not in self._given:
            self._given[name] = self.first_port + self._taken
            self._taken += count
        return self._given[name]
