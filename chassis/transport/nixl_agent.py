"""The only file that knows NIXL's library: one agent, its registered memory, writes, notifications.

One agent a link, under a name that is never used again: what an old link left behind can't be taken for a
new one's. UCX is held to one family of lanes (`Lanes`), so that which of them carries a link is known rather
than guessed, and it can't fall back in silence. An agent is called by one thread at a time.
"""

import ctypes
import importlib.util
import logging
import mmap
import os
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from chassis import log
from chassis.transport.nixl_wire import Place
from chassis.transport.registered import Memory, MemoryRange

EXTRA = "rdma"
_DEVICES = Path("/sys/class/infiniband")


class Lanes(Enum):
    """What UCX may use. The values are its own words."""

    RDMA = "^tcp"  # InfiniBand, RoCE or EFA: shared memory can't handle errors, so nothing else is left
    TCP = "tcp"
    SHM = "shm"  # POSIX and System V shared memory, and copies from process to process

    @property
    def kind(self) -> str:
        return f"nixl+{self.name.lower()}"

    @property
    def errors(self) -> str:
        """Who notices that the peer is gone: UCX, or only our TCP connection."""
        return "none" if self is Lanes.SHM else "peer"


KINDS = {lanes.kind: lanes for lanes in Lanes}


class AgentError(Exception):
    """NIXL refused, or the peer is gone."""


class Region:
    """Page-aligned memory of the host; it is committed as it is first touched."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.device: int | None = None
        mapped = mmap.mmap(-1, capacity)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self.view = memoryview(mapped)


class Agent(Protocol):
    """What a link needs of NIXL; raises AgentError."""

    def register(self, regions: Iterable[Memory]) -> None: ...

    def metadata(self) -> bytes:
        """What a peer needs to connect and to write into what is registered by now."""

    def metadata_of(self, region: Memory) -> bytes:
        """What it needs besides, for one region registered later."""

    def connect(self, metadata: bytes) -> None:
        """To the one peer; again when its registered memory has changed."""

    def write(self, source: MemoryRange, place: Place, note: bytes) -> object:
        """Begins a one-sided write into `place`; `note` follows it. Returns its handle."""

    def done(self, handle: object) -> bool: ...

    def release(self, handle: object) -> None: ...

    def notify(self, note: bytes) -> None: ...

    def notifications(self) -> list[bytes]:
        """Those that came since; makes everything under way go on."""

    def close(self) -> None:
        """Nothing of ours is written after it, and nothing registered can be reached through it."""


def installed() -> bool:
    return importlib.util.find_spec("nixl_cu12") is not None


def rdma_devices() -> list[str]:
    """Of this host, by the kernel's names: mlx5_0, rocep1s0, ..."""
    try:
        return sorted(path.name for path in _DEVICES.iterdir())
    except OSError:
        return []


def why_not(lanes: Lanes) -> str | None:
    """Why this process can't offer such links; None: it can."""
    if not installed():
        return f"NIXL is not installed: pip install 'shoal[{EXTRA}]'"
    if lanes is Lanes.RDMA and not rdma_devices():
        return f"this host has no RDMA device ({_DEVICES} is empty)"
    return None


def load() -> tuple[Any, Any]:
    """The library's agent and its configuration; half a second the first time. Raises ImportError."""
    from nixl_cu12 import nixl_agent, nixl_agent_config

    logging.getLogger("nixl").setLevel(logging.WARNING)
    return nixl_agent, nixl_agent_config


def warm(lanes: Lanes) -> None:
    """Makes an agent and lets it go: the first of a process takes half a second, the next some 40 ms."""
    try:
        NixlAgent(f"warm-{os.getpid()}", lanes).close()
    except AgentError as error:
        log.debug("no agent", error=str(error))


