"""Which kvstores there are, as the registry and their answers say, and to which of them a pool belongs.

Rules: a pool belongs to the one that `rendezvous` ranks first of those that did not fail; one that failed is
asked again after it wrote anew, or when nobody else is left. Whoever is in use is left only for one that is
before it, or when it says that it leaves: silence of the registry moves nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass

from batcher.rendezvous import ranked
from chassis import log, subjects
from chassis.bus import Entry
from chassis.ids import BootId
from chassis.messages import BadMessage, check
from chassis.messages.registry import KvstoreEntry, parse_kvstore

KNOWN_MAX = 256


@dataclass(slots=True)
class Known:
    """A registry entry; `failed_revision`: it failed since this revision was written."""

    entry: KvstoreEntry
    revision: int
    seen_at: float  # expiry is not announced
    failed_revision: int = 0
    failures: int = 0
    refused: str = ""  # the generation of a pool that it does not take

    @property
    def boot(self) -> BootId:
        return self.entry.boot

    @property
    def address(self) -> str:
        return self.entry.rpc_address

    @property
    def name(self) -> str:
        """By which it is ranked: one that comes again under its name gets its pools again."""
        return self.entry.name or self.entry.boot


class Kvstores:
    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._known: dict[str, Known] = {}  # by registry key

    def learn(self, entry: Entry) -> None:
        """A registry entry has come, or was deleted."""
        if entry.value is None:
            self._known.pop(entry.key, None)
            return
        try:
            kvstore = parse_kvstore(entry.value)
            check(subjects.kvstore_key(kvstore.boot) == entry.key, "it names another kvstore than its key")
        except BadMessage as error:
            log.warning("bad registry entry", key=entry.key, error=str(error))
            return
        known = self._known.setdefault(entry.key, Known(kvstore, entry.revision, 0.0))
        known.entry, known.revision, known.seen_at = kvstore, entry.revision, self._now()
        if len(self._known) > KNOWN_MAX:
            del self._known[min(self._known, key=lambda key: self._known[key].revision)]

    def present(self, used: BootId | None = None) -> list[Known]:
        """Those that did not expire, and whoever is in use; all, when the registry itself has gone silent."""
        since = self._now() - subjects.REGISTRY_TTL_S
        known = list(self._known.values())
        return [k for k in known if k.seen_at >= since or k.boot == used] or known

    def owner(self, generation: str, used: BootId | None = None) -> Known | None:
        """Where a pool is to be attached; None: nowhere."""
        present = self.present(used)
        order = {name: place for place, name in enumerate(ranked(generation, {k.name for k in present}))}

        def rank(known: Known) -> tuple[bool, int, int, bool, int]:
            failed = known.failed_revision == known.revision
            refuses = known.refused == generation
            failures = known.failures if failed else 0
            return (refuses, failures, order[known.name], known.boot != used, -known.revision)

        return min(present, key=rank, default=None)

    def better(self, generation: str, used: BootId) -> Known | None:
        """Another that a pool should move to, from where it is attached."""
        owner = self.owner(generation, used)
        if owner is None or owner.boot == used or owner.failed_revision == owner.revision:
            return None
        return None if owner.refused == generation else owner

    def blame(self, boot: BootId) -> None:
        """It did not answer."""
        known = self._known.get(subjects.kvstore_key(boot))
        if known is not None:
            known.failed_revision = known.revision
            known.failures += 1

    def refuses(self, boot: BootId, generation: str) -> None:
        """It does not take this pool."""
        known = self._known.get(subjects.kvstore_key(boot))
        if known is not None:
            known.refused = generation
