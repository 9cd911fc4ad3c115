"""The packaged model answers a chat prompt with the tokens that transformers gives on the same weights."""

import importlib
import warnings
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from chassis.messages.card import parse_card
from shard_worker.torch_executor import EngineConfig, TorchExecutor
from shard_worker.weights import find_model
from tests.shard_worker import tiny_models
from tests.shard_worker.driver import Driver, Sequence

PROMPT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
CAPITAL = "What is the capital of France?"


def executor(**settings: Any) -> TorchExecutor:
    return TorchExecutor(EngineConfig("smollm2", num_blocks=64, **settings))


def tokenizer_of(made: TorchExecutor) -> Tokenizer:
    return Tokenizer.from_str(parse_card(made.facts.card).tokenizer_json.decode())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_stages_know_the_capital(dtype: str) -> None:
    stages = [executor(dtype=dtype) for _ in range(2)]
    tokenizer = tokenizer_of(stages[0])
    prompt = tokenizer.encode(PROMPT.format(CAPITAL)).ids
    output = Driver(stages, (18, 30), block_size=16).run([Sequence(prompt, 8)], chunk=13)[0]
    assert tokenizer.decode(output, skip_special_tokens=False) == "The capital of France is Paris.<|im_end|>"


def transformers_model() -> Any:
    """Expanded and put in order by transformers' own code."""
    hf = tiny_models.transformers()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = hf.LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
            tie_word_embeddings=True,
        )
        with torch.device("meta"):
            model = hf.LlamaForCausalLM(config)
        load: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils").load_gguf_checkpoint
        tensors = load(str(find_model("smollm2")), return_tensors=True, model_to_load=model)["tensors"]
        model = hf.LlamaForCausalLM(config).eval()
        missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    model.tie_weights()
    return model


@pytest.mark.slow
def test_tokens_are_those_of_transformers() -> None:
    stages = [executor() for _ in range(2)]
    tokenizer = tokenizer_of(stages[0])
    prompts = [
        tokenizer.encode(PROMPT.format(text)).ids
        for text in (CAPITAL, "Write a haiku about the sea.", "Why is the sky blue? Answer in two sentences.")
    ]
    model = transformers_model()
    expected = [tiny_models.greedy(model, prompt, 32) for prompt in prompts]
    assert min(margin for _, margin in expected) > tiny_models.MARGIN_MIN
    outputs = Driver(stages, (18, 30), block_size=16).run([Sequence(p, 32) for p in prompts], chunk=20)
    assert outputs == [output for output, _ in expected]
