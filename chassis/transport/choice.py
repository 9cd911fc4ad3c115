"""The transport of services: each link takes the best way that both ends offer, and both say which.

A listening end offers several addresses in one text, separated by spaces (`chassis/messages/addresses.py`).
On the same host that is a unix socket in the abstract namespace, under a name never used before. Such names
are known within one network namespace only: who reaches it is on this host, in this network, and has the
right process, whatever folders are mounted where. Between hosts it is RDMA where both have it, else TCP.
`require = "rdma"` takes nothing less between hosts, and says so rather than falling back.
"""

import asyncio
import sys
from collections.abc import Callable

from chassis import log
from chassis.config import ConfigError
from chassis.errors import LinkClosed
from chassis.messages.addresses import join_addresses, split_address, split_addresses
from chassis.transport.interface import Accept, Link, LinkOptions
from chassis.transport.kinds import BY_NAME_ONLY, KNOWN, Links
from chassis.transport.nixl import NixlLinks, parse_hello
from chassis.transport.nixl_agent import KINDS, Lanes, warm, why_not
from chassis.transport.socket_link import SocketLink
from chassis.transport.tcp import TCP_SCHEME, UNIX_ABSTRACT, SocketTransport


class ChosenTransport:
    """`Transport` over `SocketTransport` and `NixlLinks`. `new_id`: names that are never used again."""

    def __init__(
        self,
        links: Links,
        new_id: Callable[[], str],
        clock: Callable[[], float],
        nixl: NixlLinks | None = None,
        lacks: Callable[[Lanes], str | None] = why_not,
        warm: Callable[[Lanes], None] = warm,
    ) -> None:
        self._links = links
        self._new_id = new_id
        self._sockets = SocketTransport()
        self._nixl = nixl or NixlLinks(new_id, clock)
        self._lacks = lacks
        self._warm = warm
        self._missing: dict[str, str] | None = None  # kinds that this process can't offer, and why
        self._refusals: dict[str, str] = {}  # by address, so that each is logged once

    def prepare(self) -> None:
        """At a service's start: ConfigError if it can't have the links it was told to; else loads what takes
        long, beside the start, so that the first link need not wait for it."""
        lanes = next((KINDS[kind] for kind in self._kinds() if kind in KINDS), None)
        if lanes is not None:
            asyncio.get_running_loop().run_in_executor(None, self._warm, lanes)

    # ---- listening ---------------------------------------------------------------------------------

    async def listen(self, address: str, accept: Accept, options: LinkOptions) -> str:
        """Raises OSError, ValueError as SocketTransport; ConfigError when what is required isn't there."""
        if not address.startswith(TCP_SCHEME):
            return await self._sockets.listen(address, self._plain(accept), options)
        kinds = self._kinds()
        bound = await self._sockets.listen(address, self._accepted(accept, options), options)
        place = bound.removeprefix(TCP_SCHEME)
        offers = []
        for kind in kinds:
            if kind == "unix":
                name = UNIX_ABSTRACT + f"shoal-{self._new_id()}"
                offers.append(await self._sockets.listen(name, self._plain(accept), options))
            else:
                offers.append(f"{kind}://{place}")
        log.info("links offered", addresses=offers, required=self._links.require, missing=self._missing)
        return join_addresses(offers)

    def _accepted(self, accept: Accept, options: LinkOptions) -> Accept:
        """Of the TCP port: plain links, and those that become links over NIXL."""

        def greeted(link: Link) -> None:
            assert isinstance(link, SocketLink)
            asked = parse_hello(link.hello)
            kind = asked[0].kind if asked is not None else "tcp"
            if kind not in self._kinds():
                log.warning("link refused", kind=kind, allowed=self._links.allowed)
                link.close(f"no {kind} links here")
            elif asked is None:
                self._plain(accept)(link)
            else:
                self._nixl.accept(link, *asked, self._plain(accept), options)

        return greeted

    def _plain(self, accept: Accept) -> Accept:
        def accepted(link: Link) -> None:
            log.info("link accepted", kind=link.kind)
            accept(link)

        return accepted

    def _kinds(self) -> list[str]:
        """What this process offers and takes. Raises ConfigError when it can't offer what it was told to."""
        if self._missing is None:
            found = {}
            for kind in self._links.kinds:
                why = self._lacks(KINDS[kind]) if kind in KINDS else None
                if kind == "unix" and sys.platform != "linux":
                    why = "only Linux has unix sockets without files"
                if why is not None:
                    found[str(kind)] = why
            told_to = set(BY_NAME_ONLY & found.keys())
            if self._links.require:
                told_to |= {Lanes.RDMA.kind} & found.keys()
            if told_to:
                kind_told = min(told_to)
                raise ConfigError(f"[chassis.links] {kind_told}: {found[kind_told]}")
            self._missing = found
        return [kind for kind in self._links.allowed if kind not in self._missing]

    # ---- dialling ----------------------------------------------------------------------------------

    async def dial(self, address: str, hello: bytes, options: LinkOptions, timeout_s: float = 2.0) -> Link:
        """Raises LinkClosed: nobody answered in time, or only where `require` does not let us go."""
        offered = {split_address(one)[0]: one for one in split_addresses(address)}
        if not offered.keys() & set(KNOWN):
            return await self._sockets.dial(address, hello, options, timeout_s)  # which says what it is not
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + timeout_s
        failures: list[str] = []
        kinds = [kind for kind in self._kinds() if kind in offered]
        for kind in kinds:
            left_s = give_up_at - loop.time()
            if left_s <= 0:
                break  # who does not answer one way, does not answer another
            share = 0.5 if kind in KINDS and kind != kinds[-1] else 1.0
            try:
                link = await self._dial_one(kind, offered[kind], hello, options, left_s * share)
            except LinkClosed as error:
                failures.append(str(error))
                continue
            self._refusals.pop(address, None)
            log.info("link made", kind=link.kind, address=offered[kind])
            if len(failures) > (kinds[0] == "unix"):  # a name that isn't known is another host's
                log.warning("link fell back", kind=link.kind, address=offered[kind], failed=failures)
            return link
        raise LinkClosed(self._refusal(address, offered, failures))

    async def _dial_one(
        self, kind: str, address: str, hello: bytes, options: LinkOptions, timeout_s: float
    ) -> Link:
        if kind not in KINDS:
            return await self._sockets.dial(address, hello, options, timeout_s)
        place = split_address(address)[1]
        return await self._nixl.dial(self._sockets, place, KINDS[kind], hello, options, timeout_s)

    def _refusal(self, address: str, offered: dict[str, str], failures: list[str]) -> str:
        tried = "; ".join(failures)
        if not self._links.require:
            return tried or f"{address}: none of {list(self._kinds())}"
        why = f'{address}: no RDMA, and links.require = "rdma" takes nothing less between hosts'
        why += f" (offered: {', '.join(offered)}{'; ' + tried if tried else ''})"
        if self._refusals.get(address) != why:
            if len(self._refusals) >= 256:
                self._refusals.clear()
            self._refusals[address] = why
            log.error("link refused", error=why)
        return why

    async def close(self) -> None:
        await self._nixl.close()
        await self._sockets.close()
