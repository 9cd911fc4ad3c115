"""What a row means, that quantising beats rounding by the largest weight, and what a stage keeps."""

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize
from gguf.quants import quantize as gguf_quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from shard_worker.executor import LoadFailed
from shard_worker.formats import (
    EXPONENTS,
    KIND_OF,
    bits_per_weight,
    convert,
    dequantize,
    is_finite,
    is_packed,
    prepared,
    quantize_rows,
    row_bytes,
    stored,
)
from shard_worker.model.stage_weights import F32, StoredMatrix, WeightFormat

MADE = (WeightFormat.Q8_0, WeightFormat.Q4_0, WeightFormat.Q4_1)


def weights(shape: tuple[int, int] = (24, 128), seed: int = 0) -> F32:
    drawn = np.random.default_rng(seed).standard_t(5, shape) * 0.05
    return drawn.astype(np.float32)


def random_rows(format: WeightFormat, outputs: int, inputs: int) -> StoredMatrix:
    """Any bytes, with scales that are finite: every float16 is small and positive."""
    generator = np.random.default_rng(1)
    rows = generator.integers(0, 256, (outputs, row_bytes(format, inputs)), dtype=np.uint8)
    blocks = rows.reshape(
        outputs, -1, int(bits_per_weight(format) * (256 if "k" in format.value else 32) / 8)
    )
    places = {WeightFormat.Q4_1: (1, 3), WeightFormat.Q4_K: (1, 3), WeightFormat.Q6_K: (209,)}
    for place in places.get(format, (1,)):
        blocks[:, :, place] = 0x20
    return StoredMatrix(format, rows, inputs)


@pytest.mark.parametrize("format", [f for f in WeightFormat if is_packed(f)], ids=lambda f: f.value)
def test_packed_rows_mean_what_gguf_says(format: WeightFormat) -> None:
    matrix = random_rows(format, 6, 512)
    numbers = dequantize(matrix)
    assert numbers.shape == (6, 512) and np.isfinite(numbers).all() and numbers.any()
    assert np.array_equal(numbers, gguf_dequantize(matrix.rows, KIND_OF[format]))


@pytest.mark.parametrize("format", MADE, ids=lambda f: f.value)
def test_quantising_beats_rounding_by_the_largest(format: WeightFormat) -> None:
    plain = weights()
    kind = KIND_OF[format]
    theirs = gguf_dequantize(gguf_quantize(plain, kind), kind)
    ours = dequantize(stored(plain, format))
    error, reference = np.square(ours - plain).mean(), np.square(theirs - plain).mean()
    assert error < reference * (1.0 if format is WeightFormat.Q8_0 else 0.95)
    groups = (plain - ours).reshape(-1, 32), (plain - theirs).reshape(-1, 32)
    worse = np.square(groups[0]).sum(1) > np.square(groups[1]).sum(1) * 1.05
    assert worse.mean() < 0.05


@pytest.mark.parametrize("format", MADE, ids=lambda f: f.value)
def test_what_a_format_can_say_exactly_is_kept(format: WeightFormat) -> None:
    """Zeros (a pruned model's), one value, and values that are levels of a scale already."""
    levels = np.tile(np.arange(-8, 8, dtype=np.float32), 4)[None] * np.float32(0.25)
    levels[0, 0] = -2.0
    for plain in (np.zeros((2, 64), np.float32), levels):
        assert np.array_equal(dequantize(stored(plain, format)), plain) or format is WeightFormat.Q8_0
    assert np.array_equal(dequantize(stored(np.zeros((2, 64), np.float32), format)), np.zeros((2, 64)))
    one = np.full((1, 32), -0.5, np.float32)
    assert np.allclose(dequantize(stored(one, format)), one, rtol=1e-3)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from(MADE), st.floats(1e-2, 1e3))
def test_no_weight_moves_further_than_its_group_allows(seed: int, format: WeightFormat, size: float) -> None:
    plain = (np.random.default_rng(seed).standard_normal((3, 64)) * size).astype(np.float32)
    moved = np.abs(dequantize(stored(plain, format)) - plain).reshape(-1, 32).max(1)
    groups = plain.reshape(-1, 32)
    largest = np.abs(groups).max(1)
    step = {WeightFormat.Q8_0: largest / 127, WeightFormat.Q4_0: largest / 7}
    span = step.get(format, np.ptp(groups, axis=1) / 13)
    assert (moved <= span * 1.2 + 1e-6).all()


