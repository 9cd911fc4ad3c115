"""Where a decode step's time goes, from the kernels to the gateway: what `shoal bench` measures and shows.

A worker alone says how long the parts of its step take and what the machine would allow; then the same number
of streams runs through the whole system, and their own ledger says what a step takes beside the computing.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from chassis import nats_bus
from shoal.client import Accepted, AsyncClient, Params
from shoal.launcher import Deployment, LaunchError, Plan, model_flags, precision_flags
from shoal.ledger import Ledger
from shoal.why import collect

WORKER_TIMEOUT_S = 600.0
TRACE_WAIT_S = 10.0
_ROOT = Path(__file__).resolve().parent.parent

# parts of a worker's step, as they are called here
PARTS = {
    "products": "products of the layers",
    "attention": "attention",
    "norms": "norms, rotations, residuals",
    "head": "final norm and head",
    "edges": "embedding, activations in and out",
    "wait": "threads waiting for each other",
    "compute": "layers and head, not told apart",
    "sampling": "sampling",
    "python": "Python in the worker",
}


@dataclass(frozen=True, slots=True)
class Asked:
    sequences: tuple[int, ...] = (1, 16)
    context_len: int = 128
    output_tokens: int = 64
    shared_len: int = 0  # tokens that all contexts begin with


@dataclass(frozen=True, slots=True)
class Outside:
    """Of a stream's mean step through the whole system, in microseconds."""

    step_us: float
    compute_us: float
    wait_us: float
    ring_us: float
    between_us: float


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    us: float
    share: float  # of the whole step
    bound_us: float | None = None


def worker_times(plan: Plan, asked: Asked) -> dict[str, Any]:
    """What `python -m shard_worker.step_times` says. Raises LaunchError."""
    flags = ["--threads", str(plan.threads), "--context-len", str(asked.context_len)]
    flags += ["--sequences", ",".join(map(str, asked.sequences)), "--shared-len", str(asked.shared_len)]
    flags += precision_flags(plan)
    named = dict(zip(*[iter(model_flags(plan.model))] * 2, strict=False))
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "shard_worker.step_times", "--model", named["--model"], *flags],
            capture_output=True,
            text=True,
            timeout=WORKER_TIMEOUT_S,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_WAIT_POLICY": "passive"},
            check=False,
        )
        told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except KeyError:
        raise LaunchError(f"{plan.model} has no weights to measure") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"a worker's steps took over {WORKER_TIMEOUT_S:g} s") from None
    except (IndexError, ValueError):
        lines = done.stderr.strip().splitlines()
        why = lines[-1] if lines else "without a word"
        raise LaunchError(f"the measurement ended with code {done.returncode}: {why}") from None
    if "error" in told:
        raise LaunchError(str(told["error"]))
    return told


def outside_of(ledger: Ledger, steps: int) -> Outside | None:
    """A stream's mean decode step; None when its steps are not known."""
    rows = iter(ledger.rows)
    decode = next((row for row in rows if row.name == "decode"), None)
    inner: dict[str, float] = {}
    for row in rows:
        if not row.inner:
            break
        inner[row.name] = row.us / steps
    if decode is None or not inner:
        return None
    return Outside(
        decode.us / steps, inner["compute"], inner["stage wait"], inner["ring"], inner["between steps"]
    )


def lines_of(point: Mapping[str, Any], outside: Outside | None) -> list[Line]:
    """A table whose shares are of the whole step: the worker's parts are scaled to what stages computed
    in the system, whose neighbours share the cores."""
    parts, bounds = point["parts_us"], point["bounds_us"]
    alone_us = sum(parts.values())
    computed_us = outside.compute_us if outside is not None else alone_us
    whole_us = outside.step_us if outside is not None else alone_us
    scale = computed_us / alone_us if alone_us else 0.0
    lines = [
        Line(PARTS[name], parts[name] * scale, parts[name] * scale / whole_us, bounds.get(name))
        for name in PARTS
        if name in parts
    ]
    if outside is not None:
        for name, us in (
            ("queued at a stage", outside.wait_us),
            ("transport and batcher", outside.ring_us),
            ("between steps", outside.between_us),
        ):
            lines.append(Line(name, us, us / whole_us))
    return lines


async def system_times(plan: Plan, asked: Asked) -> dict[int, Outside | None]:
    """Streams through a deployment of its own, as many as asked at once. Raises LaunchError, ShoalError."""
    batcher = (*plan.flags.get("batcher", ()), "--running-len-max", str(max(asked.sequences)))
    found: dict[int, Outside | None] = {}
    async with Deployment(replace(plan, flags={**plan.flags, "batcher": batcher})) as shoal:
        async with AsyncClient(shoal.address) as client:
            vocab_size = (await client.models())[0].vocab_size
            for number, count in enumerate(asked.sequences):
                prompts = _prompts(count, asked.context_len, vocab_size, number, asked.shared_len)
                if asked.shared_len:  # cached from then on
                    await _listen(client, prompts[0], 2)
                ids = await asyncio.gather(*(_listen(client, p, asked.output_tokens) for p in prompts))
                bus = await nats_bus.connect(shoal.nats_url, name="bench")
                try:
                    story = await collect(bus, ids[-1], wait_s=TRACE_WAIT_S)
                finally:
                    await bus.close()
                book = story.ledger()
                found[count] = outside_of(book, asked.output_tokens - 1) if book is not None else None
    return found


async def _listen(client: AsyncClient, prompt: Sequence[int], output_tokens: int) -> str:
    """The request's id, when it has ended."""
    params = Params(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
    request_id = ""
    async for event in client.generate(prompt, params):
        if isinstance(event, Accepted):
            request_id = event.request_id
    return request_id


def _prompts(count: int, length: int, vocab_size: int, salt: int, shared: int = 0) -> list[list[int]]:
    """All different from token `shared` on, so that none finds more of another's blocks."""
    low = min(1000, vocab_size // 2)
    span = vocab_size - low

    def token(i: int, j: int) -> int:
        return low + (salt * 7919 + i * 104_729 + j * 31 * (i + 1)) % span

    return [[token(0 if j < shared else i, j) for j in range(length)] for i in range(count)]


def report(told: Mapping[str, Any], outsides: Mapping[int, Outside | None]) -> str:
    """For people."""
    bounds = told["bounds"]
    reads = f"{bounds['read_bytes_per_s'] / 1e9:.1f} GB/s of memory read"
    products = "".join(
        f", {rate / 1e9:.0f} GFLOP/s in {name}" for name, rate in bounds["flops_per_s"].items()
    )
    texts = [f"this machine, {bounds['threads']} threads: {reads}{products}"]
    for point in told["points"]:
        outside = outsides.get(point["sequences"])
        step_us = outside.step_us if outside is not None else point["step_us"]
        rate = point["sequences"] * 1e6 / step_us
        texts.append(
            f"\n{point['sequences']} sequences, a step {step_us / 1e3:.2f} ms"
            f" ({point['step_us'] / 1e3:.2f} ms in a worker alone), {rate:.0f} tokens/s"
        )
        texts.append(f"  {'':36}{'us':>10}{'share':>8}{'bound':>10}")
        for line in lines_of(point, outside):
            bound = "" if line.bound_us is None else f"{line.bound_us:.0f}"
            texts.append(f"  {line.name:36}{line.us:>10.0f}{line.share:>8.1%}{bound:>10}")
    return "\n".join(texts)
