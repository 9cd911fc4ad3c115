"""Links over NIXL, made out of greeted TCP links: who dials, who accepts, what outlives a link.

The hello of the TCP link says that it shall become one, with which lanes, and what the dialling service says.
The listening end opens it beside its plain links, on the same port; the TCP listener knows strangers.
"""

import asyncio
from collections.abc import Callable

from chassis import log
from chassis.errors import LinkClosed
from chassis.transport.interface import Accept, Link, LinkOptions
from chassis.transport.nixl_agent import KINDS, Agent, Lanes, NixlAgent
from chassis.transport.nixl_link import Means, NixlLink
from chassis.transport.nixl_poller import Poller
from chassis.transport.nixl_quarantine import Quarantine
from chassis.transport.socket_link import SocketLink
from chassis.transport.tcp import TCP_SCHEME, SocketTransport

_HELLO = b"\x00shoal+"  # no service's hello begins so
_END = b"\x00"
_OPEN_S = 5.0  # the first agent of a process takes the longest
_FULL = "too much memory waits for peers of dead links to end"
_JOIN_S = 2.0  # for the poller to let go of all agents


def build_hello(lanes: Lanes, hello: bytes) -> bytes:
    return _HELLO + lanes.kind.encode() + _END + hello


def parse_hello(data: bytes) -> tuple[Lanes, bytes] | None:
    """(lanes, the service's hello) of a link that shall become one over NIXL."""
    if not data.startswith(_HELLO):
        return None
    kind, end, hello = data[len(_HELLO) :].partition(_END)
    lanes = KINDS.get(kind.decode("ascii", "replace"))
    return (lanes, hello) if end and lanes is not None else None


class NixlLinks:
    """`new_id`: names that are never used again."""

    def __init__(
        self,
        new_id: Callable[[], str],
        clock: Callable[[], float],
        make_agent: Callable[[str, Lanes], Agent] = NixlAgent,
    ) -> None:
        self._new_id = new_id
        self._poller = Poller(clock)
        self._quarantine = Quarantine()
        self._means = Means(make_agent, self._poller, self._quarantine)

    @property
    def ended(self) -> bool:
        """No link, and none of which anything is still to be heard."""
        return not self._means.links

    @property
    def full(self) -> bool:
        """What dead links left behind is too much for new ones."""
        return self._quarantine.full

    @property
    def quarantined_bytes(self) -> int:
        return self._quarantine.bytes

    def accept(
        self, link: SocketLink, lanes: Lanes, hello: bytes, accept: Accept, options: LinkOptions
    ) -> None:
        """`accept` gets the link once it is open."""

        def told(opened: NixlLink, stands: bool) -> None:
            if stands:
                accept(opened)

        if not self.full:
            self._new(lanes, hello, options, told).open(link, False, _OPEN_S)
        else:
            log.warning("link refused", kind=lanes.kind, cause=_FULL)
            link.close(_FULL)

    async def dial(
        self,
        sockets: SocketTransport,
        place: str,
        lanes: Lanes,
        hello: bytes,
        options: LinkOptions,
        timeout_s: float,
    ) -> Link:
        """`place`: host:port. Raises LinkClosed."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + timeout_s
        opened = loop.create_future()

        def told(link: NixlLink, stands: bool) -> None:
            if not opened.done():
                opened.set_result(stands)

        if self.full:
            raise LinkClosed(f"{lanes.kind}://{place}: {_FULL}")
        greeted = await sockets.dial(TCP_SCHEME + place, build_hello(lanes, hello), options, timeout_s)
        assert isinstance(greeted, SocketLink)
        link = self._new(lanes, hello, options, told)
        link.open(greeted, True, give_up_at - loop.time())
        try:
            stands = await opened
        except asyncio.CancelledError:
            link.close("dial was broken off")
            raise
        if not stands:
            raise LinkClosed(f"{lanes.kind}://{place}: {link.why_closed}")
        return link

    def _new(
        self, lanes: Lanes, hello: bytes, options: LinkOptions, told: Callable[[NixlLink, bool], None]
    ) -> NixlLink:
        return NixlLink(f"shoal-{self._new_id()}", lanes, hello, options, self._means, told)

    async def close(self) -> None:
        for link in list(self._means.links):
            link.close("transport closed")
        if self._means.making:
            await asyncio.wait(list(self._means.making))
        thread = self._poller.stop()
        if thread is not None:
            await asyncio.to_thread(thread.join, _JOIN_S)
        for link in list(self._means.links):
            link.abort()
