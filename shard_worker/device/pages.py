"""The pages of a device's memory: gathered there, and brought over in a lane beside those of the steps.

A block that is read was filled by a step whose result is out, and one that is written is in no step under
way: so copies wait for no step, and the caller's thread alone waits for them.
"""

from collections.abc import Sequence

import numpy as np
import torch

from shard_worker.attention.device import by_page
from shard_worker.attention.interface import LayerKv
from shard_worker.device.staging import HostBuffer, Lane
from shard_worker.executor import U8, PageForm
from shard_worker.kv_tensors import layout_of


class DevicePages:
    """`Pages` of what `attention.device.allocate` gave; they may be copied from one thread at a time."""

    def __init__(self, kv: list[LayerKv], block_size_tokens: int) -> None:
        self._device = kv[0].keys.device
        # A page: keys, then values, [block_size, kv_heads, head_dim] each; as [num_blocks, bytes].
        self._parts = [
            tuple(by_page(part).flatten(1).view(torch.uint8) for part in (layer.keys, layer.values))
            for layer in kv
        ]
        keys, values = self._parts[0]
        self._keys_bytes = keys.shape[1]
        layout = layout_of(kv[0].keys.dtype, "tokens", kv[0].values, block_size_tokens)
        self._form = PageForm(layout, keys.shape[1] + values.shape[1], len(kv))
        self._lane = Lane(self._device)
        self._host = HostBuffer(self._device)

    @property
    def form(self) -> PageForm:
        return self._form

    def read(self, blocks: Sequence[int], into: U8, first_layer: int = 0) -> None:
        with torch.inference_mode(), self._lane.working():
            at = self._places(blocks)
            there = torch.empty(into.shape, dtype=torch.uint8, device=self._device)
            for i, (keys, values) in enumerate(self._parts[first_layer : first_layer + into.shape[1]]):
                there[:, i, : self._keys_bytes] = keys[at]
                there[:, i, self._keys_bytes :] = values[at]
            host = self._host.upto(into.nbytes)
            host.copy_(there.flatten(), non_blocking=True)
        self._lane.mark().wait()
        into.reshape(-1)[:] = host.numpy()

    def write(self, blocks: Sequence[int], content: U8, first_layer: int = 0) -> None:
        host = self._host.upto(content.nbytes)
        host.numpy()[:] = content.reshape(-1)
        with torch.inference_mode(), self._lane.working():
            at = self._places(blocks)
            there = host.to(self._device, non_blocking=True).view(content.shape)
            for i, (keys, values) in enumerate(self._parts[first_layer : first_layer + content.shape[1]]):
                keys[at] = there[:, i, : self._keys_bytes]
                values[at] = there[:, i, self._keys_bytes :]
        self._lane.mark().wait()

    def _places(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.from_numpy(np.asarray(blocks, np.int64)).to(self._device)
