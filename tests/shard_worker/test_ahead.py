"""Steps sent before their tokens are known: what tables refuse, and that no token is another for it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from chassis.messages import BadMessage
from chassis.messages import pipeline as p
from chassis.messages.sampling import Sampling, Shaping
from shard_worker.executor import Executor, StageSpec, StepInputs
from shard_worker.fake_model import EOS_ID, FakeConfig, FakeExecutor
from shard_worker.inputs import SlotTables, TableLimits, Tables
from shard_worker.native import library
from shard_worker.native.tables import NativeTables
from shard_worker.torch_executor import EngineConfig, TorchExecutor
from tests.shard_worker import tiny_models
from tests.shard_worker.ranks_rig import stages

BLOCK, NUM_BLOCKS, CONTEXT, SLOTS = 4, 80, 64, 6
NOTHING = memoryview(b"")
MAKERS = ("portable", "compiled")


def make_tables(kind: str, whole: bool = True, vocab_size: int = 300) -> Tables:
    limits = TableLimits(SLOTS, BLOCK, NUM_BLOCKS, CONTEXT, 128, vocab_size, whole)
    if kind == "portable":
        return SlotTables(limits)
    found = library.native()
    if found is None:
        pytest.skip("there is no compiled code")
    return NativeTables(limits, found)


def step(number: int, *rows: dict[str, Any], freed: tuple[int, ...] = ()) -> p.PackedStep:
    return p.read_step(
        p.build_step(
            1,
            number,
            slots=[r["slot"] for r in rows],
            num_tokens=[len(r["ids"]) for r in rows],
            starts=[r["start"] for r in rows],
            flags=[p.FLAG_FRESH * ("fresh" in r) | p.FLAG_SAMPLES * r.get("samples", True) for r in rows],
            output_index=[r.get("index", 0) for r in rows],
            token_ids=[i for r in rows for i in r["ids"]],
            table_lens=[len(r.get("blocks", ())) for r in rows],
            table=[b for r in rows for b in r.get("blocks", ())],
            fresh=[r["fresh"] for r in rows if "fresh" in r],
            freed_slots=freed,
        )
    )


PLAIN = p.SlotStart(Sampling(0.5, 3, 0.75), 7)
FIRST = {"slot": 3, "start": 0, "ids": [5, 6, 7], "blocks": [9], "fresh": PLAIN}
SECOND = {"slot": 1, "start": 0, "ids": [8], "blocks": [4], "fresh": PLAIN}
OPEN = {"slot": 3, "start": 3, "ids": [p.LAST_SAMPLED]}


# ---- tables ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MAKERS)
def test_an_open_id_is_laid_out_with_its_slot(kind: str) -> None:
    tables = make_tables(kind)
    first = tables.take(step(1, FIRST, SECOND))
    assert first.ahead is None and first.sample_slots is not None
    assert first.sample_slots.tolist() == [3, 1]
    chunk = {"slot": 5, "start": 0, "ids": [1, 2], "blocks": [2], "fresh": PLAIN, "samples": False}
    second = tables.take(step(2, chunk, {**OPEN, "slot": 1, "start": 1}, OPEN))
    assert second.ahead is not None and second.ahead.shaping is None
    assert second.token_ids.tolist() == [1, 2, 0, 0]
    assert (second.ahead.places.tolist(), second.ahead.slots.tolist()) == ([2, 3], [1, 3])
    assert second.positions.tolist() == [0, 1, 1, 3]


REFUSED: dict[str, tuple[str, tuple[dict[str, Any], ...]]] = {
    "two tokens": ("not one sampling token", ({**OPEN, "ids": [1, p.LAST_SAMPLED], "blocks": [2]},)),
    "it does not sample": ("not one sampling token", ({**OPEN, "samples": False},)),
    "fresh": ("not one sampling token", ({**FIRST, "ids": [p.LAST_SAMPLED]},)),
    "it goes back": ("none that was sampled", ({**OPEN, "start": 2},)),
    "its slot did not sample": ("none that was sampled", ({**OPEN, "slot": 1, "start": 1},)),
    "its slot is nobody's": ("slot that nobody started", ({**OPEN, "slot": 2, "start": 0},)),
    "it skips": ("skips positions", ({**OPEN, "start": 4, "blocks": [2]},)),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("why", REFUSED)
def test_what_nobody_sampled_is_refused_and_changes_nothing(kind: str, why: str) -> None:
    tables = make_tables(kind)
    tables.take(step(1, FIRST, {**SECOND, "samples": False}))
    words, rows = REFUSED[why]
    with pytest.raises(BadMessage, match=words):
        tables.take(step(2, *rows))
    assert tables.take(step(2, OPEN)).ahead is not None


@pytest.mark.parametrize("kind", MAKERS)
def test_a_part_of_a_pipeline_takes_no_open_ids(kind: str) -> None:
    tables = make_tables(kind, whole=False)
    assert tables.take(step(1, FIRST)).sample_slots is None
    with pytest.raises(BadMessage, match="left open on one of several stages"):
        tables.take(step(2, OPEN))


@pytest.mark.parametrize("kind", MAKERS)
def test_a_slot_given_up_has_sampled_nothing(kind: str) -> None:
    tables = make_tables(kind)
    tables.take(step(1, FIRST))
    with pytest.raises(BadMessage, match="nobody started"):
        tables.take(step(2, OPEN, freed=(3,)))
    tables.take(step(2, {**FIRST, "samples": False}, freed=(3,)))  # another sequence's, not yet whole
    with pytest.raises(BadMessage, match="none that was sampled"):
        tables.take(step(3, OPEN))


# ---- tokens ----------------------------------------------------------------------------------------


@dataclass
class Asked:
    prompt: list[int]
    start: p.SlotStart
    output: list[int] = field(default_factory=list)
    told: list[object] = field(default_factory=list)


def asked(vocab_size: int) -> list[Asked]:
    """Greedy, drawn, and of every kind whose numbers follow the ids so far, or do not."""
    shapings = [
        (Sampling(0.0, 0, 1.0), 0),
        (Sampling(0.9, 40, 0.95), 0),
        (Sampling(1.2, 0, 1.0, shaping=Shaping(repetition_penalty=1.4)), 0),
        (Sampling(0.8, 0, 1.0, Shaping(frequency_penalty=0.7, bad_words=((7,), (9, 11))), logprobs=2), 4),
        (Sampling(1.0, 0, 1.0, Shaping(min_p=0.02, logit_bias=((7, 3.0),))), 3),
        (Sampling(0.0, 0, 1.0, logprobs=3), 0),
    ]
    made = []
    for slot, (sampling, min_tokens) in enumerate(shapings):
        prompt = [(slot * 37 + 11 * i) % vocab_size for i in range(3 + 2 * slot)]
        follows = sampling.shaping is not None and sampling.shaping.follows
        prompt_len, stop_ids = len(prompt) if follows else 0, (EOS_ID,) if min_tokens else ()
        start = p.SlotStart(sampling, slot, prompt_len, min_tokens=min_tokens, stop_ids=stop_ids)
        made.append(Asked(prompt, start))
    return made


def plan(asks: list[Asked], num_steps: int, ahead: bool) -> Iterator[p.PackedStep]:
    """The batcher's steps; `ahead`: drawn one before the last one's tokens are there."""
    for index in range(num_steps):
        rows = []
        for slot, ask in enumerate(asks):
            blocks = list(range(slot * 13, slot * 13 + 13))
            if not index:
                whole = {"start": 0, "ids": ask.prompt, "blocks": blocks, "fresh": ask.start}
                rows.append({"slot": slot, **whole})
            else:
                at = len(ask.prompt) + index - 1
                token_id = p.LAST_SAMPLED if ahead else ask.output[index - 1]
                rows.append({"slot": slot, "start": at, "ids": [token_id], "index": index})
        yield step(index + 1, *rows)


def outputs(made: Executor, tables: Tables, vocab_size: int, ahead: bool, num_steps: int = 24) -> list[Asked]:
    made.load(StageSpec(0, 1, 0, made.facts.num_layers, BLOCK, SLOTS, 128))
    asks = asked(vocab_size)

    def run(inputs: StepInputs) -> None:
        output = made.run(inputs, NOTHING)
        for ask, token_id in zip(asks, output.token_ids.tolist(), strict=True):
            ask.output.append(token_id)
        if (told := output.logprobs) is not None:
            for place, logprob, rank in zip(told.places, told.logprobs.tolist(), told.ranks, strict=True):
                asks[place].told.append((logprob, rank))

    waiting: list[StepInputs] = []
    for packed in plan(asks, num_steps, ahead):
        waiting.append(tables.take(packed))
        if len(waiting) > ahead:
            run(waiting.pop(0))
    for inputs in waiting:
        run(inputs)
    return asks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny_models.make(path)
    return path


def executors(folder: Path, engine: str) -> tuple[Executor, int]:
    if engine == "fake":
        return FakeExecutor(FakeConfig(num_blocks=NUM_BLOCKS)), 512
    if engine == "native" and library.native() is None:
        pytest.skip("there is no compiled code")
    config = EngineConfig(
        str(folder), num_blocks=NUM_BLOCKS, engine=engine, digest_cache_dir=str(folder / "digests")
    )
    return TorchExecutor(config), 256


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("engine", ["fake", "native", "torch", "device"])
def test_no_token_is_another_for_being_sent_ahead(folder: Path, engine: str, kind: str) -> None:
    check_ahead(*executors(folder, engine), kind)


def check_ahead(made: Executor, vocab_size: int, kind: str) -> None:
    known = outputs(made, make_tables(kind, vocab_size=512), vocab_size, ahead=False)
    ahead = outputs(made, make_tables(kind, vocab_size=512), vocab_size, ahead=True)
    for one, other in zip(known, ahead, strict=True):
        assert one.output == other.output and one.told == other.told
    assert sum(len(ask.told) for ask in ahead) == 2 * 24, "two ask for log probabilities"
    assert len({tuple(ask.output) for ask in ahead}) == len(ahead)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("engine", ["torch", "device"])
def test_nor_over_ranks(folder: Path, engine: str, kind: str) -> None:
    config = EngineConfig(
        str(folder), num_blocks=NUM_BLOCKS, engine=engine, digest_cache_dir=str(folder / "digests")
    )
    with stages(config, 2, 1) as (leader,):
        check_ahead(leader, 256, kind)
