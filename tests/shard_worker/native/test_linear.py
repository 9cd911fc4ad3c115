"""Packed products against numpy in float64 on what `gguf` reads from the same bytes; their bits against each
other."""

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray

from shard_worker.model.stage_weights import F32, U8, WeightFormat
from shard_worker.native import library
from shard_worker.native.linear import PackedMatrix

FORMATS = tuple(WeightFormat)
QUANTISED = FORMATS[3:]
BLOCK = {WeightFormat.Q4_K: 256, WeightFormat.Q6_K: 256} | dict.fromkeys(QUANTISED[:4], 32)
ROWS_MAX = 70
ARITHMETIC: dict[str, dict[str, Any]] = {
    "exact": {},
    "bf16": {"bf16": True},
    "int8": {"int8": True},
}  # what x may be rounded to


@pytest.fixture(scope="module")
def native() -> ctypes.CDLL:
    found = library.native()
    if found is None:
        pytest.skip("no compiler here")
    return found


def _sets(native: ctypes.CDLL) -> list[str]:
    return [
        name for name in ("portable", "avx2", "avx512") if native.shoal_linear_use_isa(name.encode()) == 0
    ]


@pytest.fixture(params=["portable", "avx2", "avx512"])
def isa(native: ctypes.CDLL, request: pytest.FixtureRequest) -> Iterator[str]:
    if native.shoal_linear_use_isa(request.param.encode()) != 0:
        pytest.skip("not this processor's")
    yield request.param
    assert native.shoal_linear_use_isa(None) == 0


