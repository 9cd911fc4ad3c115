"""What a format of weights costs in quality and gains in memory and speed, against float32.

Perplexity is over the text in tests/data, in one context; agreement is the share of its places where the
likeliest next token is float32's. Memory is what the process took for weights, without KV and file pages.
Speed is the executor's alone, on one thread and in its processor time: wall time would measure neighbours.
Every format runs in a process of its own. The table in ARCHITECTURE.md is written anew. Gemma's rows need its
packages (`bench/gemma.py`); they are held against Gemma in float32.
"""

import json
import math
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import gemma, off_grid
from bench.quiet import watch_others
from bench.results_file import Sample, table, write

ROOT = Path(__file__).resolve().parent.parent
TEXT = ROOT / "tests" / "data" / "quality.txt"
DOCUMENT = ROOT / "ARCHITECTURE.md"
BEGIN, END = "<!-- made by: make bench ROWS=quality -->", "<!-- end of what is made -->"
BLOCK_SIZE_TOKENS, CHUNK = 16, 256
NUM_BLOCKS = 512
DECODE_CONTEXT, DECODE_STEPS, DECODE_ROUNDS = 128, 8, 5
BATCHES = (1, 16)


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    model: str  # "file": as packaged; "off grid": the same function from weights that lie anywhere; "gemma"
    dtype: str
    quantize: str
    four_bits: str = "Q4_1"  # what int4 becomes
    int8: bool = False  # activations

    @property
    def key(self) -> str:
        bits = f".{self.four_bits.lower()}" if self.quantize == "int4" else ""
        rounded = ".int8_activations" if self.int8 else ""
        return f"{self.model.replace(' ', '_')}.{self.dtype}.{self.quantize}{bits}{rounded}"


ROWS = (
    Row("float32", "file", "float32", "none"),
    Row("bfloat16", "file", "bfloat16", "none"),
    Row("as packed (Q4_1, embedding Q8_0)", "file", "bfloat16", "keep"),
    Row("the same, 8-bit activations", "file", "bfloat16", "keep", int8=True),
    Row("float32, off the grid", "off grid", "float32", "none"),
    Row("int8 (Q8_0)", "off grid", "bfloat16", "int8"),
    Row("the same, 8-bit activations", "off grid", "bfloat16", "int8", int8=True),
    Row("int4 (Q4_1, embedding Q8_0)", "off grid", "bfloat16", "int4"),
    Row("the same, 8-bit activations", "off grid", "bfloat16", "int4", int8=True),
    Row("Q4_0 instead, embedding Q8_0", "off grid", "bfloat16", "int4", "Q4_0"),
    Row("the same, 8-bit activations", "off grid", "bfloat16", "int4", "Q4_0", int8=True),
    Row("Gemma 3 270M, float32", "gemma", "float32", "none"),
    Row("Gemma 3 270M, bfloat16", "gemma", "bfloat16", "none"),
    Row("Gemma 3 270M, as packed (Q4_K, Q5_0, Q6_K, Q8_0)", "gemma", "bfloat16", "keep"),
    Row("the same, 8-bit activations", "gemma", "bfloat16", "keep", int8=True),
)
WITHOUT_GEMMA = "Gemma's rows are missing: its packages were not installed (`bench/gemma.py`)."


@dataclass(frozen=True, slots=True)
class Found:
    perplexity: float
    choices: list[int]  # likeliest token at every place
    weights_mb: float
    took_mb: float
    load_s: float
    tokens_per_s: dict[str, list[float]]  # by batch size


# ---- one row, in a process of its own ---------------------------------------------------------------


