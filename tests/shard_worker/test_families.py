"""Every family and variant gives transformers' tokens and logits: whole, in stages, in chunks, mixed.

In float32, on small random models whose two largest logits are asserted to differ by more than rounding.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shard_worker.weights import open_checkpoint
from tests.shard_worker import tiny_models
from tests.shard_worker.driver import Driver, Sequence
from tests.shard_worker.stages import STAGES, StageExecutor

torch.set_num_threads(1)
NUM_OUTPUT, LAYERS = 6, 4
LENGTHS = (1, 19, 40)  # of the prompts; windows are shorter, stretched contexts begin at 32
THETA = {"rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "factor": 3.0} | THETA
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
} | THETA
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32} | THETA
SHORT, LONG = [1.0, 1.1, 1.3, 2.0], [1.5, 3.0, 6.0, 9.0]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG} | THETA
EVERY_SECOND = ["full_attention", "sliding_attention"] * 2
UNTIED = {"tie_word_embeddings": False}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}
GEMMA: dict[str, Any] = {"query_pre_attn_scalar": 11, "sliding_window": 9}
GEMMA3_ROPES = {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama tied": ("llama", {}),
    "llama untied": ("llama", UNTIED),
    "llama all heads": ("llama", {"num_key_value_heads": 4}),
    "llama one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama wide heads": ("llama", {"head_dim": 16}),
    "llama theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama linear": ("llama", {"rope_parameters": LINEAR}),
    "llama llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama yarn": ("llama", {"rope_parameters": YARN}),
    "llama yarn by hand": (
        "llama",
        {"rope_parameters": YARN | {"attention_factor": 1.3, "beta_fast": 4.0, "truncate": False}},
    ),
    "llama yarn by mscale": ("llama", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral window": ("mistral", {"sliding_window": 8} | UNTIED),
    "mistral narrow window": ("mistral", {"sliding_window": 2}),
    "qwen2": ("qwen2", {}),
    "qwen2 untied yarn": ("qwen2", {"rope_parameters": YARN} | UNTIED),
    "qwen2 window": ("qwen2", QWEN_WINDOW),
    "qwen3": ("qwen3", {}),
    "qwen3 biases untied": ("qwen3", {"attention_bias": True} | UNTIED),
    "qwen3 window": ("qwen3", QWEN_WINDOW | {"layer_types": EVERY_SECOND}),
    "gemma2": (
        "gemma2",
        GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 9.0},
    ),
    "gemma2 uncapped untied": (
        "gemma2",
        GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None} | UNTIED,
    ),
    "gemma3": ("gemma3_text", GEMMA | {"layer_types": EVERY_SECOND, "rope_parameters": GEMMA3_ROPES}),
    "gemma3 as it comes": ("gemma3_text", GEMMA | {"num_hidden_layers": 7, "final_logit_softcapping": 20.0}),
    "gemma3 biases untied": ("gemma3_text", GEMMA | {"attention_bias": True, "head_dim": 12} | UNTIED),
    "phi3": ("phi3", {}),
    "phi3 window tied": ("phi3", {"sliding_window": 10, "tie_word_embeddings": True}),
    "phi3 partial": ("phi3", {"rope_parameters": {"partial_rotary_factor": 0.5} | THETA}),
    "phi3 longrope short": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128},
    ),
    "phi3 longrope partial": (
        "phi3",
        {
            "rope_parameters": LONGROPE
            | {"partial_rotary_factor": 0.5, "short_factor": SHORT[:2], "long_factor": LONG[:2]},
            "original_max_position_embeddings": 64,
        },
    ),
}


@dataclass(frozen=True)
class Expected:
    path: Path
    num_layers: int
    prompts: list[list[int]]
    outputs: list[list[int]]
    logits: torch.Tensor  # of the last output's place, of each prompt


@pytest.fixture(scope="module", params=CASES)
def expected(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Expected:
    model_type, changes = CASES[request.param]
    path = tmp_path_factory.mktemp("family")
    model = tiny_models.make_small(path, model_type, **changes)
    draw = np.random.default_rng(5)
    prompts = [draw.integers(3, tiny_models.SMALL_VOCAB, n).tolist() for n in LENGTHS]
    answers = [tiny_models.greedy(model, prompt, NUM_OUTPUT) for prompt in prompts]
    assert min(margin for _, margin in answers) > tiny_models.MARGIN_MIN
    outputs = [output for output, _ in answers]
    with torch.inference_mode():
        whole = [
            model(torch.tensor([p + o[:-1]])).logits[0, -1] for p, o in zip(prompts, outputs, strict=True)
        ]
    return Expected(path, model.config.num_hidden_layers, prompts, outputs, torch.stack(whole))


@pytest.mark.parametrize("stage", STAGES)
def test_tokens_and_logits_are_those_of_transformers(expected: Expected, stage: str) -> None:
    checkpoint, num_layers = open_checkpoint(expected.path), expected.num_layers
    scale = float(expected.logits.abs().max())
    for ends, chunk in (((num_layers,), 64), ((1, num_layers), 7)):
        executors = [StageExecutor(checkpoint, STAGES[stage]) for _ in ends]
        pipeline = Driver(executors, ends, step_tokens=64)
        sequences = [Sequence(prompt, NUM_OUTPUT) for prompt in expected.prompts]
        assert pipeline.run(sequences, chunk) == expected.outputs
        seen = torch.stack(executors[-1].logits)
        for logits in expected.logits:
            assert float((seen - logits).abs().amax(-1).min()) < 1e-5 * scale


@pytest.mark.parametrize("length", [20, 40])
def test_longrope_beyond_the_original_context(tmp_path: Path, length: int) -> None:
    """Asked for a longer context a model has the long factors, as transformers has for longer sequences."""
    changes: dict[str, Any] = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}
    model = tiny_models.make_small(tmp_path, "phi3", **changes)
    prompt = np.random.default_rng(6).integers(3, tiny_models.SMALL_VOCAB, length).tolist()
    output, margin = tiny_models.greedy(model, prompt, NUM_OUTPUT)
    assert margin > tiny_models.MARGIN_MIN
    stretched = length > 32
    checkpoint = open_checkpoint(tmp_path, 128 if stretched else 0)
    assert checkpoint.config.stretched == stretched
    pipeline = Driver([StageExecutor(checkpoint, STAGES["torch"])], (LAYERS,))
    assert pipeline.run([Sequence(prompt, NUM_OUTPUT)]) == [output]
