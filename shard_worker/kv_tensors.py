"""The KV memory of a stage: for each of its layers, keys and values in pages of one pool.

The same block id means the same page in every layer. Memory is taken whole, when the stage is formed;
the system maps its pages as they are first written.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from shard_worker.attention.interface import LayerKv

NUMPY_OF = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.float16: np.float16}
LANES = 16  # positions of a vector, where keys lie by column
ALIGNMENT = 64  # bytes: a vector is one line of the cache


class KvHeads(Protocol):
    """What pages depend on: of a model's configuration or a stage's weights."""

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...


@dataclass(frozen=True, slots=True)
class KvForm:
    """How a stage wants its pages: the type, and whether each block is a page by itself.

    If it is, a page holds for each KV head its keys by column, [head_dim / n, positions, n] with positions
    rounded up to whole vectors, then its values, [positions / n, head_dim, n] with positions rounded up to
    n: so many numbers, neighbours in a sum, as 32 bits hold (`per_word`). Else all keys and all values lie
    head by head, as `LayerKv` says.
    """

    dtype: torch.dtype
    paged: bool = False

    @property
    def per_word(self) -> int:
        return 4 // self.dtype.itemsize if self.paged else 1

    def key_positions(self, block_size_tokens: int) -> int:
        return -(-block_size_tokens // LANES) * LANES if self.paged else block_size_tokens

    def value_positions(self, block_size_tokens: int) -> int:
        return -(-block_size_tokens // self.per_word) * self.per_word


def bytes_per_block(heads: KvHeads, num_layers: int, block_size_tokens: int, form: KvForm) -> int:
    """Of a stage with that many layers."""
    positions = form.value_positions(block_size_tokens) + form.key_positions(block_size_tokens)
    return num_layers * heads.num_kv_heads * positions * heads.head_dim * form.dtype.itemsize


def allocate(
    heads: KvHeads, num_layers: int, num_blocks: int, block_size_tokens: int, form: KvForm
) -> list[LayerKv]:
    """One LayerKv per layer, all zeros. Of pages, keys and values begin with [kv_heads, num_blocks]."""
    one = _paged if form.paged else _by_head
    return [one(heads, num_blocks, block_size_tokens, form) for _ in range(num_layers)]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    # numpy's zeros come from the system untouched; torch would write every page now.
    size, extra = math.prod(shape), ALIGNMENT // dtype.itemsize
    taken = np.zeros(size + extra, NUMPY_OF[dtype])
    first = -taken.__array_interface__["data"][0] % ALIGNMENT // dtype.itemsize
    return torch.from_numpy(taken[first : first + size].reshape(shape)).view(dtype)


def _by_head(heads: KvHeads, num_blocks: int, block_size_tokens: int, form: KvForm) -> LayerKv:
    shape = (heads.num_kv_heads, num_blocks, block_size_tokens, heads.head_dim)
    return LayerKv(_zeros(shape, form.dtype), _zeros(shape, form.dtype))


def _paged(heads: KvHeads, num_blocks: int, block_size_tokens: int, form: KvForm) -> LayerKv:
    head_dim, n = heads.head_dim, form.per_word
    of_keys, of_values = form.key_positions(block_size_tokens), form.value_positions(block_size_tokens)
    width = head_dim * (of_keys + of_values)
    pages = _zeros((num_blocks, heads.num_kv_heads, width), form.dtype).transpose(0, 1)
    keys, values = pages[..., : head_dim * of_keys], pages[..., head_dim * of_keys :]
    shape = (heads.num_kv_heads, num_blocks)
    return LayerKv(
        keys.view(*shape, head_dim // n, of_keys, n), values.view(*shape, of_values // n, head_dim, n)
    )