def measure(row: Row, path: str, threads: int) -> Found:
    from shard_worker import formats
    from shard_worker.executor import StageSpec
    from shard_worker.model.families import stage_weights
    from shard_worker.model.stage_weights import WeightFormat
    from shard_worker.torch_executor import EngineConfig, TorchExecutor

    formats.INT_FORMATS[4] = WeightFormat[row.four_bits]
    config = EngineConfig(
        path,
        dtype=row.dtype,
        quantize=row.quantize,
        int8_activations=row.int8,
        threads=threads,
        num_blocks=NUM_BLOCKS,
    )
    executor = TorchExecutor(config)
    num_layers = executor.facts.num_layers
    before = _anonymous_mb()
    start = time.perf_counter()
    executor.load(StageSpec(0, 1, 0, num_layers, BLOCK_SIZE_TOKENS, max(BATCHES), CHUNK))
    load_s = time.perf_counter() - start
    took = _anonymous_mb() - before
    weights = formats.kept_bytes(stage_weights(executor.checkpoint, 0, num_layers), row.dtype, row.quantize)
    ids = _ids(executor)
    perplexity, choices = _read(executor, ids)
    speed = {str(batch): _decode(executor, ids, batch) for batch in BATCHES}
    return Found(perplexity, choices, weights / 1e6, took, load_s, speed)


def _ids(executor: Any) -> list[int]:
    from tokenizers import Tokenizer

    from chassis.messages.card import parse_card

    card = parse_card(executor.facts.card)
    tokenizer = Tokenizer.from_str(card.tokenizer_json.decode())
    begin = card.bos_token if card.add_bos else ""
    return list(tokenizer.encode(begin + TEXT.read_text("utf-8"), add_special_tokens=False).ids)


