"""Pure. The addresses that one listening end offers, as one text: best first, separated by spaces.

On the wire the one that every reader knows (TCP, else the first) has the field that was there first, the
others a repeated one beside it: who does not know that reads what it always read.
"""

from collections.abc import Iterable, Sequence

from chassis.messages import BadMessage

ADDRESSES_MAX = 8
ADDRESS_LEN_MAX = 256


def join_addresses(addresses: Sequence[str]) -> str:
    """Raises BadMessage."""
    if not 0 < len(addresses) <= ADDRESSES_MAX:
        raise BadMessage(f"{len(addresses)} link addresses, not 1 to {ADDRESSES_MAX}")
    for address in addresses:
        if not 0 < len(address) <= ADDRESS_LEN_MAX or not address.isprintable() or " " in address:
            raise BadMessage(f"link address {address[:40]!r}: 1 to {ADDRESS_LEN_MAX} characters, no spaces")
    return " ".join(addresses)


def split_addresses(text: str) -> list[str]:
    return text.split(" ")


def split_address(address: str) -> tuple[str, str]:
    """(scheme, the rest)."""
    scheme, _, rest = address.partition("://")
    return scheme, rest


def to_wire(text: str) -> tuple[str, list[str]]:
    """(the address that every reader knows, the others in their order)."""
    addresses = split_addresses(text)
    known = next((address for address in addresses if address.startswith("tcp://")), addresses[0])
    return known, [address for address in addresses if address is not known]


def from_wire(known: str, others: Iterable[str]) -> str:
    """The others are better: who wrote them put the best first, TCP is what is left. Raises BadMessage."""
    others = list(others)
    return join_addresses([*others, known]) if others else known


def advertised(address: str, host: str) -> str:
    """The addresses as others reach them: with this host, if one is given, where they have a port."""
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"

    def reached(one: str) -> str:
        if not host or one.startswith("unix:"):
            return one
        scheme, slashes, rest = one.rpartition("//")
        return f"{scheme}{slashes}{host}:{rest.rpartition(':')[2]}"

    return " ".join(reached(one) for one in split_addresses(address))


def names_no_host(address: str) -> bool:
    """Whether one of them means all of a host's interfaces: elsewhere that is whoever dials it."""
    hosts = [one.rpartition("//")[2].rpartition(":")[0] for one in split_addresses(address)]
    return not {"0.0.0.0", "[::]"}.isdisjoint(hosts)
