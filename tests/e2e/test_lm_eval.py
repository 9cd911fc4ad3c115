"""lm-eval over /v1/completions: its numbers are those of transformers on the same weights.

It sends prompts as token ids, several in a call, and reads the log probabilities of what it sent.
"""

import asyncio
import json
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from chassis.messages.card import parse_card
from shoal.launcher import Plan
from tests.e2e.rig import ROOT, running
from tests.shard_worker.test_smollm2 import executor, transformers_model

LM_EVAL = ROOT / ".lm-eval" / "bin" / "lm_eval"
TASK = """
task: shoal_local
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
DOCS: list[dict[str, Any]] = [
    {"question": "The capital of France is", "choices": ["Paris", "a fish", "Berlin"], "answer": 0},
    {"question": "Two and two are", "choices": ["five", "four", "blue"], "answer": 1},
    {
        "question": "At night the sky is",
        "choices": ["dark", "a fisherman's breakfast", "Tuesday"],
        "answer": 0,
    },
    {"question": "Grüße aus", "choices": ["München", "🐟", "the of"], "answer": 0},
    {
        "question": "A fisherman mends his net before dawn. The sea is calm. His daughter brings him",
        "choices": ["bread and tea", "integers", "net net net"],
        "answer": 0,
    },
]
TOLERANCE = 2e-3  # of a sum over a choice's tokens, in float32

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not LM_EVAL.exists(), reason="make .lm-eval/.ready")]


def tokenizer_folder(folder: Path) -> Tokenizer:
    card = parse_card(executor().facts.card)
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(card.tokenizer_json)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": card.eos_token}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return Tokenizer.from_str(card.tokenizer_json.decode())


def reference(tokenizer: Tokenizer) -> list[list[tuple[float, bool]]]:
    """Of each choice: the sum of its tokens' log probabilities, and whether each is the likeliest."""
    model = transformers_model()
    told: list[list[tuple[float, bool]]] = []
    for doc in DOCS:
        given = tokenizer.encode(doc["question"], add_special_tokens=False).ids
        told.append([])
        for choice in doc["choices"]:
            ids = tokenizer.encode(f"{doc['question']} {choice}", add_special_tokens=False).ids
            assert ids[: len(given)] == given
            with torch.no_grad():
                logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)
            places = range(len(given), len(ids))
            total = sum(float(logprobs[i - 1, ids[i]]) for i in places)
            greedy = all(int(logprobs[i - 1].argmax()) == ids[i] for i in places)
            told[-1].append((total, greedy))
    return told


def test_log_likelihoods_are_those_of_transformers(runner: asyncio.Runner, tmp_path: Path) -> None:
    data = tmp_path / "docs.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "shoal_local.yaml").write_text(TASK.format(data=data))
    tokenizer = tokenizer_folder(tmp_path / "tokenizer")

    async def evaluate(address: str) -> str:
        given = {
            "base_url": f"http://{address}/v1/completions",
            "model": "smollm2",
            "tokenizer": str(tmp_path / "tokenizer"),
            "tokenizer_backend": "huggingface",
        }
        words = ["run", "--model", "local-completions", "--tasks", "shoal_local", "--batch_size", "4"]
        words += ["--model_args", ",".join(f"{k}={v}" for k, v in given.items())]
        words += [
            "--include_path",
            str(tmp_path / "tasks"),
            "--log_samples",
            "--output_path",
            str(tmp_path / "out"),
        ]
        env = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        env |= {"PATH": "/usr/bin:/bin", "OPENAI_API_KEY": "none"}
        process = await asyncio.create_subprocess_exec(
            str(LM_EVAL), *words, env=env, cwd=tmp_path, stdout=PIPE, stderr=STDOUT
        )
        try:
            said, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0, said.decode()[-4000:]
        return said.decode()

    with running(runner, Plan(run_dir=tmp_path / "run")) as shoal:
        shoal.run(evaluate(shoal.deployment.http_addresses[0]), limit_s=300)
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    found = sorted((json.loads(line) for line in samples.read_text().splitlines()), key=lambda s: s["doc_id"])
    wanted = reference(tokenizer)
    assert [doc["doc"]["question"] for doc in found] == [doc["question"] for doc in DOCS]
    for sample, choices in zip(found, wanted, strict=True):
        told = [(float(logprob), greedy in (True, "True")) for logprob, greedy in sample["filtered_resps"]]
        assert [greedy for _, greedy in told] == [greedy for _, greedy in choices]
        for (logprob, _), (want, _) in zip(told, choices, strict=True):
            assert abs(logprob - want) < TOLERANCE, (sample["doc"]["question"], logprob, want)
