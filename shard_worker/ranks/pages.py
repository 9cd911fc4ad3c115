"""Pages of all ranks as one: a block's page is the ranks' pages one after another.

So tiers and checksums have whole blocks. The layout names every rank's part: only a stage that is shared out
alike can read them. Calls come from one thread, beside the steps, over connections of their own.
"""

from collections.abc import Sequence

import numpy as np
import xxhash

from shard_worker.executor import U8, PageForm, Pages
from shard_worker.ranks.frames import Kind
from shard_worker.ranks.leader import Followers
from shard_worker.ranks.words import Answer, PageCall, pack_pages

LAYOUT_LEN_MAX = 200  # of a name that says all


class RanksPages:
    """`Pages`, at the leader."""

    def __init__(self, local: Pages, followers: Followers, turn: int, others: Sequence[Answer]) -> None:
        """`turn`: which memory of the ranks; `others`: what ranks 1 on said of theirs."""
        self._local, self._followers, self._turn = local, followers, turn
        self._sizes = [local.form.page_bytes, *(other.page_bytes for other in others)]
        self._form = PageForm(
            _layout([local.form.layout, *(other.layout for other in others)]),
            sum(self._sizes),
            local.form.num_layers,
        )

    @property
    def form(self) -> PageForm:
        return self._form

    def read(self, blocks: Sequence[int], into: U8, first_layer: int = 0) -> None:
        shape = into.shape[:2]
        call = pack_pages(PageCall(self._turn, first_layer, shape[1], tuple(blocks)))
        own = np.empty((*shape, self._sizes[0]), np.uint8)
        self._local.read(blocks, own, first_layer)
        into[..., : self._sizes[0]] = own
        at = self._sizes[0]
        for rank, size in enumerate(self._sizes[1:], 1):
            data = self._followers.ask_pages(rank, Kind.READ, call)
            into[..., at : at + size] = np.frombuffer(data, np.uint8).reshape(*shape, size)
            at += size

    def write(self, blocks: Sequence[int], content: U8, first_layer: int = 0) -> None:
        call = pack_pages(PageCall(self._turn, first_layer, content.shape[1], tuple(blocks)))
        self._local.write(blocks, np.ascontiguousarray(content[..., : self._sizes[0]]), first_layer)
        at = self._sizes[0]
        for rank, size in enumerate(self._sizes[1:], 1):
            part = np.ascontiguousarray(content[..., at : at + size])
            self._followers.ask_pages(rank, Kind.WRITE, call, part.reshape(-1).data)
            at += size


def _layout(parts: Sequence[str]) -> str:
    """By its digest where it is long: messages have no room for any number of ranks."""
    whole = "+".join(parts)
    if len(whole) <= LAYOUT_LEN_MAX:
        return whole
    return f"{len(parts)} ranks {xxhash.xxh3_128_hexdigest(whole.encode())}"
