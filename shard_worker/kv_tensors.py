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
from shard_worker.kv_pages import HostPages

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
    """One LayerKv per layer, all zeros, in one piece of memory. Of pages, keys and values begin with
    [kv_heads, num_blocks]."""
    if form.paged:
        return _paged(heads, num_layers, num_blocks, block_size_tokens, form)
    shape = (num_layers, 2, heads.num_kv_heads, num_blocks, block_size_tokens, heads.head_dim)
    return [LayerKv(*layer) for layer in _zeros(shape, form.dtype)]


def _paged(
    heads: KvHeads, num_layers: int, num_blocks: int, block_size_tokens: int, form: KvForm
) -> list[LayerKv]:
    head_dim, n = heads.head_dim, form.per_word
    of_keys, of_values = form.key_positions(block_size_tokens), form.value_positions(block_size_tokens)
    width = head_dim * (of_keys + of_values)
    pages = _zeros((num_layers, num_blocks, heads.num_kv_heads, width), form.dtype).transpose(1, 2)
    shape = (num_layers, heads.num_kv_heads, num_blocks)
    keys = pages[..., : head_dim * of_keys].view(*shape, head_dim // n, of_keys, n)
    values = pages[..., head_dim * of_keys :].view(*shape, of_values // n, head_dim, n)
    return list(map(LayerKv, keys, values))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """[layers, ...]: each begins at a whole line."""
    # numpy's zeros come from the system untouched; torch would write every page now.
    line = ALIGNMENT // dtype.itemsize
    size = -(-math.prod(shape[1:]) // line) * line
    taken = np.zeros(shape[0] * size + line, NUMPY_OF[dtype])
    first = -taken.__array_interface__["data"][0] % ALIGNMENT // dtype.itemsize
    layers = taken[first : first + shape[0] * size].reshape(shape[0], size)
    return torch.from_numpy(layers[:, : math.prod(shape[1:])].reshape(shape)).view(dtype)


def pages_of(kv: list[LayerKv], block_size_tokens: int, form: KvForm) -> HostPages:
    """Of what `allocate` gave."""
    keys, values = kv[0].keys, kv[0].values
    apart = kv[1].keys.data_ptr() - keys.data_ptr() if len(kv) > 1 else 0
    size, pieces = keys.stride(1), 1 if form.paged else 2 * len(keys)
    shape, strides = (keys.shape[1], pieces, size), (size, size if form.paged else keys.stride(0), 1)
    whole = keys.as_strided((len(kv), *shape), (apart // form.dtype.itemsize, *strides))
    layout = layout_of(form.dtype, "columns" if form.paged else "heads", values, block_size_tokens)
    return HostPages(layout, whole.view(torch.uint8).numpy())


def layout_of(dtype: torch.dtype, order: str, values: torch.Tensor, block_size_tokens: int) -> str:
    """What pages are called where contents are kept. `values`: [kv_heads, ..., head_dim, (per word)]."""
    sizes = f"{values.shape[0]}x{values.shape[3]}x{block_size_tokens}"
    return f"{str(dtype).removeprefix('torch.')}.{order}.{sizes}"
