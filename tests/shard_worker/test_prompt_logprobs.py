"""Log probabilities of prompts are those of transformers' logits, however the prompt is chunked and the model
split, alone or beside others, and nobody else pays for them.
"""

import math
from collections.abc import Iterator
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chassis.messages import BadMessage
from chassis.messages.pipeline import PackedStep, PromptAsk
from chassis.messages.step_result import PromptAnswer
from shard_worker import fake_model as fm
from shard_worker import sampler
from shard_worker.executor import I64, Executor, StepInputs
from shard_worker.native import library
from shard_worker.prompt_asks import answers, with_asks
from shard_worker.torch_executor import EngineConfig, TorchExecutor
from tests.shard_worker import tiny_models
from tests.shard_worker.driver import NOTHING, Driver, Row, Sequence, step_inputs

NUM_OUTPUT = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return tiny_models.make(folder)


def executors(folder: Path, engine: str, stages: int) -> list[Executor]:
    if engine == "native" and library.native() is None:
        pytest.skip("no compiler here")
    config = EngineConfig(
        str(folder), engine=engine, num_blocks=400, digest_cache_dir=str(folder / "digests")
    )
    return [TorchExecutor(config) for _ in range(stages)]


class Asking(Driver):
    """Asks about the prompts of some of its sequences, as the batcher does."""

    def __init__(self, executors: Items[Executor], ends: Items[int], asking: dict[int, int]) -> None:
        super().__init__(executors, ends)
        self.asking = asking  # how many of the likeliest, by id() of the sequence
        self.told: dict[int, list[tuple[int, Any]]] = {}

    def step(self, rows: Items[Row]) -> None:
        for row in rows:
            while len(row.sequence.table) * self.block_size < row.end:
                row.sequence.table.append(self.free.pop())
        asks = tuple(self._asks(rows))
        inputs = step_inputs(rows, self.block_size)
        if asks:
            inputs = with_asks(inputs, asks, tiny_models.VOCAB)
        carried = NOTHING
        for executor in self.executors:
            result = executor.run(inputs, carried)
            carried = memoryview(bytes(result.activations))
        assert (result.prompts is not None) == bool(asks)
        if result.prompts is not None:
            starts = np.array([row.sequence.computed for row in rows], "<u4").tobytes()
            for place, first, entries in answers(packed(starts, asks), result.prompts):
                found = self.told.setdefault(id(rows[place].sequence), [])
                found += enumerate(entries, first)
        token_ids = iter(result.token_ids.tolist())
        for row in rows:
            samples = row.samples
            row.sequence.computed = row.end
            if samples:
                row.sequence.output.append(next(token_ids))
        self.steps += 1

    def _asks(self, rows: Items[Row]) -> Iterator[PromptAsk]:
        for i, row in enumerate(rows):
            top, prompt = self.asking.get(id(row.sequence)), row.sequence.prompt
            start, last = row.sequence.computed, min(row.end, len(prompt) - 1)
            if top is not None and start < last:
                yield PromptAsk(i, 0, last - start, prompt[last], top)


def packed(starts: bytes, asks: tuple[PromptAsk, ...]) -> PackedStep:
    nothing = (b"",) * 7
    return PackedStep(1, 1, b"", b"", b"", starts, *nothing[:5], (), b"", (), asks)  # type: ignore[arg-type]