def _read(executor: Any, ids: list[int]) -> tuple[float, list[int]]:
    """Perplexity over all but the first token, and the likeliest token at every place but the last."""
    from shard_worker.probe import ProbeRow, probe_inputs

    blocks = range(-(-len(ids) // BLOCK_SIZE_TOKENS))
    assert len(blocks) <= NUM_BLOCKS
    surprise, choices = 0.0, []
    for start in range(0, len(ids), CHUNK):
        chunk = ids[start : start + CHUNK]
        inputs = probe_inputs([ProbeRow(chunk, start, blocks)], BLOCK_SIZE_TOKENS)
        executor.stage.run(inputs, memoryview(b""))  # not the executor, which keeps only what samples
        following = ids[start + 1 : start + 1 + len(chunk)]
        places = np.arange(len(following), dtype=np.int64)
        logits = executor.logits(places).float().numpy()
        surprise += _surprise(logits, following)
        choices += logits.argmax(1).tolist()
    return math.exp(surprise / (len(ids) - 1)), choices


def _surprise(logits: NDArray[np.float32], following: list[int]) -> float:
    """Sum of the negative log probabilities."""
    top = logits.max(1, keepdims=True)
    total = np.log(np.exp(logits - top).sum(1, dtype=np.float64)) + top[:, 0]
    return float((total - logits[np.arange(len(following)), following]).sum())


def _decode(executor: Any, ids: list[int], batch: int) -> list[float]:
    """Tokens per second of processor time, once a round."""
    from shard_worker.probe import ProbeRow, probe_inputs

    per_row = -(-(DECODE_CONTEXT + DECODE_STEPS) // BLOCK_SIZE_TOKENS)
    rows = [range(i * per_row, (i + 1) * per_row) for i in range(batch)]
    steps = [
        probe_inputs([ProbeRow([ids[DECODE_CONTEXT + s]], DECODE_CONTEXT + s, r) for r in rows], 16)
        for s in range(DECODE_STEPS)
    ]
    rates = []
    for _ in range(DECODE_ROUNDS):
        start = time.process_time()
        for inputs in steps:
            executor.run(inputs, memoryview(b""))
        rates.append(batch * DECODE_STEPS / (time.process_time() - start))
    return rates


def _anonymous_mb() -> float:
    """Resident memory that is no file's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    raise LookupError("this process has no RssAnon")


# ---- all rows ---------------------------------------------------------------------------------------


def main(model: str = "smollm2", threads: int = 1) -> None:
    found: dict[Row, Found] = {}
    lacking = gemma.missing()
    with tempfile.TemporaryDirectory() as folder, watch_others() as others:
        off_grid.write(model, Path(folder))
        paths = {"file": model, "off grid": folder}
        if lacking is None:
            paths["gemma"] = str(gemma.write(Path(folder)))
        for row in ROWS:
            if row.model in paths:
                found[row] = _in_a_process(row, paths[row.model], threads)
                sys.stdout.write(f"{row.name}: perplexity {found[row].perplexity:.3f}\n")
                sys.stdout.flush()
    lines = _table(found)
    values = {
        f"quality.{row.key}.{what}": sample
        for row, one in found.items()
        for what, sample in _samples(one, reference_of(row, found)).items()
    }
    write("quality", values, {"others_cores": round(others.cores, 2), "threads": threads, "model": model})
    text = "\n".join("| " + " | ".join(line) + " |" for line in _ruled(lines))
    update(DOCUMENT, text if lacking is None else f"{text}\n\n{WITHOUT_GEMMA}")
    sys.stdout.write(table(lines) + f"\nothers used {others.cores:.2f} cores\n")
    if lacking is not None:
        sys.stdout.write(f"{lacking} is not installed: no rows of Gemma\n")


def reference_of(row: Row, found: dict[Row, Found]) -> Found:
    """The first row of the same model, whose tokens are the same: in float32."""
    return next(one for other, one in found.items() if (other.model == "gemma") == (row.model == "gemma"))


def _in_a_process(row: Row, path: str, threads: int) -> Found:
    asked = json.dumps({"row": asdict(row), "path": path, "threads": threads})
    done = subprocess.run(
        [sys.executable, "-m", "bench.quality", asked],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return Found(**json.loads(done.stdout.splitlines()[-1]))


def agreement(one: Found, reference: Found) -> float:
    same = sum(a == b for a, b in zip(one.choices, reference.choices, strict=True))
    return same / len(reference.choices)


def _samples(one: Found, reference: Found) -> dict[str, Sample]:
    return {
        "perplexity": Sample((one.perplexity,), "1"),
        "agreement": Sample((agreement(one, reference),), "ratio"),
        "weights_mb": Sample((one.weights_mb,), "MB"),
        "took_mb": Sample((one.took_mb,), "MB"),
        "load_s": Sample((one.load_s,), "s"),
        **{f"batch{b}_tokens_per_s": Sample(tuple(rates), "1/s") for b, rates in one.tokens_per_s.items()},
    }


def _table(found: dict[Row, Found]) -> list[list[str]]:
    head = [
        "weights",
        "perplexity",
        "same choice",
        "MB of weights",
        "MB resident",
        "tokens/s alone",
        "tokens/s of 16",
    ]
    lines = [head]
    for row, one in found.items():
        rates = [f"{median(one.tokens_per_s[str(batch)]):.0f}" for batch in BATCHES]
        same = f"{100 * agreement(one, reference_of(row, found)):.1f} %"
        lines.append(
            [row.name, f"{one.perplexity:.3f}", same, f"{one.weights_mb:.0f}", f"{one.took_mb:.0f}", *rates]
        )
    return lines


def _ruled(lines: list[list[str]]) -> list[list[str]]:
    return [lines[0], ["---"] * len(lines[0]), *lines[1:]]


def update(document: Path, text: str) -> None:
    """What is between the two marks of a document becomes `text`."""
    whole = document.read_text("utf-8")
    before, begin, rest = whole.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"{document.name} has no marks for what is made"
    document.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", "utf-8")


def _row_main(asked: str) -> None:
    given = json.loads(asked)
    found = measure(Row(**given["row"]), given["path"], given["threads"])
    sys.stdout.write(json.dumps(asdict(found)) + "\n")


if __name__ == "__main__":
    _row_main(sys.argv[1])
