"""The user's side of Shoal: the Python client, the `shoal` command and the local launcher.

Nothing here imports a service: what it knows of them are processes, messages and the public API.
"""

from shoal.client import Accepted, AsyncClient, Client, Delta, Event, Finished, Params, ShoalError

__all__ = ["Accepted", "AsyncClient", "Client", "Delta", "Event", "Finished", "Params", "ShoalError"]
