"""The user's side of Shoal: the Python client, the `shoal` command and the local launcher.

Nothing here imports a service: what it knows of them are processes, messages and the public API. The client's
names are here too, and load it when they are used: of the command's words many need no gRPC.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.client import (
        Accepted,
        AsyncClient,
        Client,
        Delta,
        Event,
        Finished,
        Params,
        Result,
        Retry,
        ShoalError,
        Tls,
    )

__all__ = [
    "Accepted",
    "AsyncClient",
    "Client",
    "Delta",
    "Event",
    "Finished",
    "Params",
    "Result",
    "Retry",
    "ShoalError",
    "Tls",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("shoal.client"), name)
