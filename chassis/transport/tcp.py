"""The transport over TCP and unix sockets, on plain asyncio or uvloop: who listens, who dials.

Strangers are many and clumsy: a connection that does not greet in time, greets wrongly or comes when too
many have not greeted yet is dropped, and nothing else happens.
"""

import asyncio
import contextlib
import os
import socket

from chassis.errors import LinkClosed
from chassis.transport.interface import Accept, Link, LinkOptions
from chassis.transport.socket_link import SocketLink

TCP_SCHEME = "tcp://"
UNIX_SCHEME = "unix://"
UNIX_ABSTRACT = "unix://@"  # a name of the network namespace (Linux), not a file
_UNGREETED_MAX = 64  # connections that have not said hello


class _Listener:
    """Accepts connections; those that do not greet in time, or are too many, are dropped."""

    def __init__(self, kind: str, accept: Accept, options: LinkOptions) -> None:
        self._kind = kind
        self._accept = accept
        self._options = options
        self._ungreeted: dict[SocketLink, asyncio.TimerHandle] = {}
        self._links: dict[SocketLink, None] = {}

    def connection(self) -> SocketLink:
        link = SocketLink(self._kind, True, self._options, b"", self._told)
        if len(self._ungreeted) >= _UNGREETED_MAX:
            link.close("too many strangers")
        else:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(self._options.send_timeout_s, link.close, "no hello in time")
            self._ungreeted[link] = timer
        return link

    def _told(self, link: SocketLink, standing: bool) -> None:
        timer = self._ungreeted.pop(link, None)
        if timer is not None:
            timer.cancel()
        if standing:
            self._links[link] = None
            self._accept(link)
        else:
            self._links.pop(link, None)

    def close(self) -> None:
        for link in [*self._ungreeted, *self._links]:
            link.close("transport closed")


class SocketTransport:
    """`Transport` over `tcp://host:port`, `unix:///path` and `unix://@name`; plain asyncio or uvloop."""

    def __init__(self) -> None:
        self._servers: list[tuple[asyncio.Server, _Listener, str | None]] = []
        self._dialled: dict[SocketLink, None] = {}
        self._closed = False

    async def listen(self, address: str, accept: Accept, options: LinkOptions) -> str:
        """Raises OSError when the address is taken, ValueError when it is none."""
        loop = asyncio.get_running_loop()
        kind, path, host, port = _split(address)
        listener = _Listener(kind, accept, options)
        if kind == "unix":
            if path.startswith("\0"):
                sock = socket.socket(socket.AF_UNIX)
                sock.bind(path)
                unix_server = await loop.create_unix_server(listener.connection, sock=sock)
            else:
                unix_server = await loop.create_unix_server(listener.connection, path)
            self._servers.append((unix_server, listener, path))
            return address
        server = await loop.create_server(listener.connection, host, port)
        self._servers.append((server, listener, None))
        return f"{TCP_SCHEME}{_bracket(host)}:{server.sockets[0].getsockname()[1]}"

    async def dial(self, address: str, hello: bytes, options: LinkOptions, timeout_s: float = 2.0) -> Link:
        if self._closed:
            raise LinkClosed("transport is closed")
        loop = asyncio.get_running_loop()
        kind, path, host, port = _split(address)
        welcome = loop.create_future()

        def told(link: SocketLink, standing: bool) -> None:
            if not standing:
                self._dialled.pop(link, None)
            if not welcome.done():
                welcome.set_result(standing)

        link = SocketLink(kind, False, options, hello, told)
        self._dialled[link] = None
        try:
            async with asyncio.timeout(timeout_s):
                if kind == "unix":
                    await _connect_unix(link, path)
                else:
                    await loop.create_connection(lambda: link, host, port)
                link.say_hello()
                standing = await welcome
        except (OSError, TimeoutError) as error:
            self._give_up(link)
            raise LinkClosed(f"{address}: {str(error) or 'no answer in time'}") from None
        except asyncio.CancelledError:
            self._give_up(link)
            raise
        if not standing or link.closed:
            self._give_up(link)
            raise LinkClosed(f"{address}: closed while greeting")
        return link

    def _give_up(self, link: SocketLink) -> None:
        link.close("dial failed")
        self._dialled.pop(link, None)

    async def close(self) -> None:
        self._closed = True
        for server, listener, path in self._servers:
            server.close()
            listener.close()
            if path is not None and not path.startswith("\0"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
        for link in list(self._dialled):
            link.close("transport closed")
        for server, _, _ in self._servers:
            await server.wait_closed()
        self._servers.clear()


def _split(address: str) -> tuple[str, str, str, int]:
    """(kind, path, host, port)."""
    if address.startswith(UNIX_SCHEME):
        path = address.removeprefix(UNIX_SCHEME)
        return "unix", "\0" + path[1:] if path.startswith("@") else path, "", 0
    host, colon, port = address.removeprefix(TCP_SCHEME).rpartition(":")
    if not address.startswith(TCP_SCHEME) or not colon or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"address {address!r} is neither tcp://host:port nor unix:///path or unix://@name")
    return "tcp", "", host.strip("[]"), int(port)


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host


async def _connect_unix(link: SocketLink, path: str) -> None:
    """uvloop takes a path for a C string, which ends where an abstract name begins: so it gets the socket."""
    loop = asyncio.get_running_loop()
    if not path.startswith("\0"):
        await loop.create_unix_connection(lambda: link, path)
        return
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, path)
        await loop.create_unix_connection(lambda: link, sock=sock)
    except BaseException:
        sock.close()
        raise
