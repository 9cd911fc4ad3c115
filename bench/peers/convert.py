"""A GGUF file as a Hugging Face folder, its packed weights expanded: what peers that read no GGUF are given.

Runs in the environment of the peer `transformers`: `python -m bench.peers.convert FILE FOLDER DTYPE`.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def main(file: Path, folder: Path, dtype_name: str) -> None:
    dtype = getattr(torch, dtype_name)
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    # weights are kept packed otherwise, and packed ones can't be saved
    packed = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, quantization_config=packed)
    model = model.to(dtype)
    model.config.dtype = dtype
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