def stored(format: WeightFormat, outputs: int, inputs: int, seed: int = 0) -> tuple[U8, NDArray[np.float64]]:
    """Rows as a file has them, and the numbers they mean."""
    random = np.random.default_rng(seed)
    kind = GGMLQuantizationType[format.name]
    if format in (WeightFormat.Q4_K, WeightFormat.Q6_K):  # gguf reads these and can't make them: any bytes do
        size, halves = (144, slice(0, 4)) if format is WeightFormat.Q4_K else (210, slice(208, 210))
        blocks = random.integers(0, 256, (outputs * inputs // 256, size), np.uint8)
        scales = random.uniform(1e-4, 1e-3, (len(blocks), (halves.stop - halves.start) // 2))
        blocks[:, halves] = scales.astype(np.float16).view(np.uint8)
        rows = blocks.reshape(outputs, -1)
    else:
        weights = random.standard_normal((outputs, inputs)).astype(np.float32)
        rows = np.ascontiguousarray(quants.quantize(weights, kind)).view(np.uint8).reshape(outputs, -1)
    meant = quants.dequantize(rows.view(np.float32) if format is WeightFormat.F32 else rows, kind)
    return rows, meant.reshape(outputs, inputs).astype(np.float64)


def activations(rows: int, inputs: int, seed: int = 1) -> F32:
    return np.random.default_rng(seed).standard_normal((rows, inputs)).astype(np.float32)


def assert_close(y: F32, x: F32, weights: NDArray[np.float64], bias: F32 | None = None) -> None:
    """A chain of n sums is off by at most n roundings of the sum of magnitudes; in practice by their root."""
    exact = x.astype(np.float64) @ weights.T + (0 if bias is None else bias)
    magnitude = np.abs(x).astype(np.float64) @ np.abs(weights).T + 1e-30
    assert np.max(np.abs(y - exact) / magnitude) < 4e-7


def assert_same_bits(a: F32, b: F32) -> None:
    assert np.array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize("format", FORMATS)
def test_a_product_is_numpys(native: ctypes.CDLL, isa: str, format: WeightFormat) -> None:
    for outputs, inputs in ((1, 256), (17, 768), (50, 256)):
        rows, weights = stored(format, outputs, inputs)
        matrix = PackedMatrix(native, format, rows, inputs)
        for m in (1, 2, 3, 6, 7, 16, ROWS_MAX):
            x, bias = activations(m, inputs), activations(1, outputs, 2)[0]
            assert_close(matrix.run(x), x, weights)
            assert_close(matrix.run(x, bias=bias), x, weights, bias)
        matrix.close()


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_reads_as_gguf_reads_it(native: ctypes.CDLL, isa: str, format: WeightFormat) -> None:
    rows, weights = stored(format, 19, 512)
    matrix = PackedMatrix(native, format, rows, 512)
    for index in (0, 15, 16, 18):
        assert np.array_equal(matrix.row(index), weights[index])
    matrix.close()


@pytest.mark.parametrize("arithmetic", ARITHMETIC)
@pytest.mark.parametrize("format", FORMATS)
def test_bits_depend_on_the_row_alone(
    native: ctypes.CDLL, isa: str, format: WeightFormat, arithmetic: str
) -> None:
    """Not on the batch, its size, the place in it, the parts, nor on what was left in y and in scratch."""
    outputs, inputs = 50, 512
    rows, _ = stored(format, outputs, inputs)
    matrix = PackedMatrix(native, format, rows, inputs)
    x, bias = activations(ROWS_MAX, inputs), activations(1, outputs, 2)[0]
    how = ARITHMETIC[arithmetic]
    scratch = matrix.scratch(ROWS_MAX)
    scratch[:] = 0xFF
    alone = np.concatenate([matrix.run(x[i : i + 1], bias=bias, **how) for i in range(ROWS_MAX)])
    for m in range(1, ROWS_MAX + 1):
        y = np.full((m, outputs), np.nan, np.float32)
        matrix.run(x[-m:], bias=bias, parts=1 + m % 4, scratch=scratch, out=y, **how)
        assert_same_bits(y, alone[-m:])
    matrix.close()


def test_long_rows_go_in_stretches_with_the_same_bits(native: ctypes.CDLL, isa: str) -> None:
    """More inputs than a tile holds, more rows than stay cached, and inputs that fill no group of four."""
    for format, inputs in (
        (WeightFormat.F32, 1537),
        (WeightFormat.BF16, 1539),
        (WeightFormat.F16, 3),
        (WeightFormat.Q5_0, 1056),
        (WeightFormat.Q4_K, 1536),
        (WeightFormat.Q6_K, 1536),
    ):
        rows, weights = stored(format, 33, inputs)
        matrix = PackedMatrix(native, format, rows, inputs)
        x = activations(231, inputs)
        assert_close(matrix.run(x), x, weights)
        for how in (ARITHMETIC["exact"], ARITHMETIC["bf16"]):
            y = matrix.run(x, parts=2, **how)
            assert_same_bits(y[-1:], matrix.run(x[-1:], **how))
            assert_same_bits(y[100:120], matrix.run(x[100:120], **how))
        matrix.close()


def rounded_bf16(x: F32) -> F32:
    """To nearest, ties to even."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("format", FORMATS)
def test_activations_round_to_bf16_or_not_at_all(native: ctypes.CDLL, isa: str, format: WeightFormat) -> None:
    """Odd inputs, outputs that fill no panel, ties between two neighbours, and numbers too small to count."""
    for outputs, inputs in ((1, 256), (17, 768), (100, 256)) if format in QUANTISED else ((1, 1), (50, 771)):
        rows, weights = stored(format, outputs, inputs)
        matrix = PackedMatrix(native, format, rows, inputs)
        for m in (1, 2, 5, 8, 9, 16, ROWS_MAX):
            x, bias = activations(m, inputs), activations(1, outputs, 2)[0]
            x[0, 0] = 1 + 2**-8
            x[-1, -1] = 1e-40
            y = matrix.run(x, bias=bias, bf16=True)
            if matrix.rounds_bf16:
                assert_close(y, rounded_bf16(x), weights, bias)
            else:
                assert_same_bits(y, matrix.run(x, bias=bias))
        matrix.close()


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_rounded_before_gives_the_same_bits(
    native: ctypes.CDLL, isa: str, format: WeightFormat
) -> None:
    outputs, inputs = 50, 512
    rows, _ = stored(format, outputs, inputs)
    matrix = PackedMatrix(native, format, rows, inputs)
    x, bias = activations(ROWS_MAX, inputs), activations(1, outputs, 2)[0]
    bits = (rounded_bf16(x).view(np.uint32) >> 16).astype(np.uint16)
    for m in (1, 3, ROWS_MAX) if matrix.rounds_bf16 else ():
        for parts in (1, 3):
            found = matrix.run_pairs(bits[:m], bias=bias, parts=parts)
            assert_same_bits(found, matrix.run(x[:m], bias=bias, bf16=True))
    matrix.close()


def test_what_is_no_number_stays_in_its_row(native: ctypes.CDLL, isa: str) -> None:
    rows, _ = stored(WeightFormat.BF16, 40, 130)
    matrix = PackedMatrix(native, WeightFormat.BF16, rows, 130)
    x = activations(3, 130)
    plain = matrix.run(x, bf16=True)
    x[1, 129] = np.nan
    y = matrix.run(x, bf16=True)
    assert np.isnan(y[1]).all()
    assert_same_bits(y[[0, 2]], plain[[0, 2]])
    matrix.close()


def test_bf16_is_multiplied_where_the_processor_does(native: ctypes.CDLL, isa: str) -> None:
    flags = Path("/proc/cpuinfo")
    if isa != "avx512" or not flags.exists() or " avx512_bf16 " not in flags.read_text():
        pytest.skip("not this processor's")
    for format in (WeightFormat.BF16, *QUANTISED):
        rows, _ = stored(format, 16, 256)
        matrix = PackedMatrix(native, format, rows, 256)
        assert matrix.rounds_bf16
        matrix.close()


def test_long_rows_of_8_bits_go_in_stretches_with_the_same_bits(native: ctypes.CDLL, isa: str) -> None:
    for format, inputs in ((WeightFormat.Q8_0, 1056), (WeightFormat.Q4_1, 1536), (WeightFormat.Q6_K, 1536)):
        rows, _ = stored(format, 33, inputs)
        matrix = PackedMatrix(native, format, rows, inputs)
        x, bias = activations(131, inputs), activations(1, 33, 2)[0]
        y = matrix.run(x, bias=bias, int8=True, parts=2)
        for i in (0, 60, 127, 128, 130):
            assert_same_bits(y[i : i + 1], matrix.run(x[i : i + 1], bias=bias, int8=True))
        matrix.close()


@pytest.mark.parametrize("format", QUANTISED)
def test_8_bit_activations_round_each_block(native: ctypes.CDLL, isa: str, format: WeightFormat) -> None:
    outputs, inputs = 33, 768
    rows, weights = stored(format, outputs, inputs)
    matrix = PackedMatrix(native, format, rows, inputs)
    x = activations(9, inputs)
    x[0, :32], x[1, 40] = 0.0, 100.0  # a block of nothing, and one whose largest drowns the others
    blocks = x.reshape(9, -1, 32)
    scale = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    inverse = np.divide(np.float32(1), scale, where=scale > 0, out=np.zeros_like(scale))
    rounded = (np.rint(blocks * inverse) * scale).reshape(9, -1)
    assert_close(matrix.run(x, int8=True), rounded, weights)
    matrix.close()


def test_8_bits_hold_the_extremes(native: ctypes.CDLL, isa: str) -> None:
    """All codes at their ends against activations at theirs: no sum of products may saturate."""
    for format in QUANTISED:
        rows, _ = stored(format, 16, 256)
        kind = GGMLQuantizationType[format.name]
        scales = {WeightFormat.Q4_K: slice(0, 4), WeightFormat.Q6_K: slice(208, 210)}.get(format, slice(0, 2))
        if format is WeightFormat.Q4_1:
            scales = slice(0, 4)
        block_bytes = rows.shape[1] * BLOCK[format] // 256
        for fill in (0x00, 0x7F, 0x80, 0xFF):  # for Q8_0, 0x80 is the code whose sign can't be changed
            blocks = np.full((16 * 256 // BLOCK[format], block_bytes), fill, np.uint8)
            blocks[:, scales] = rows.reshape(len(blocks), -1)[:, scales]
            filled = blocks.reshape(16, -1)
            matrix = PackedMatrix(native, format, filled, 256)
            for x in (np.ones((1, 256), np.float32), np.full((1, 256), -1, np.float32)):
                exact = x.astype(np.float64) @ quants.dequantize(filled, kind).astype(np.float64).T
                np.testing.assert_allclose(matrix.run(x, int8=True), exact, rtol=1e-5, atol=1e-3)
            matrix.close()


@pytest.mark.parametrize("arithmetic", ARITHMETIC)
@pytest.mark.parametrize("format", FORMATS)
def test_no_rows_are_no_work(native: ctypes.CDLL, isa: str, format: WeightFormat, arithmetic: str) -> None:
    """More threads than rows leave some of them none; more parts than panels do too."""
    rows, _ = stored(format, 20, 256)
    matrix = PackedMatrix(native, format, rows, 256)
    how = ARITHMETIC[arithmetic]
    assert matrix.run(activations(0, 256), **how).shape == (0, 20)
    x = activations(7, 256)
    assert_same_bits(matrix.run(x, parts=9, **how), matrix.run(x, **how))
    matrix.close()


def test_instruction_sets_are_close(native: ctypes.CDLL) -> None:
    rows, _ = stored(WeightFormat.Q4_1, 50, 512)
    matrix = PackedMatrix(native, WeightFormat.Q4_1, rows, 512)
    x, found = activations(20, 512), {}
    for name in _sets(native):
        assert native.shoal_linear_use_isa(name.encode()) == 0
        assert native.shoal_linear_isa() == name.encode()
        found[name] = matrix.run(x)
    assert native.shoal_linear_use_isa(None) == 0
    for y in found.values():
        np.testing.assert_allclose(y, found["portable"], rtol=0, atol=2e-4)
    matrix.close()


def test_memory_is_that_of_the_file(native: ctypes.CDLL) -> None:
    """Four bits stay four: at most 3 % over the rows' own bytes."""
    for format in FORMATS:
        rows, _ = stored(format, 32, 512)
        matrix = PackedMatrix(native, format, rows, 512)
        assert rows.nbytes <= matrix.bytes <= 1.03 * rows.nbytes
        matrix.close()


def test_bad_sizes_are_refused(native: ctypes.CDLL) -> None:
    rows = np.zeros((2, 4096), np.uint8)
    for format, inputs in (
        (WeightFormat.Q8_0, 33), (WeightFormat.Q4_K, 128), (WeightFormat.Q6_K, 0),
        (WeightFormat.F32, 1025), (WeightFormat.F32, -4), (WeightFormat.Q4_0, 32 * (4096 // 18 + 1)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="no "):
            PackedMatrix(native, format, rows, inputs)
    assert native.shoal_linear_create(99, library.address(rows), 2, 32, 4096) is None
    assert native.shoal_linear_create(0, library.address(rows), 0, 32, 4096) is None


def test_an_unknown_instruction_set_changes_nothing(native: ctypes.CDLL) -> None:
    before = native.shoal_linear_isa()
    assert native.shoal_linear_use_isa(b"abacus") == -1
    assert native.shoal_linear_isa() == before
