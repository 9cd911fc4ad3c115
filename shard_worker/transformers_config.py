"""What a model that no file here describes is made of, as the `transformers` library reads its folder.

The library is imported only when such a model is opened. Code that comes with a model is never run.
"""

import importlib
import warnings
from pathlib import Path
from typing import Any

import torch

from shard_worker.executor import LoadFailed
from shard_worker.model.config import ModelConfig

FAMILY = "transformers"  # of every ModelConfig from here
MOVING_ROPES = ("dynamic", "longrope")  # whose frequencies depend on the longest sequence of a step
KNOWN_LAYERS = ("full_attention", "sliding_attention")


def library() -> Any:
    """Raises LoadFailed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            module: Any = importlib.import_module("transformers")
        except ImportError:
            raise LoadFailed(
                "a model of this kind is run by the transformers library, which is not installed: "
                "pip install 'shoal[transformers]'"
            ) from None
    module.logging.set_verbosity_error()
    return module


def read_config(path: Path) -> Any:
    """The library's configuration of a folder. Raises LoadFailed, also for what can't be served."""
    hf = library()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = hf.AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # whatever its code raises on a file from outside
        raise LoadFailed(f"transformers can't read config.json: {first_line(error)}") from None
    if (reason := _unservable(hf, config)) is not None:
        raise LoadFailed(f"model_type {config.model_type!r} can't be served: {reason}")
    return config


def _unservable(hf: Any, config: Any) -> str | None:
    """Why not; None: it can, as far as its configuration tells."""
    if getattr(config, "is_encoder_decoder", False):
        return "it has an encoder"
    if config.get_text_config() is not config:
        return "it takes more than text"
    if type(config) not in hf.MODEL_FOR_CAUSAL_LM_MAPPING:
        return "it is not a decoder that predicts the next token"
    if getattr(config, "quantization_config", None):
        return "its weights are quantised"
    if any(getattr(config, key, None) for key in ("kv_lora_rank", "q_lora_rank")):
        return "its cache holds something else than keys and values (latent attention)"
    kinds = getattr(config, "layer_types", None) or ()
    if strange := [kind for kind in kinds if kind not in KNOWN_LAYERS]:
        return f"it has layers of type {strange[0]!r}"
    if moving := _rope_types(config).intersection(MOVING_ROPES):
        return f"rope type {min(moving)} changes with the longest sequence of a step"
    return None


def _rope_types(config: Any) -> set[str]:
    """Of all layers, or of each kind of layer."""
    ropes = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in ropes.values() if isinstance(value, dict)]
    return {str(rope.get("rope_type")) for rope in (nested or [ropes])}


def empty_model(config: Any, dtype: torch.dtype, attention: str, device: str) -> Any:
    """The library's model with nothing in its weights; what constructors compute is there. Raises LoadFailed.

    On "cpu" the weights' memory is asked for, but not touched: who replaces a module never pays for it.
    """
    hf = library()
    no_weights = importlib.import_module("transformers.initialization").no_init_weights
    try:
        with warnings.catch_warnings(), torch.device(device), no_weights():
            warnings.simplefilter("ignore")
            model = hf.AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
            )
    except Exception as error:
        raise LoadFailed(f"model_type {config.model_type!r}: {first_line(error)}") from None
    return model.eval()


def layers_of(model: Any) -> Any:
    """The list that its body goes through. Raises LoadFailed."""
    layers = getattr(getattr(model, model.base_model_prefix, None), "layers", None)
    if not isinstance(layers, torch.nn.ModuleList) or len(layers) != model.config.num_hidden_layers:
        raise LoadFailed(f"model_type {model.config.model_type!r} can't be served: it has no list of layers")
    return layers


def config_from_transformers(path: Path) -> ModelConfig:
    """Sizes for KV memory, activations and the split; the library knows the rest. Raises LoadFailed."""
    config = read_config(path)
    model = empty_model(config, torch.float32, "eager", "meta")
    layers = layers_of(model)
    sizes = [sum(p.numel() for p in layer.parameters() if p.ndim > 1) for layer in layers]
    heads, hidden = _size(config, "num_attention_heads"), _size(config, "hidden_size")
    return ModelConfig(
        family=FAMILY,
        hidden_size=hidden,
        num_layers=len(layers),
        num_heads=heads,
        num_kv_heads=_size(config, "num_key_value_heads", heads),
        head_dim=_size(config, "head_dim", hidden // max(1, heads)),
        intermediate_size=_size(config, "intermediate_size", 4 * hidden),
        vocab_size=_size(config, "vocab_size"),
        context_len_max=_size(config, "max_position_embeddings"),
        tied_head=bool(getattr(config, "tie_word_embeddings", False)),
        params_per_layer=max(1, sum(sizes) // len(sizes)),
    )


def _size(config: Any, name: str, default: int | None = None) -> int:
    try:
        value = getattr(config, name, None)
    except Exception as error:  # some models have other sizes in every layer, and say so like this
        raise LoadFailed(f"model_type {config.model_type!r} can't be served: {first_line(error)}") from None
    value = default if value is None else value
    if not isinstance(value, int):
        raise LoadFailed(f"model_type {config.model_type!r} can't be served: its {name} is {value!r}")
    return value


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
