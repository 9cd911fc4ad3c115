"""Models that no file here describes give transformers' tokens by their own code, whole and in stages."""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from shard_worker.check import look, try_out
from shard_worker.executor import LoadFailed, StageSpec
from shard_worker.torch_executor import EngineConfig, TorchExecutor
from shard_worker.weights import open_checkpoint
from tests.shard_worker import tiny_models
from tests.shard_worker.driver import Driver, Sequence

torch.set_num_threads(1)
NUM_OUTPUT = 6
LENGTHS = (1, 19, 40)
LAYERS = {"num_hidden_layers": 3}
# Each has something that a stage could get wrong: where norms stand, scales before, in and after the layers,
# layers that run attention and MLP side by side, rotary over a part, layer norms, windows by layer.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo2": ("olmo2", LAYERS),
    "granite": (
        "granite",
        LAYERS
        | {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "logits_scaling": 2.0,
            "attention_multiplier": 0.2,
            "tie_word_embeddings": False,
        },
    ),
    "stablelm": ("stablelm", LAYERS | {"use_parallel_residual": True, "tie_word_embeddings": False}),
    "cohere2": ("cohere2", {"num_hidden_layers": 4, "sliding_window": 7, "head_dim": 8, "logit_scale": 1.0}),
    "phi": ("phi", LAYERS | {"tie_word_embeddings": False, "qk_layernorm": True}),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    model_type, changes = CASES[request.param]
    path = tmp_path_factory.mktemp("model")
    return path, tiny_models.make_small(path, model_type, **changes)


def executors(path: Path, count: int, **settings: Any) -> list[TorchExecutor]:
    if not (path / "tokenizer.json").exists():
        tiny_models.save_tokenizer(path, tiny_models.SMALL_VOCAB)
    config = EngineConfig(str(path), num_blocks=100, digest_cache_dir=str(path / "digests"), **settings)
    return [TorchExecutor(config) for _ in range(count)]


def test_tokens_are_those_of_transformers(case: tuple[Path, Any]) -> None:
    path, model = case
    draw = np.random.default_rng(5)
    prompts = [draw.integers(3, tiny_models.SMALL_VOCAB, n).tolist() for n in LENGTHS]
    answers = [tiny_models.greedy(model, prompt, NUM_OUTPUT) for prompt in prompts]
    assert min(margin for _, margin in answers) > tiny_models.MARGIN_MIN
    num_layers = model.config.num_hidden_layers
    for ends, chunk in (((num_layers,), 64), ((1, num_layers), 7), ((1, 2, num_layers), 7)):
        pipeline = Driver(executors(path, len(ends)), ends, step_tokens=64)
        outputs = pipeline.run([Sequence(prompt, NUM_OUTPUT) for prompt in prompts], chunk)
        assert outputs == [output for output, _ in answers]


def test_a_family_of_ours_runs_that_way_when_asked(tmp_path: Path) -> None:
    model = tiny_models.make_small(tmp_path, "gemma3_text", num_hidden_layers=7, sliding_window=9)
    prompt = list(range(3, 43))
    output, margin = tiny_models.greedy(model, prompt, NUM_OUTPUT)
    assert margin > tiny_models.MARGIN_MIN
    stages = executors(tmp_path, 2, engine="transformers")
    assert Driver(stages, (4, 7)).run([Sequence(prompt, NUM_OUTPUT)], 11) == [output]


def test_facts_are_those_of_the_model(tmp_path: Path) -> None:
    model = tiny_models.make_small(tmp_path, "granite", tie_word_embeddings=False)
    facts = executors(tmp_path, 1)[0].facts
    layer = sum(p.numel() for p in model.model.layers[0].parameters() if p.ndim > 1)
    assert facts.head_cost_layers == pytest.approx(80 * 32 / layer)
    assert (facts.num_layers, facts.activation_bytes, facts.context_len_max) == (4, 32 * 4, 128)


