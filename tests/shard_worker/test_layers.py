"""The parts that stages are built of, and what bfloat16 costs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shard_worker.attention.reference import ReferenceAttention
from shard_worker.kv_tensors import KvForm, allocate, bytes_per_block
from shard_worker.model import layers
from shard_worker.model.families import stage_weights
from shard_worker.model.layers import Precision, linear, precision_of, rms_norm
from shard_worker.model.stage import StageMemory
from shard_worker.model.torch_stage import TorchStage
from shard_worker.weights import open_checkpoint
from tests.shard_worker import tiny_models
from tests.shard_worker.driver import Row, Sequence, step_inputs

torch.set_num_threads(1)
IDS = np.random.default_rng(1).integers(0, 256, 90).tolist()


def logits_of(path: Path, ends: tuple[int, ...], precision: Precision) -> torch.Tensor:
    """[tokens, vocabulary] of IDS, through one stage per end."""
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    sequence = Sequence(IDS, 1, table=list(range(3, 30)))
    inputs = step_inputs([Row(sequence, len(IDS))], 4)
    first, carried = 0, memoryview(b"")
    for end in ends:
        stage = TorchStage(stage_weights(checkpoint, first, end), precision, ReferenceAttention())
        kv = allocate(config, end - first, 30, 4, KvForm(precision.compute))
        stage.attach(StageMemory(kv, 4, len(IDS)))
        carried = stage.run(inputs, carried)
        first = end
    return stage.logits(np.arange(len(IDS)))


def reference(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([IDS])).logits[0]
    return logits


@pytest.mark.parametrize("native", [True, False])
def test_bfloat16_is_near_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    monkeypatch.setattr(layers, "has_bf16", lambda: native)
    precision = precision_of(torch.bfloat16)
    assert precision.compute == (torch.bfloat16 if native else torch.float32)
    expected = reference(tiny_models.make(tmp_path, initializer_range=0.1))
    ours = logits_of(tmp_path, (2, 6), precision).float()
    assert float((ours - expected).norm() / expected.norm()) < 0.1


@pytest.mark.parametrize("rows", [1, 2, 17])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("native", [True, False])
def test_linear_in_bfloat16(monkeypatch: pytest.MonkeyPatch, rows: int, biased: bool, native: bool) -> None:
    monkeypatch.setattr(layers, "has_bf16", lambda: native)
    precision = precision_of(torch.bfloat16)
    draw = torch.Generator().manual_seed(3)
    weight, x = torch.randn(40, 64, generator=draw), torch.randn(rows, 64, generator=draw)
    bias = torch.randn(40, generator=draw) if biased else None
    expected = torch.nn.functional.linear(x, weight, bias)
    y = linear(weight, bias, precision)(x.to(precision.compute))
    assert y.dtype == precision.compute
    torch.testing.assert_close(y.float(), expected, atol=0.3, rtol=0.02)


def test_rms_norm_is_computed_in_float32() -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(3))
    weight = torch.rand(64, generator=torch.Generator().manual_seed(4))
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), expected, atol=1e-6, rtol=0)
    narrow = rms_norm(x.bfloat16(), weight, 1e-5)
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.double(), expected, atol=0.03, rtol=0)


def test_kv_memory_is_what_is_said(tmp_path: Path) -> None:
    tiny_models.make(tmp_path)
    config = open_checkpoint(tmp_path).config
    for dtype in (torch.float32, torch.bfloat16):
        kv = allocate(config, 3, 10, 4, KvForm(dtype))
        taken = sum(t.numel() * t.element_size() for layer in kv for t in (layer.keys, layer.values))
        assert taken == 10 * bytes_per_block(config, 3, 4, KvForm(dtype))
        assert all(bool((layer.keys == 0).all()) and layer.values.dtype == dtype for layer in kv)
