"""Small random models, made by transformers and saved as Hugging Face directories; the reference for ours.

Weights are drawn wide, so that logits differ by more than rounding; who compares tokens asserts the margin.
"""

import importlib
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

MARGIN_MIN = 1e-3
VOCAB = 300
LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": None,
}


SMALL_VOCAB = 80
SMALL = {
    "vocab_size": SMALL_VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
HEAD_DIM_TOLD = ("llama", "mistral", "qwen3", "gemma2", "gemma3_text")  # the others divide


@cache
def transformers() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library: Any = importlib.import_module("transformers")
        library.logging.set_verbosity_error()
        library.logging.disable_progress_bar()
        return library


def make(path: Path, model_type: str = "llama", seed: int = 0, **changes: object) -> Any:
    """Saves a model, its configuration and a byte-level tokenizer; returns transformers' model."""
    hf = transformers()
    settings = LLAMA | changes
    if model_type != "llama":
        settings.pop("head_dim")
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = hf.AutoConfig.for_model(model_type, **settings)
        model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "norm" in name:
                    weight.uniform_(0.5, 1.5)
                if name.endswith("bias"):
                    weight.normal_(0, 0.3)
        model.save_pretrained(path, max_shard_size=changes.get("max_shard_size", "5GB"))
    save_tokenizer(path)
    return model


def make_small(path: Path, model_type: str, seed: int = 0, **changes: object) -> Any:
    """A model of any family, without a tokenizer: as small as may be, for what is tried on many."""
    hf = transformers()
    settings = SMALL | ({"head_dim": 8} if model_type in HEAD_DIM_TOLD else {}) | changes
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = hf.AutoConfig.for_model(model_type, **settings)
        model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "norm" in name:
                    weight.uniform_(*((-0.5, 0.5) if "gemma" in model_type else (0.5, 1.5)))
                if name.endswith("bias"):
                    weight.normal_(0, 0.3)
        model.save_pretrained(path)
    return model


def save_tokenizer(path: Path, size: int = 258) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: size - 2]
    vocab = {piece: i for i, piece in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"bos_token": "<bos>", "eos_token": {"content": "<eos>"}}')


def greedy(model: Any, prompt: list[int], num_output: int) -> tuple[list[int], float]:
    """transformers' generate, and the smallest distance between the two largest logits on the way."""
    ids = torch.tensor([prompt])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_output,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
    top = torch.stack(result.logits)[:, 0].float().topk(2).values
    return result.sequences[0, len(prompt) :].tolist(), float((top[:, 0] - top[:, 1]).min())
