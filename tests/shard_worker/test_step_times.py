"""What a step must at least take, from sizes and bounds; and that the parts of a measured one are named."""

import json
from dataclasses import replace

import numpy as np
import pytest

from chassis.messages.pipeline import FLAG_FRESH, parse_step
from shard_worker.bounds import Bounds, measure
from shard_worker.inputs import SlotTables, TableLimits
from shard_worker.native import library
from shard_worker.step_times import Sizes, bounds_us, header, main

SIZES = Sizes(
    layer_weights={"bfloat16": 1_000_000}, layer_bytes=2_000_000,
    head_weights={"bfloat16": 500_000}, head_bytes=1_000_000, kv_token_bytes=1000,
)  # fmt: skip
BOUNDS = Bounds(threads=2, read_bytes_per_s=1e9, flops_per_s={"float32": 5e8, "bfloat16": 1e9, "int8": 2e9})


def test_few_rows_are_bound_by_reading_many_by_multiplying() -> None:
    one, many = (bounds_us(SIZES, BOUNDS, n, 100) for n in (1, 16))
    assert one == {"products": 2000.0, "head": 1000.0, "attention": 100.0}
    assert many == {"products": 32_000.0, "head": 16_000.0, "attention": 1600.0}


def test_what_all_share_is_read_once() -> None:
    assert bounds_us(SIZES, BOUNDS, 16, 100, 60)["attention"] == 60.0 + 16 * 40.0


def test_each_arithmetic_has_its_own_bound() -> None:
    mixed = replace(
        SIZES, layer_weights={"float32": 500_000, "int8": 500_000}, head_weights={"int8": 500_000}
    )
    assert bounds_us(mixed, BOUNDS, 16, 100) == {"products": 40_000.0, "head": 8000.0, "attention": 1600.0}
    plain = Bounds(2, 1e9, {"float32": 5e8})
    assert bounds_us(SIZES, plain, 16, 100)["products"] == 64_000.0, "bfloat16 is multiplied as float32"
    assert bounds_us(mixed, plain, 16, 100)["head"] == 1000.0, "only reading is known"


def test_this_machine_multiplies_and_reads() -> None:
    found = measure(1)
    assert found.read_bytes_per_s > 0
    if library.native() is not None:
        assert found.flops_per_s["float32"] > 0
        assert all(rate > 0 for rate in found.flops_per_s.values())


def test_without_compiled_code_only_reading_binds() -> None:
    known = bounds_us(SIZES, Bounds(1, 1e9, {}), 16, 100)
    assert known["products"] == 2000.0


def test_headers_are_what_a_worker_takes() -> None:
    tables = SlotTables(
        TableLimits(slots_max=4, block_size_tokens=16, num_blocks=64, context_len_max=256, step_tokens_max=4)
    )
    first = parse_step(header(1, 4, 100, 8))
    assert (first.flags & FLAG_FRESH).all()
    assert tables.apply(first).context_lens.tolist() == [101] * 4
    second = tables.apply(parse_step(header(2, 4, 101, 8)))
    assert second.context_lens.tolist() == [102] * 4
    assert len(np.unique(second.block_tables)) == 4 * 8, "each has its own blocks"


def test_headers_may_share_their_first_blocks() -> None:
    tables = SlotTables(
        TableLimits(slots_max=4, block_size_tokens=16, num_blocks=23, context_len_max=256, step_tokens_max=4)
    )
    shared = tables.apply(parse_step(header(1, 4, 100, 8, 3))).block_tables
    assert (shared[:, :3] == [0, 1, 2]).all()
    assert len(np.unique(shared)) == 3 + 4 * 5


def test_a_missing_model_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "nowhere.gguf"]) == 1
    assert "nowhere.gguf" in json.loads(capsys.readouterr().out)["error"]