def test_a_check_measures_it_as_any_other(tmp_path: Path) -> None:
    tiny_models.make_small(tmp_path, "olmo2")
    tiny_models.save_tokenizer(tmp_path, tiny_models.SMALL_VOCAB)
    config = EngineConfig(str(tmp_path), num_blocks=256, digest_cache_dir=str(tmp_path / "digests"))
    executor = TorchExecutor(config)
    assert look(executor).num_layers == 4
    run = try_out(executor, config, 2)
    assert [(s.first_layer, s.end_layer) for s in run.stages][-1][1] == 4
    layer = executor.checkpoint.config.layer_params
    assert [s.weight_bytes for s in run.stages] == [
        4 * ((s.end_layer - s.first_layer) * layer + 80 * 32) for s in run.stages
    ]


def test_a_cut_changes_no_number_in_bfloat16(tmp_path: Path) -> None:
    """Even where the processor calculates in float32: what crosses the cut was rounded there anyway."""
    tiny_models.make_small(tmp_path, "olmo2")
    seen = []
    for ends in ((4,), (1, 3, 4)):
        stages = executors(tmp_path, len(ends), dtype="bfloat16")
        Driver(stages, ends).run([Sequence(list(range(3, 30)), 4)], 10)
        seen.append(stages[-1].logits(np.array([0], np.int64)))
    assert torch.equal(*seen)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "an encoder": ("t5", {"d_model": 32, "num_heads": 4}, "it has an encoder"),
    "no list of layers": ("gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 2}, "it has no list of layers"),
    "no decoder": ("vit", {}, "not a decoder"),
    "latent attention": ("deepseek_v3", {"hidden_size": 32}, "latent attention"),
    "state space": ("mamba", {"hidden_size": 32, "num_hidden_layers": 2}, "layer"),
    "a moving rope": (
        "olmo2",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "rope type dynamic changes",
    ),
    "sizes that differ by layer": ("gemma4_text", {"num_hidden_layers": 6}, "per-layer attribute"),
    "pictures": ("llava", {}, "it takes more than text"),
}


@pytest.mark.parametrize("which", REFUSED)
def test_what_can_not_work_is_refused(tmp_path: Path, which: str) -> None:
    model_type, changes, message = REFUSED[which]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type} | changes))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(LoadFailed, match=message) as refusal:
        open_checkpoint(tmp_path)
    assert str(tmp_path) in str(refusal.value)


def test_heads_that_nobody_told_of_are_refused_by_the_trial(tmp_path: Path) -> None:
    tiny_models.make_small(tmp_path, "persimmon")  # which knows no num_key_value_heads
    with pytest.raises(LoadFailed, match="it has 4 KV heads, where its configuration says 2"):
        executors(tmp_path, 1)[0].load(StageSpec(0, 1, 0, 4, 4, 8, 64))


def test_sinks_are_refused_by_the_trial(tmp_path: Path) -> None:
    tiny_models.make_small(tmp_path, "gpt_oss", num_local_experts=2, num_experts_per_tok=1, head_dim=8)
    with pytest.raises(LoadFailed, match=r"model_type 'gpt_oss' can't be served: its attention wants"):
        executors(tmp_path, 1)[0].load(StageSpec(0, 1, 0, 4, 4, 8, 64))


def test_code_that_comes_with_a_model_is_never_run(tmp_path: Path) -> None:
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "code.MyConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass MyConfig: pass\n")
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(LoadFailed, match="model_type 'mine' is not one of .* transformers can't read"):
        open_checkpoint(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_tensors_must_fit(tmp_path: Path) -> None:
    tiny_models.make_small(tmp_path, "olmo2")
    spec = StageSpec(1, 2, 2, 4, 4, 8, 64)
    whole = load_file(tmp_path / "model.safetensors")
    name = "model.layers.3.mlp.up_proj.weight"
    for tensors, message in [
        ({n: t for n, t in whole.items() if n != name}, f"no tensor {name}"),
        (whole | {name: whole[name][1:].clone()}, f"{name} has shape"),
        (whole | {f"{name}_scale": torch.ones(1)}, "has no meaning to transformers"),
    ]:
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(LoadFailed, match=message):
            executors(tmp_path, 1)[0].load(spec)


def test_without_the_library_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_models.make_small(tmp_path, "olmo2")

    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(LoadFailed, match=r"pip install 'shoal\[transformers\]'"):
        open_checkpoint(tmp_path)
