"""Who has called whom: connections of TCP between processes of this network, as the kernel lists them."""

import os
from collections.abc import Mapping
from pathlib import Path

ESTABLISHED, LISTENS = "01", "0A"


def calls(pids: Mapping[int, str]) -> set[tuple[str, str]]:
    """(who, whom) by the names of `pids`; who is not among them is left out."""
    owners = {inode: name for pid, name in pids.items() for inode in _sockets(pid)}
    doors: dict[str, str] = {}
    made: list[tuple[str, str, str]] = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            local, remote, state, *rest = line.split()[1:]
            owner = owners.get(rest[5])
            if owner is None:
                continue
            if state == LISTENS:
                doors[local.rpartition(":")[2]] = owner
            elif state == ESTABLISHED:
                made.append((owner, local.rpartition(":")[2], remote.rpartition(":")[2]))
    return {(who, doors[to]) for who, at, to in made if to in doors and at not in doors}


def _sockets(pid: int) -> list[str]:
    """Inodes."""
    found = []
    for handle in os.scandir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(handle.path)
        except FileNotFoundError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            found.append(target[len("socket:[") : -1])
    return found