@pytest.mark.parametrize(
    "format", [WeightFormat.F32, WeightFormat.F16, WeightFormat.BF16], ids=lambda f: f.value
)
def test_float_formats_round_as_gguf_does(format: WeightFormat) -> None:
    plain = weights()
    assert np.array_equal(quantize_rows(plain, format), gguf_quantize(plain, KIND_OF[format]).view(np.uint8))
    kept = dequantize(stored(plain, format))
    assert np.allclose(kept, plain, rtol=2.0**-8, atol=1e-6)


def test_bfloat16_keeps_what_is_no_number() -> None:
    odd = np.array([[np.inf, -np.inf, np.nan, 3.4e38, -0.0, 1e-40]], np.float32)
    kept = dequantize(stored(odd, WeightFormat.BF16))[0]
    assert np.isinf(kept[:2]).all() and np.isnan(kept[2]) and np.signbit(kept[4])


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e38])
@pytest.mark.parametrize("format", MADE, ids=lambda f: f.value)
def test_what_no_scale_can_hold_is_refused(format: WeightFormat, value: float) -> None:
    plain = weights((1, 32))
    plain[0, 3] = value
    with pytest.raises(LoadFailed, match="not finite, or too large"):
        stored(plain, format)


@pytest.mark.parametrize("format", [f for f in WeightFormat if is_packed(f)], ids=lambda f: f.value)
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E01])
def test_a_scale_that_is_no_number_is_seen(format: WeightFormat, bits: int) -> None:
    matrix = random_rows(format, 6, 512)
    assert is_finite(matrix)
    blocks = matrix.rows.reshape(-1, row_bytes(format, 256 if "k" in format.value else 32))
    for place in EXPONENTS[format][2]:
        before = blocks[-1, place : place + 2].copy()
        blocks[-1, place : place + 2] = np.array([bits], np.uint16).view(np.uint8)
        assert not is_finite(matrix)
        blocks[-1, place : place + 2] = before
    assert is_finite(matrix)


@pytest.mark.parametrize(
    "format", [WeightFormat.F32, WeightFormat.F16, WeightFormat.BF16], ids=lambda f: f.value
)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_none_is_seen(format: WeightFormat, value: float) -> None:
    plain = weights((70, 1000))
    plain[0, 0] = 6e4
    assert is_finite(stored(plain, format))
    plain[69, 999] = value
    assert not is_finite(stored(plain, format))


def test_rows_that_fit_no_format_are_refused() -> None:
    with pytest.raises(ValueError, match="blocks of 32"):
        stored(weights((2, 40)), WeightFormat.Q8_0)
    with pytest.raises(ValueError, match="is read here, not made"):
        stored(weights((2, 256)), WeightFormat.Q6_K)


# ---- what a stage keeps -----------------------------------------------------------------------------


def kept(format: WeightFormat, dtype: str, quantize: str, min_bits: int = 4) -> WeightFormat:
    matrix = random_rows(format, 2, 256) if is_packed(format) else stored(weights((2, 256)), format)
    out = prepared(matrix, dtype, quantize, min_bits)
    assert (out is matrix) == (out.format is matrix.format)
    if out is not matrix:
        assert np.allclose(dequantize(out), dequantize(matrix), atol=np.ptp(dequantize(matrix)) / 10)
    return out.format


def test_what_is_kept() -> None:
    F = WeightFormat
    for format in F:
        assert kept(format, "float32", "none") is F.F32
        assert kept(format, "bfloat16", "none") is F.BF16
        assert kept(format, "bfloat16", "keep") is (format if is_packed(format) else F.BF16)
        eight_or_less = format if is_packed(format) else F.Q8_0
        assert kept(format, "float32", "int8") is eight_or_less
        assert kept(format, "float32", "int4", min_bits=8) is eight_or_less
        four = format if format in (F.Q4_0, F.Q4_1, F.Q4_K) else F.Q4_1
        assert kept(format, "float32", "int4") is four
    narrow = stored(weights((2, 40)), F.F32)
    assert prepared(narrow, "bfloat16", "int4").format is F.BF16


def test_a_matrix_is_converted_over_its_numbers() -> None:
    source = stored(weights(), WeightFormat.Q8_0)
    assert np.array_equal(dequantize(convert(source, WeightFormat.F32)), dequantize(source))
    assert convert(source, WeightFormat.Q8_0) is source
    assert GGMLQuantizationType.Q4_1 is KIND_OF[WeightFormat.Q4_1]
