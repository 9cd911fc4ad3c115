"""Pure. Output ids to text, as a stream: whole code points only, and the deltas together equal the whole.

Text is defined by the card's token bytes: UTF-8 with each malformed part replaced by U+FFFD. A first space
is dropped where the vocabulary puts one before every word.
"""

import codecs
from collections.abc import Iterable, Sequence

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
    """The text of one request's output.

    `stop_ids` end it, beyond its first `min_tokens`, and their bytes do not count then.
    """

    def __init__(
        self,
        table: TokenBytes,
        stops: Sequence[bytes] = (),
        *,
        strip_leading_space: bool = False,
        stop_ids: Iterable[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self._table = table
        self._stop_ids = frozenset(i for i in stop_ids if table.join((i,)))
        self._min_tokens = min_tokens
        self._length = 0
        self._free = not stops and not self._stop_ids  # nothing is ever held
        self._holdback = Holdback(stops)
        self._detokenizer = Detokenizer(strip_leading_space)

    def token_bytes(self, token_id: int) -> bytes:
        return self._table.join((token_id,))

    def feed(self, ids: Sequence[int]) -> str:
        """The text that these ids add for certain; may be empty."""
        return self._detokenizer.feed(self._release(ids))

    def end(self, ids: Sequence[int], byte_cut: int | None) -> str:
        """The last ids and all text that is left: up to `byte_cut` bytes of the whole output, if given."""
        before = self._holdback.released
        rest = self._release(ids)
        rest += self._holdback.finish(byte_cut)
        if byte_cut is not None:
            rest = rest[: max(0, byte_cut - before)]
        return self._detokenizer.feed(rest, final=True)

    def _release(self, ids: Sequence[int]) -> bytes:
        if self._free:
            return self._holdback.feed(self._table.join(ids))
        released = []
        for token_id in ids:
            self._length += 1
            may_end = token_id in self._stop_ids and self._length > self._min_tokens
            released.append(self._holdback.feed(self._table.join((token_id,)), may_end))
        return b"".join(released)
