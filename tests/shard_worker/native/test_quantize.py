"""Compiled code quantises to the bits that numpy gives, whatever the numbers; refuses what numpy refuses."""

import ctypes

import numpy as np
import pytest

from shard_worker.formats import convert, quantize_rows, row_bytes
from shard_worker.model.stage_weights import F32, U8, StoredMatrix, WeightFormat
from shard_worker.native import library
from shard_worker.native.quantize import GROUP, quantized_rows

COMPILED = library.native()
pytestmark = pytest.mark.skipif(COMPILED is None, reason="no compiler here")
MADE = (WeightFormat.Q8_0, WeightFormat.Q4_0, WeightFormat.Q4_1)
PLAIN = (WeightFormat.F32, WeightFormat.BF16, WeightFormat.F16)


def quantized(matrix: StoredMatrix, format: WeightFormat, threads: int = 1) -> U8 | None:
    assert isinstance(COMPILED, ctypes.CDLL)
    return quantized_rows(COMPILED, matrix, format, row_bytes(format, matrix.inputs), threads)


def kinds_of_groups() -> dict[str, F32]:
    """[groups, 32]"""
    draw = np.random.default_rng(3)
    normal, size = draw.standard_normal((999, GROUP)), draw.uniform(-30, 11, (999, 1))
    found = {
        "normal": normal,
        "of every size": normal * np.exp(size),
        "of every size in a group": normal * np.exp(draw.uniform(-30, 8, normal.shape)),
        "subnormal scales": normal * 1e-7,
        "nothing but underflow": normal * 1e-9,
        "float32 subnormals": normal * 1e-41,
        "whole numbers": draw.integers(-3, 4, normal.shape),
        "one sign": -np.abs(normal),
        "one number": np.repeat(normal[:, :1] * np.exp(size), GROUP, 1),
        "mostly zeros of both signs": np.where(draw.random(normal.shape) < 0.95, -0.0, normal * 0),
        "zeros": np.full(normal.shape, -0.0),
        "the largest": np.sign(normal) * 6e4,
    }
    return {name: np.clip(groups, -6e4, 6e4).astype(np.float32) for name, groups in found.items()}


@pytest.mark.parametrize("format", MADE, ids=lambda f: f.value)
@pytest.mark.parametrize("name", kinds_of_groups())
def test_the_bits_are_numpys(name: str, format: WeightFormat) -> None:
    groups = kinds_of_groups()[name]
    wanted = quantize_rows(groups, format)
    found = quantized(StoredMatrix(WeightFormat.F32, groups.view(np.uint8), GROUP), format)
    assert found is not None and np.array_equal(found, wanted)


@pytest.mark.parametrize("format", MADE, ids=lambda f: f.value)
@pytest.mark.parametrize("source", PLAIN, ids=lambda f: f.value)
def test_from_every_plain_format_over_any_number_of_threads(
    source: WeightFormat, format: WeightFormat
) -> None:
    values = np.random.default_rng(4).standard_normal((517, 1024)).astype(np.float32)
    values[::7] *= 1e-6  # float16 holds what is below its normal range too
    plain = StoredMatrix(source, quantize_rows(values, source), 1024)
    kept = convert(plain, WeightFormat.F32).rows.view(np.float32)
    wanted = quantize_rows(kept, format)
    for threads in (1, 3):
        found = quantized(plain, format, threads)
        assert found is not None and np.array_equal(found, wanted)


@pytest.mark.parametrize("format", MADE, ids=lambda f: f.value)
def test_a_group_does_not_depend_on_its_neighbours(format: WeightFormat) -> None:
    groups = kinds_of_groups()["normal"][:300]
    together = quantize_rows(groups, format)
    for i, group in enumerate(groups):
        alone = group.reshape(1, GROUP)
        assert np.array_equal(quantize_rows(alone, format)[0], together[i])
        found = quantized(StoredMatrix(WeightFormat.F32, alone.view(np.uint8), GROUP), format)
        assert found is not None and np.array_equal(found[0], together[i])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 6.1e4, -1e38])
@pytest.mark.parametrize("source", PLAIN, ids=lambda f: f.value)
def test_what_no_scale_can_hold_is_refused(source: WeightFormat, value: float) -> None:
    values = np.ones((9000, GROUP), np.float32)
    values[8990, 31] = value
    plain = StoredMatrix(source, quantize_rows(values, source), GROUP)
    for threads in (1, 2):
        with pytest.raises(ValueError, match="not finite, or too large"):
            quantized(plain, WeightFormat.Q4_1, threads)


def test_other_formats_are_not_made() -> None:
    values = np.ones((2, 256), np.float32)
    assert quantized(StoredMatrix(WeightFormat.F32, values.view(np.uint8), 256), WeightFormat.Q4_K) is None
    packed = StoredMatrix(WeightFormat.Q8_0, quantize_rows(values, WeightFormat.Q8_0), 256)
    assert quantized(packed, WeightFormat.Q4_1) is None