def reference(model: Any, prompt: list[int]) -> torch.Tensor:
    """[prompt - 1, vocabulary]: of each id after the first, given those before."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0, :-1].double()
    found: torch.Tensor = logits.log_softmax(dim=-1)
    return found


@pytest.mark.parametrize(("stages", "chunk"), [(1, 64), (1, 5), (2, 7), (3, 1), (3, 16)])
@pytest.mark.parametrize("engine", ["native", "torch", "device"])
def test_they_are_those_of_transformers(
    folder: Path, model: Any, engine: str, stages: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "PIECE_LOGITS", 4 * tiny_models.VOCAB)
    draw = np.random.default_rng(5)
    sequences = [Sequence(draw.integers(0, 256, n).tolist(), NUM_OUTPUT) for n in (33, 2, 1, 20, 9, 41)]
    plain = Asking(executors(folder, engine, stages), ENDS[stages], {})
    outputs = plain.run([Sequence(s.prompt, NUM_OUTPUT) for s in sequences], chunk)
    asking = {id(sequences[i]): top for i, top in ((0, 3), (1, 0), (2, 5), (4, 20), (5, 1))}
    pipeline = Asking(executors(folder, engine, stages), ENDS[stages], asking)
    assert pipeline.run(sequences, chunk) == outputs, "what is told changes nothing"
    assert pipeline.told.keys() == asking.keys() - {id(sequences[2])}, "one token has nothing before it"
    for sequence in sequences:
        top = asking.get(id(sequence))
        if top is None or len(sequence.prompt) == 1:
            continue
        told, wanted = pipeline.told[id(sequence)], reference(model, sequence.prompt)
        assert [index for index, _ in told] == list(range(1, len(sequence.prompt)))
        for (index, entry), row in zip(told, wanted, strict=True):
            token_id = sequence.prompt[index]
            assert entry.logprob == pytest.approx(float(row[token_id]), abs=2e-4)
            assert abs(entry.rank - int((row > row[token_id]).sum()) - 1) <= near(row, token_id)
            assert len(entry.top_ids) == top
            assert entry.top_logprobs == pytest.approx(row[list(entry.top_ids)].tolist(), abs=2e-4)
            assert entry.top_logprobs == pytest.approx(row.topk(top).values.tolist(), abs=2e-4)


ENDS = {1: (6,), 2: (2, 6), 3: (1, 4, 6)}


def near(row: torch.Tensor, token_id: int) -> int:
    """Ids whose rank rounding may exchange with this one's."""
    return int(((row - row[token_id]).abs() < 4e-4).sum()) - 1


def test_pieces_are_bounded_and_equal_the_whole() -> None:
    logits = torch.randn(100, 50, generator=torch.Generator().manual_seed(1))
    inputs = plain_inputs(list(range(50)) * 2, (PromptAsk(0, 0, 99, 7, 4),))
    asked: list[int] = []

    def logits_of(places: I64) -> torch.Tensor:
        asked.append(len(places))
        return logits[torch.from_numpy(places)]

    whole = sampler.prompt_logprobs(logits_of, inputs)
    assert asked == [1, 98]
    asked.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "PIECE_LOGITS", 7 * 50 + 1)
        pieces = sampler.prompt_logprobs(logits_of, inputs)
    assert max(asked) == 7 and sum(asked) == 99
    for name in ("places", "logprobs", "ranks", "top_lens", "top_ids", "top_logprobs"):
        assert getattr(whole, name).tolist() == getattr(pieces, name).tolist()


def plain_inputs(token_ids: list[int], asks: tuple[PromptAsk, ...]) -> StepInputs:
    row = Row(Sequence(token_ids, 1, table=[0] * 30), len(token_ids))
    return with_asks(step_inputs([row], 4), asks, 50)


@pytest.mark.parametrize(
    "asks",
    [
        (PromptAsk(1, 0, 1, 5, 0),),
        (PromptAsk(0, 0, 1, 5, 0), PromptAsk(0, 1, 1, 5, 0)),
        (PromptAsk(0, 0, 0, 5, 0),),
        (PromptAsk(0, 2, 2, 5, 0),),
        (PromptAsk(0, 0, 1, 50, 0),),
        (PromptAsk(0, 0, 1, 5, 21),),
    ],
)
def test_asks_that_no_row_can_answer_are_refused(asks: tuple[PromptAsk, ...]) -> None:
    with pytest.raises(BadMessage, match="prompt"):
        plain_inputs([1, 2, 3], asks)


def test_the_fake_models_are_its_oracles_and_depend_on_all_before() -> None:
    prompt = [5, 6, 7, 8, 9, 10, 11]
    config = fm.FakeConfig(num_layers=6, num_blocks=20)
    sequence = Sequence(prompt, 2)
    pipeline = Asking([fm.FakeExecutor(config) for _ in range(2)], (2, 6), {id(sequence): 2})
    pipeline.run([sequence, Sequence([3, 4, 5], 2)], chunk=3)
    told = [entry for _, entry in pipeline.told[id(sequence)]]
    assert told == fm.prompt_oracle(prompt, 2, 6)
    assert fm.prompt_oracle([4, *prompt[1:]], 2, 6)[-1] != told[-1]


def test_answers_name_places_in_the_prompt() -> None:
    inputs = plain_inputs(list(range(10)), (PromptAsk(0, 2, 3, 7, 0),))
    columns = sampler.prompt_logprobs(lambda places: torch.zeros(len(places), 50), inputs)
    starts = np.array([40], "<u4").tobytes()
    (answer,) = answers(packed(starts, inputs.prompt_asks), columns)
    assert isinstance(answer, PromptAnswer) and (answer.row, answer.first_index) == (0, 43)
    assert [entry.logprob for entry in answer.entries] == pytest.approx([-math.log(50)] * 3)