class NixlAgent:
    """`Agent` over NIXL's UCX backend. The library's exceptions have no base but Exception."""

    def __init__(self, name: str, lanes: Lanes) -> None:
        """Raises AgentError."""
        _take_ucx_tls()
        try:
            nixl_agent, nixl_agent_config = load()
        except ImportError as error:
            raise AgentError(f"NIXL does not load: {error}; pip install 'shoal[{EXTRA}]'") from None
        self.name = name
        self._registered: dict[int, Any] = {}  # by address
        self._peer = ""
        try:
            self._agent: Any = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[]))
            self._agent.create_backend(
                "UCX", {"engine_config": f"TLS={lanes.value}", "ucx_error_handling_mode": lanes.errors}
            )
        except Exception as error:
            raise AgentError(f"no agent with {lanes.kind}: {error}") from None

    def register(self, regions: Iterable[Memory]) -> None:
        for region in regions:
            described = [(region.address, region.capacity, region.device or 0, "")]
            try:
                self._registered[region.address] = self._agent.register_memory(
                    described, _kind_of(region.device)
                )
            except Exception as error:
                raise AgentError(f"{region.capacity} bytes not registered: {error}") from None

    def metadata(self) -> bytes:
        try:
            return bytes(self._agent.get_agent_metadata())
        except Exception as error:
            raise AgentError(f"no metadata: {error}") from None

    def metadata_of(self, region: Memory) -> bytes:
        try:
            return bytes(self._agent.get_partial_agent_metadata(self._registered[region.address]))
        except Exception as error:
            raise AgentError(f"no metadata: {error}") from None

    def connect(self, metadata: bytes) -> None:
        try:
            name = self._agent.add_remote_agent(metadata)
            peer = name.decode() if isinstance(name, bytes) else str(name)
            if not self._peer:
                self._agent.make_connection(peer)
        except Exception as error:
            raise AgentError(f"not connected: {error}") from None
        self._peer = peer

    def write(self, source: MemoryRange, place: Place, note: bytes) -> object:
        agent, size, ours = self._agent, source.nbytes, source.memory.device
        try:
            local = agent.get_xfer_descs([(source.address, size, ours or 0)], _kind_of(ours))
            remote = agent.get_xfer_descs([(place.address, size, place.device or 0)], _kind_of(place.device))
            handle = agent.initialize_xfer("WRITE", local, remote, self._peer, note)
            state = agent.transfer(handle)
        except Exception as error:
            raise AgentError(f"not written: {error}") from None
        if state == "ERR":
            raise AgentError("the write failed")
        return handle

    def done(self, handle: object) -> bool:
        try:
            state = self._agent.check_xfer_state(handle)
        except Exception as error:
            raise AgentError(f"the write failed: {error}") from None
        if state == "ERR":
            raise AgentError("the write failed")
        return bool(state == "DONE")

    def release(self, handle: object) -> None:
        try:
            self._agent.release_xfer_handle(handle)
        except Exception as error:
            raise AgentError(f"not released: {error}") from None

    def notify(self, note: bytes) -> None:
        try:
            self._agent.send_notif(self._peer, note)
        except Exception as error:
            raise AgentError(f"not notified: {error}") from None

    def notifications(self) -> list[bytes]:
        try:
            by_agent = self._agent.get_new_notifs()
        except Exception as error:
            raise AgentError(f"no notifications: {error}") from None
        return [note for notes in by_agent.values() for note in notes]

    def close(self) -> None:
        agent, self._agent = self._agent, None
        try:
            if self._peer:
                agent.remove_remote_agent(self._peer)
            for described in self._registered.values():
                agent.deregister_memory(described)
        except Exception as error:
            log.debug("agent not let go in order", error=str(error))
        self._registered.clear()


def _kind_of(device: int | None) -> str:
    """NIXL's word for it."""
    return "DRAM" if device is None else "VRAM"


def _take_ucx_tls() -> None:
    """UCX would follow this variable rather than us, and be free to fall back."""
    named = os.environ.pop("UCX_TLS", None)
    if named is not None:
        log.warning("UCX_TLS is not followed: chassis.links says which lanes links take", UCX_TLS=named)
