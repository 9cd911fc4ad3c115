"""Pure. Whose call it is."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Caller:
    """`key` names the key it came with, and is none of its secret; empty where no keys are asked for."""

    tenant: str
    key: str = ""


def bearer(authorization: str | None) -> str | None:
    """The token of an `authorization` header (RFC 6750); None if it holds none."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None
