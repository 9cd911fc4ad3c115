"""Pure. What a watcher of the registry was told, so that after a reconnect it can be told what it missed.

Rules: changes are told in order of revision; a view of everything tells what went in the meantime too.
"""

from collections.abc import Sequence

from chassis.bus import Entry, EntryHandler


class RegistryView:
    """A watcher's view: what is there, so that a reconnect can tell what went."""

    def __init__(self, prefix: str, handler: EntryHandler) -> None:
        self.prefix = prefix
        self.closed = False
        self._handler = handler
        self._known: dict[str, int] = {}
        self._revision: int | None = None  # of the bucket, as far as it was told; None before the first view
        self._early: list[Entry] = []

    def on_present(self, entries: Sequence[Entry], revision: int) -> None:
        """Everything under the prefix as of a revision of the bucket."""
        present = {entry.key for entry in entries}
        gone = [Entry(key, None, last) for key, last in self._known.items() if key not in present]
        early, self._early, self._revision = self._early, [], revision
        for entry in (*gone, *entries):
            self._tell(entry)
        for entry in early:
            self.on_entry(entry)

    def on_entry(self, entry: Entry) -> None:
        if self._revision is None:
            self._early.append(entry)
        elif entry.revision > self._revision:
            self._revision = entry.revision
            self._tell(entry)

    def _tell(self, entry: Entry) -> None:
        if self.closed:
            return
        if entry.value is None:
            self._known.pop(entry.key, None)
        else:
            self._known[entry.key] = entry.revision
        self._handler(entry)
