"""The fake model's tokens are its oracle's, however layers and prompts are split, and only then."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from chassis.wire import pipeline_pb2 as pb
from shard_worker import fake_model as fm
from shard_worker.executor import LoadFailed, StageSpec, StepInputs

BLOCK = 4
CONFIG = fm.FakeConfig(num_layers=6, num_blocks=64)


def stages(*ends: int) -> list[fm.FakeExecutor]:
    made = []
    for i, (first, end) in enumerate(zip((0, *ends), ends, strict=False)):
        executor = fm.FakeExecutor(CONFIG)
        executor.load(StageSpec(i, len(ends), first, end, BLOCK, 8, 256))
        made.append(executor)
    return made


def step(
    rows: list[tuple[list[int], int, list[int]]], temperature: float = 0.0, seed: int = 0, index: int = 0
) -> StepInputs:
    """Rows of (token ids, start, table); every row samples."""
    counts = [len(ids) for ids, _, _ in rows]
    positions = np.concatenate([np.arange(s, s + len(ids)) for ids, s, _ in rows])
    tables = np.zeros((len(rows), max(len(t) for _, _, t in rows)), np.int32)
    for i, (_, _, table) in enumerate(rows):
        tables[i, : len(table)] = table
    row_of = np.repeat(np.arange(len(rows)), counts)
    n = len(rows)
    return StepInputs(
        token_ids=np.concatenate([np.array(ids, np.uint32) for ids, _, _ in rows]),
        positions=positions.astype(np.int32),
        row_offsets=np.array([0, *np.cumsum(counts)], np.int32),
        context_lens=np.array([s + len(ids) for ids, s, _ in rows], np.int32),
        kv_slots=tables[row_of, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK,
        block_tables=tables,
        sample_rows=np.arange(n, dtype=np.int32),
        temperature=np.full(n, temperature, np.float32),
        top_k=np.zeros(n, np.int32),
        top_p=np.ones(n, np.float32),
        seeds=np.full(n, seed, np.uint64),
        output_index=np.full(n, index, np.int32),
    )


def run(executors: list[fm.FakeExecutor], inputs: StepInputs) -> list[int]:
    activations = memoryview(b"")
    for executor in executors:
        output = executor.run(inputs, activations)
        activations = output.activations
    return [int(t) for t in output.token_ids]


@given(
    prompt=st.lists(st.integers(0, 511), min_size=1, max_size=30),
    cut=st.integers(1, 30),
    ends=st.sampled_from([(6,), (3, 6), (1, 2, 6)]),
    temperature=st.sampled_from([0.0, 0.7]),
    seed=st.integers(0, (1 << 64) - 1),
    order=st.permutations(range(64)),
)
@settings(deadline=None, derandomize=True, max_examples=60)
def test_tokens_are_the_oracles(
    prompt: list[int], cut: int, ends: tuple[int, ...], temperature: float, seed: int, order: list[int]
) -> None:
    """Any split, any chunking, any order of blocks."""
    executors, table = stages(*ends), order[:16]
    expected = fm.oracle(prompt, seed, temperature, 5, num_layers=6)
    ids = list(prompt)
    if cut < len(prompt):
        run(executors, step([(prompt[:cut], 0, table)]))
        start = cut
    else:
        start = 0
    output: list[int] = []
    for index in range(5):
        output += run(executors, step([(ids[start:], start, table)], temperature, seed, index))
        start = len(ids)
        ids.append(output[-1])
    assert output == expected


def test_rows_do_not_disturb_each_other() -> None:
    prompts = [[1, 2, 3, 4, 5], [9], [7] * 13]
    rows = [(p, 0, [4 * i + j for j in range(4)]) for i, p in enumerate(prompts)]
    assert run(stages(2, 6), step(rows)) == [fm.oracle(p, 0, 0.0, 1, 6)[0] for p in prompts]


@pytest.mark.parametrize("table", [[2, 1, 3], [9, 2, 3], [1, 2, 9]])
def test_a_wrong_table_changes_the_token(table: list[int]) -> None:
    prompt = list(range(9))
    executors = stages(6)
    run(executors, step([(prompt[:8], 0, [1, 2, 3])]))
    right = fm.oracle(prompt, 0, 0.0, 1, 6)
    differs = [run(executors, step([(prompt[8:], 8, t)])) != right for t in (table, [1, 2, 3])]
    assert differs == [table[:2] != [1, 2], False]


def test_load_keeps_memory_only_of_the_same_range() -> None:
    executor = fm.FakeExecutor(CONFIG)
    assert executor.load(StageSpec(0, 1, 0, 6, BLOCK, 8, 256)).kv_allocated
    run([executor], step([([5, 6, 7, 8], 0, [1])]))
    assert not executor.load(StageSpec(0, 1, 0, 6, BLOCK, 99, 512)).kv_allocated
    assert run([executor], step([([9], 4, [1, 2])])) == fm.oracle([5, 6, 7, 8, 9], 0, 0.0, 1, 6)
    assert executor.load(StageSpec(0, 2, 0, 3, BLOCK, 8, 256)).kv_allocated
    assert executor.load(StageSpec(0, 1, 0, 6, BLOCK, 8, 256)).kv_allocated
    assert run([executor], step([([9], 4, [1, 2])])) != fm.oracle([5, 6, 7, 8, 9], 0, 0.0, 1, 6)
    with pytest.raises(LoadFailed):
        executor.load(StageSpec(0, 1, 0, 7, BLOCK, 8, 256))


def test_seed_matters_only_when_sampling() -> None:
    drawn = {tuple(fm.oracle([1, 2], seed, 1.0, 8)) for seed in range(8)}
    greedy = {tuple(fm.oracle([1, 2], seed, 0.0, 8)) for seed in range(8)}
    assert len(drawn) == 8 and len(greedy) == 1


def test_ends_happen_but_rarely() -> None:
    ids = [t for seed in range(20) for t in fm.oracle([3], seed, 1.0, 100, num_layers=2)]
    assert 2 <= ids.count(fm.EOS_ID) <= 40 and max(ids) < fm.VOCAB_SIZE


def test_the_oracle_is_frozen() -> None:
    assert fm.oracle([1, 2, 3], 0, 0.0, 6) == FROZEN_GREEDY
    assert fm.oracle([1, 2, 3], 42, 1.0, 6) == FROZEN_DRAWN


FROZEN_GREEDY = [306, 403, 348, 318, 464, 413]
FROZEN_DRAWN = [419, 298, 460, 355, 396, 388]


def test_cost_is_slept_and_poison_fails() -> None:
    slept: list[float] = []
    config = fm.FakeConfig(num_layers=6, num_blocks=8, step_cost_s=1.0, token_cost_s=0.5, poison_id=77)
    executor = fm.FakeExecutor(config, slept.append)
    executor.load(StageSpec(0, 1, 0, 6, BLOCK, 8, 256))
    run([executor], step([([1, 2], 0, [0])]))
    assert slept == [2.0]
    with pytest.raises(RuntimeError):
        run([executor], step([([77], 0, [0])]))


def test_tokenizer_and_card_agree() -> None:
    card = pb.ModelCard.FromString(fm.FakeExecutor(CONFIG).facts.card)
    tokenizer = Tokenizer.from_str(card.tokenizer_json.decode())
    assert tokenizer.get_vocab_size() == card.vocab_size == 512
    text = "hello wörld <|im_end|> 😀 naïve\n€"
    ids = tokenizer.encode(text).ids
    assert fm.EOS_ID in ids and any(i > fm.EOS_ID for i in ids)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    ends = np.frombuffer(card.token_bytes_end, "<u4")
    starts = [0, *ends[:-1]]
    table = [card.token_bytes[a:b] for a, b in zip(starts, ends, strict=True)]
    assert tuple(table) == fm.TOKEN_BYTES
    plain = [i for i in ids if i != fm.EOS_ID]
    assert b"".join(table[i] for i in plain).decode() == text.replace("<|im_end|>", "")
    assert json.loads(card.config_json)["num_hidden_layers"] == 6
    assert list(card.eos_ids) == [256]
