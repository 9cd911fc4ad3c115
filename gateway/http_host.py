"""Pure. For whom a request over HTTP was meant, as its `Host` says.

Without keys whoever reaches the door may use it, so the door is this machine's alone. A browser on it reaches
the door for every page whose name is made to resolve to this machine; what such a page asks says that name.
"""

from collections.abc import Iterable
from ipaddress import ip_address


def is_here(host: str) -> bool:
    """Whether it names this machine by a name that nobody else can give to it."""
    name = host.lower()
    if not name.endswith("]"):
        before, colon, port = name.rpartition(":")
        if colon and port.isdecimal():
            name = before
    name = name.removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def stranger(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The name of another machine, if the request was meant for one; who names none at all is no browser."""
    for name, value in headers:
        if name == b"host" and value and not is_here(host := value.decode("latin-1")):
            return host[:100]
    return ""
