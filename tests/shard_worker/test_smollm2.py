"""The packaged model answers a chat prompt with the tokens that transformers gives on the same weights."""

import importlib
import warnings
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from chassis.messages.card import parse_card
from shard_worker.native import library
from shard_worker.torch_executor import EngineConfig, TorchExecutor
from shard_worker.weights import find_model
from tests.shard_worker import tiny_models
from tests.shard_worker.driver import Driver, Sequence
from tests.shard_worker.smollm2_answers import ANSWERS, PROMPT


def executor(**settings: Any) -> TorchExecutor:
    return TorchExecutor(EngineConfig("smollm2", num_blocks=64, **settings))


def tokenizer_of(made: TorchExecutor) -> Tokenizer:
    return Tokenizer.from_str(parse_card(made.facts.card).tokenizer_json.decode())


def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(PROMPT.format(question)).ids for question in ANSWERS]


def test_two_stages_give_the_answers() -> None:
    stages = [executor() for _ in range(2)]
    sequences = [Sequence(prompt, 12) for prompt in prompts(tokenizer_of(stages[0]))]
    outputs = Driver(stages, (18, 30), block_size=16).run(sequences, chunk=40)
    assert outputs == [answer[:12] for answer in ANSWERS.values()]


@pytest.mark.skipif(library.native() is None, reason="no compiler here")
def test_bfloat16_knows_the_capital() -> None:
    """A near tie at the first token: torch's products, rounded otherwise, begin in French."""
    stages = [executor(dtype="bfloat16", engine="native")]
    tokenizer = tokenizer_of(stages[0])
    output = Driver(stages, (30,), block_size=16).run([Sequence(prompts(tokenizer)[0], 8)], chunk=13)[0]
    assert tokenizer.decode(output, skip_special_tokens=False) == "The capital of France is Paris.<|im_end|>"


def test_bfloat16_answers_likewise() -> None:
    """The question whose answer is sure enough for eight bits of mantissa."""
    stages = [executor(dtype="bfloat16")]
    sky = prompts(tokenizer_of(stages[0]))[2]
    output = Driver(stages, (30,), block_size=16).run([Sequence(sky, 8)], chunk=13)[0]
    assert output == list(ANSWERS.values())[2][:8]


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
        with importlib.import_module("transformers.initialization").no_init_weights():  # drawing takes long
            model = hf.LlamaForCausalLM(config).eval()
        missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    model.tie_weights()
    return model


@pytest.mark.slow
def test_the_answers_are_those_of_transformers() -> None:
    model = transformers_model()
    for prompt, answer in zip(prompts(tokenizer_of(executor())), ANSWERS.values(), strict=True):
        output, margin = tiny_models.greedy(model, prompt, len(answer))
        assert margin > tiny_models.MARGIN_MIN
        assert output == answer
