"""Contents of KV blocks leave a stage's memory and come back, whoever keeps them, to the same tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shard_worker import fake_model
from shard_worker.device import choice
from shard_worker.executor import U8, Executor, Pages
from shard_worker.native import library
from shard_worker.torch_executor import EngineConfig, TorchExecutor
from tests.shard_worker import tiny_models
from tests.shard_worker.driver import Driver, Sequence

NUM_BLOCKS, LAYERS, OUTPUT = 60, 6, 6
KINDS: dict[str, tuple[str, str]] = {
    "torch": ("torch", "float32"),
    "torch narrow": ("torch", "bfloat16"),
    "native": ("native", "float32"),
    "native narrow": ("native", "bfloat16"),
    "device": ("device", "float32"),
    "device narrow": ("device", "float16"),
}
LAYOUTS = {
    "fake": "words.4",
    "torch": "float32.heads.2x8x4",
    "torch narrow": "bfloat16.heads.2x8x4",
    "native": "float32.columns.2x8x4",
    "native narrow": "bfloat16.columns.2x8x4",
    "device": "float32.tokens.2x8x4",
    "device narrow": "float16.tokens.2x8x4",
}
every = pytest.mark.parametrize("kind", ["fake", *KINDS])
Make = Callable[[], Executor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny_models.make(path)
    return path


@pytest.fixture
def make(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    if kind == "fake":
        config = fake_model.FakeConfig(num_layers=LAYERS, num_blocks=NUM_BLOCKS)
        return lambda: fake_model.FakeExecutor(config)
    engine, dtype = KINDS[kind]
    if engine == "native" and library.native() is None:
        pytest.skip("no compiler here")
    settings: dict[str, Any] = {"engine": engine, "dtype": dtype, "num_blocks": NUM_BLOCKS}
    if dtype == "float16":  # of devices; the engine `device` computes on the processor here
        monkeypatch.setattr("shard_worker.torch_executor.DTYPES", choice.DTYPES)
    return lambda: TorchExecutor(
        EngineConfig(str(folder), digest_cache_dir=str(folder / "digests"), **settings)
    )


def pages_of(executor: Executor) -> Pages:
    pages = executor.pages
    assert pages is not None
    return pages


def contents(driver: Driver, blocks: list[int]) -> U8:
    """[n, all layers, page_bytes], over the stages."""
    read = []
    for executor in driver.executors:
        pages = pages_of(executor)
        into = np.zeros((len(blocks), pages.form.num_layers, pages.form.page_bytes), np.uint8)
        pages.read(blocks, into)
        read.append(into)
    return np.concatenate(read, axis=1)


def put(driver: Driver, blocks: list[int], content: U8) -> None:
    first = 0
    for executor in driver.executors:
        pages = pages_of(executor)
        end = first + pages.form.num_layers
        pages.write(blocks, np.ascontiguousarray(content[:, first:end]))
        first = end


def prompt(seed: int, length: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(3, 250, length)]


@every
def test_form_names_what_is_kept(kind: str, make: Make) -> None:
    executor = make()
    assert executor.pages is None
    driver = Driver([executor], (LAYERS,))
    form = pages_of(executor).form
    assert (form.layout, form.num_layers) == (LAYOUTS[kind], LAYERS)
    assert form.block_bytes == LAYERS * form.page_bytes == contents(driver, [3]).nbytes


@every
def test_bits_come_back_and_no_other_block_changes(kind: str, make: Make) -> None:
    driver = Driver([make()], (LAYERS,))
    driver.run([Sequence(prompt(1, 50), OUTPUT), Sequence(prompt(2, 30), OUTPUT)])
    every_block = list(range(NUM_BLOCKS))
    before = contents(driver, every_block)
    told_apart = {page.tobytes() for page in before.reshape(-1, before.shape[-1]) if page.any()}
    assert len(told_apart) >= LAYERS * 20, "pages are filled, and no two alike"
    taken, given = [5, 17, 2], [40, 2, 33]
    put(driver, given, before[taken])
    after = contents(driver, every_block)
    assert np.array_equal(after[given], before[taken])
    others = [block for block in every_block if block not in given]
    assert np.array_equal(after[others], before[others])


@every
def test_some_layers_alone(kind: str, make: Make) -> None:
    driver = Driver([make()], (LAYERS,))
    driver.run([Sequence(prompt(1, 50), OUTPUT)])
    pages, before = pages_of(driver.executors[0]), contents(driver, [7, 8])
    part = np.zeros((2, 3, pages.form.page_bytes), np.uint8)
    pages.read([7, 8], part, 2)
    assert np.array_equal(part, before[:, 2:5])
    pages.write([8, 7], part, 3)
    after = contents(driver, [8, 7])
    assert np.array_equal(after[:, 3:], part) and np.array_equal(after[:, :3], before[::-1, :3])


@every
@pytest.mark.parametrize(
    ("ends", "other_ends"), [((6,), (6,)), ((2, 6), (6,)), ((6,), (1, 4, 6)), ((3, 6), (2, 6))]
)
def test_another_pipeline_goes_on_from_it(
    kind: str, make: Make, ends: tuple[int, ...], other_ends: tuple[int, ...]
) -> None:
    """What one split wrote, another reads in other blocks, to the same tokens as if it had computed all."""
    ids = prompt(3, 41)
    writer = Driver([make() for _ in ends], ends)
    first = Sequence(ids, OUTPUT)
    expected = writer.run([first])[0]
    whole = 40 // writer.block_size
    reader = Driver([make() for _ in other_ends], other_ends)
    reader.run([Sequence(prompt(4, 60), 3)])  # its memory is not empty, and other blocks are free
    table = [reader.free.pop() for _ in range(whole)]
    put(reader, table, contents(writer, first.table[:whole]))
    again = Sequence(ids, OUTPUT, table=list(table), computed=40)
    assert reader.run([again])[0] == expected
    assert np.array_equal(contents(reader, table), contents(writer, first.table[:whole]))


@every
def test_other_contents_give_other_tokens(kind: str, make: Make) -> None:
    """So that the test above proves something."""
    driver = Driver([make()], (LAYERS,))
    right, wrong = Sequence(prompt(5, 41), OUTPUT), Sequence(prompt(6, 41), OUTPUT)
    expected, _ = driver.run([right, wrong])
    table = [driver.free.pop() for _ in range(10)]
    put(driver, table, contents(driver, wrong.table[:10]))
    assert driver.run([Sequence(right.prompt, OUTPUT, table=table, computed=40)])[0] != expected


@every
def test_blocks_are_copied_in_all_layers(kind: str, make: Make) -> None:
    driver = Driver([make()], (LAYERS,))
    driver.run([Sequence(prompt(1, 50), OUTPUT), Sequence(prompt(2, 30), OUTPUT)])
    every_block = list(range(NUM_BLOCKS))
    before = contents(driver, every_block)
    driver.executors[0].copy_blocks(np.array([5, 17, 5], np.uint32), np.array([40, 2, 33], np.uint32))
    after = contents(driver, every_block)
    assert np.array_equal(after[[40, 2, 33]], before[[5, 17, 5]])
    others = [block for block in every_block if block not in (40, 2, 33)]
    assert np.array_equal(after[others], before[others])


@every
@pytest.mark.parametrize("ends", [(6,), (2, 6)])
def test_a_second_choice_begins_from_a_copy_of_the_last_block(
    kind: str, make: Make, ends: tuple[int, ...]
) -> None:
    """The first has written on in that block; to the token both say what they say alone."""
    ids = prompt(5, 43)
    driver = Driver([make() for _ in ends], ends)
    first = Sequence(ids, OUTPUT)
    expected = driver.run([first])[0]
    shared = len(ids) - 1
    full = shared // driver.block_size
    copy = driver.free.pop()
    for executor in driver.executors:
        executor.copy_blocks(np.array([first.table[full]], np.uint32), np.array([copy], np.uint32))
    second = Sequence(ids, OUTPUT, table=[*first.table[:full], copy], computed=shared)
    assert driver.run([second])[0] == expected
