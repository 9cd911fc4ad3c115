"""The pages of memory that this process reaches: blocks are copied as bytes, outside the interpreter lock."""

from collections.abc import Sequence

from shard_worker.executor import U8, U32, PageForm


class HostPages:
    """`Pages`."""

    def __init__(self, layout: str, memory: U8) -> None:
        """`memory`: [num_layers, num_blocks, pieces, bytes]; a page is a block's pieces one after another."""
        self._memory = memory
        num_layers, _, pieces, size = memory.shape
        self._form = PageForm(layout, pieces * size, num_layers)

    @property
    def form(self) -> PageForm:
        return self._form

    def copy(self, sources: U32, targets: U32) -> None:
        """Of this memory, in all layers; no block is both, none is copied to twice."""
        self._memory[:, targets] = self._memory[:, sources]

    def read(self, blocks: Sequence[int], into: U8, first_layer: int = 0) -> None:
        end = first_layer + into.shape[1]
        for block, pages in zip(blocks, into, strict=True):
            there = self._memory[first_layer:end, block]
            pages.reshape(there.shape)[:] = there

    def write(self, blocks: Sequence[int], content: U8, first_layer: int = 0) -> None:
        end = first_layer + content.shape[1]
        for block, pages in zip(blocks, content, strict=True):
            there = self._memory[first_layer:end, block]
            there[:] = pages.reshape(there.shape)
