"""Pure. Output ids to text, as a stream: whole code points only, and the deltas together equal the whole.

Text is defined by the card's token bytes: UTF-8 with each malformed part replaced by U+FFFD. A first space
is dropped where the vocabulary puts one before every word.
"""

import codecs
from collections.abc import Sequence

from chassis.messages.card import TokenBytes
from gateway.holdback import Holdback


class Detokenizer:
    """Bytes to text; keeps what may still become a code point."""

    def __init__(self, strip_leading_space: bool = False) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = strip_leading_space

    def feed(self, data: bytes, final: bool = False) -> str:
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data, final)


class OutputText:
    """The text of one request's output."""

    def __init__(
        self, table: TokenBytes, stops: Sequence[bytes] = (), strip_leading_space: bool = False
    ) -> None:
        self._table = table
        self._holdback = Holdback(stops) if stops else None
        self._detokenizer = Detokenizer(strip_leading_space)

    def feed(self, ids: Sequence[int]) -> str:
        """The text that these ids add for certain; may be empty."""
        if self._holdback is None:
            return self._detokenizer.feed(self._table.join(ids))
        feed = self._holdback.feed
        return self._detokenizer.feed(b"".join([feed(self._table.join((i,))) for i in ids]))

    def finish(self, byte_cut: int | None) -> str:
        """The last text. `byte_cut`: bytes of the whole output that stay, where a stop string cut it."""
        rest = self._holdback.finish(byte_cut) if self._holdback is not None else b""
        return self._detokenizer.feed(rest, final=True)
