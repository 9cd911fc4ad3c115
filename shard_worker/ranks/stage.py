"""A rank's share of a stage: its parts of the layers, run by any engine, and what the ranks do together.

Every rank looks up the embedding rows of its part of the vocabulary, and the sum over ranks is the embedding.
Logits of each part go to the first rank, the leader, which alone has them all and samples. The leader tells
the others of each run before its own; who failed in the middle of one is out of step with them for good.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from shard_worker.device.stage import DeviceStage
from shard_worker.executor import I64, U32, StepInputs
from shard_worker.formats import OUTSIDE_BITS_MIN, dequantize, prepared
from shard_worker.model.stage import NO_BYTES, Stage, StageMemory
from shard_worker.model.stage_weights import StoredMatrix
from shard_worker.ranks.collective import Collective
from shard_worker.ranks.frames import Kind
from shard_worker.ranks.shares import Share
from shard_worker.ranks.words import pack_step

Tell = Callable[..., None]  # a kind and its parts, to all others


@dataclass(frozen=True, slots=True)
class EmbeddingPart:
    """Rows of a rank's part of the vocabulary, as they are stored; as they would be kept when looked up."""

    matrix: StoredMatrix
    first_id: int
    scale: float
    dtype: torch.dtype
    quantize: str

    def rows(self, ids: U32) -> torch.Tensor:
        """[T, hidden_size] in float32; zeros for ids of others."""
        found = np.zeros((len(ids), self.matrix.inputs), np.float32)
        places = ids.astype(np.int64) - self.first_id
        mine = (places >= 0) & (places < self.matrix.outputs)
        if mine.any():
            looked_up = StoredMatrix(self.matrix.format, self.matrix.rows[places[mine]], self.matrix.inputs)
            name = str(self.dtype).removeprefix("torch.")
            found[mine] = dequantize(prepared(looked_up, name, self.quantize, OUTSIDE_BITS_MIN))
        return torch.from_numpy(found)


class RankStage:
    """`Stage`, of one rank."""

    def __init__(
        self,
        inner: Stage,
        collective: Collective,
        shares: tuple[Share, ...],
        embedding: EmbeddingPart | None,
    ) -> None:
        self.inner, self.shares = inner, shares
        self._collective, self._embedding = collective, embedding
        self._on_device = inner if isinstance(inner, DeviceStage) else None

    def attach(self, memory: StageMemory) -> None:
        self.inner.attach(memory)

    def release(self) -> None:
        self.inner.release()

    def run(self, inputs: StepInputs, activations: memoryview, wanted: I64 | None = None) -> memoryview:
        if self._embedding is not None:
            activations = self._embedded(self._embedding, inputs.token_ids)
        return self.inner.run(inputs, activations, wanted)

    def _embedded(self, embedding: EmbeddingPart, ids: U32) -> memoryview:
        with self._in_order():
            rows = embedding.rows(ids)
            if self._on_device is not None:
                rows = rows.to(self._on_device.device)
            hidden = self._collective.sum(rows).mul_(embedding.scale).to(embedding.dtype).cpu()
        return hidden.view(-1).view(torch.uint8).numpy().data

    def logits(self, tokens: I64) -> torch.Tensor:
        """Of its own part of the vocabulary, which the leader takes in."""
        with self._in_order():
            own, _ = self._gathered(tokens)
            return own

    def _gathered(self, tokens: I64) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Its own, and at the leader all."""
        found = self.inner.logits(tokens) if self._on_device is None else self._on_device.logits_there(tokens)
        own = found.float().contiguous()
        return own, self._collective.gather(own, [len(share.vocabulary) for share in self.shares])

    def _in_order(self) -> AbstractContextManager[None]:
        """What a device and its ranks are told comes after the step."""
        return nullcontext() if self._on_device is None else self._on_device.in_order()


class LeaderStage(RankStage):
    def __init__(
        self,
        inner: Stage,
        collective: Collective,
        shares: tuple[Share, ...],
        embedding: EmbeddingPart | None,
        tell: Tell,
        lose: Callable[[str], None],
    ) -> None:
        """`lose`: the ranks no longer agree on where they are; the text says why."""
        super().__init__(inner, collective, shares, embedding)
        self._tell, self._lose = tell, lose

    def run(self, inputs: StepInputs, activations: memoryview, wanted: I64 | None = None) -> memoryview:
        carried = NO_BYTES if self._embedding is not None else activations
        self._tell(Kind.RUN, *pack_step(inputs, wanted, carried))
        try:
            return super().run(inputs, activations, wanted)
        except BaseException as error:
            self._lose(f"a step failed: {error}")
            raise

    def logits(self, tokens: I64) -> torch.Tensor:
        self._tell(Kind.LOGITS, np.ascontiguousarray(tokens, np.int64).tobytes())
        try:
            with self._in_order():
                _, parts = self._gathered(tokens)
                return torch.cat(parts, 1).cpu()
        except BaseException as error:
            self._lose(f"a step's logits failed: {error}")
            raise
