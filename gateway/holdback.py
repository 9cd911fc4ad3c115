"""Pure. Holds output back while its tail may still become a stop string; cuts where the owner cut.

Rules: the owner alone decides that a stop ends a request; here nothing is cut on suspicion. What has been
released is a function of the tokens so far, however they came in portions, so that a stream can be resumed
with its token ids alone. Matching is Knuth, Morris, Pratt: one comparison a byte and stop, amortised.
"""

from collections.abc import Sequence


class Holdback:
    def __init__(self, stops: Sequence[bytes]) -> None:
        assert all(stops), "an empty stop would hold everything"
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._states = [0] * len(self._stops)  # bytes of each stop that the tail matches
        self._pending = bytearray()
        self._fed = 0

    @property
    def released(self) -> int:
        """Bytes of the output given out so far."""
        return self._fed - len(self._pending)

    def feed(self, piece: bytes, may_end: bool = False) -> bytes:
        """Takes the bytes of one token, returns those that no longer may become part of a stop.

        A stop completed by this very token is held whole, as is a token that `may_end` the output by itself:
        an end may follow. The next token disproves it.
        """
        if not self._stops and not may_end and not self._pending:
            self._fed += len(piece)
            return piece
        hold_from = self._match(piece) if self._stops else self._fed + len(piece)
        if may_end:
            hold_from = min(hold_from, self._fed)
        self._fed += len(piece)
        self._pending += piece
        release = len(self._pending) - (self._fed - hold_from)
        assert release >= 0, "a stop began in what was released"
        released = bytes(self._pending[:release])
        del self._pending[:release]
        return released

    def finish(self, byte_cut: int | None) -> bytes:
        """What remains: all of it, or up to `byte_cut` bytes of the whole output."""
        keep = len(self._pending)
        if byte_cut is not None:
            keep = max(0, byte_cut - self.released)
        return bytes(self._pending[:keep])

    def _match(self, piece: bytes) -> int:
        """Advances all stops; returns where in the whole output the held tail begins."""
        end = self._fed + len(piece)
        hold_from = end
        for i, (stop, borders) in enumerate(self._stops):
            state = self._states[i]
            for offset, byte in enumerate(piece):
                while state and stop[state] != byte:
                    state = borders[state - 1]
                if stop[state] == byte:
                    state += 1
                    if state == len(stop):
                        hold_from = min(hold_from, self._fed + offset + 1 - len(stop))
                        state = borders[state - 1]
            self._states[i] = state
            hold_from = min(hold_from, end - state)
        return hold_from


def _borders(stop: bytes) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = borders[length - 1]
        if stop[i] == stop[length]:
            length += 1
        borders[i] = length
    return borders
