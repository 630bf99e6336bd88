"""FP8 weights in e4m3fnuz: every code, every pair of codes in a block, and checkpoints that hold them."""

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from test_checkpoint_compressed_tensors import GOLDEN, golden, same, write

from jmx.checkpoint import CheckpointError, compressed_tensors, shards
from jmx.checkpoint.compressed_tensors import fnuz
from jmx.checkpoint.compressed_tensors.module import Module
from jmx.numerics.formats import WHOLE_ROW

CODES = np.arange(256, dtype=np.uint8)
FNUZ, FN = (CODES.view(dtype).astype(np.float64) for dtype in (ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e4m3fn))
NAN, LARGEST = 0x80, {0x7F, 0xFF}
NUMBERS = np.delete(CODES, NAN)
OTHERS = ("w4a", "mxfp8")  # have FP8 inputs alone, or in blocks that no tool writes as e4m3fnuz
NAMES = sorted(
    path.name
    for path in GOLDEN.iterdir()
    if path.is_dir() and "fp8" in path.name and not any(other in path.name for other in OTHERS)
)


def values(codes, scales, block_size):
    """float64 values of codes in e4m3fn."""
    size = codes.shape[1] if block_size == WHOLE_ROW else block_size
    return FN[codes] * np.repeat(scales.astype(np.float64), size, axis=1)[:, : codes.shape[1]]


def test_the_definition_is_that_of_the_type():
    """Sign, 4 bits of exponent with bias 8, 3 bits of mantissa; only 0x80 is NaN, and there is no infinity."""
    for code in map(int, NUMBERS):
        exponent, mantissa = code >> 3 & 15, code & 7
        magnitude = (8 + mantissa) * 2.0 ** (exponent - 11) if exponent else mantissa * 2.0**-10
        assert FNUZ[code] == (-magnitude if code >> 7 else magnitude)
    assert np.isnan(FNUZ[NAN])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_every_code_is_read_exactly(dtype, rng):
    scales = rng.uniform(0.01, 4, (255, 1)).astype(dtype)
    codes, found = fnuz.to_e4m3fn(NUMBERS[:, None], scales, WHOLE_ROW)
    assert found.dtype == dtype
    expected = FNUZ[NUMBERS][:, None] * scales.astype(np.float64)
    np.testing.assert_array_equal(values(codes, found, WHOLE_ROW), expected)
    assert not np.isnan(FN[codes]).any()
    assert not np.signbit(FN[codes][FNUZ[NUMBERS] == 0]).any()
    with pytest.raises(ValueError, match=re.escape("must hold no NaN, but has one at (1, 0)")):
        fnuz.to_e4m3fn(np.array([[1], [NAN]], np.uint8), scales[:2], WHOLE_ROW)


def test_every_pair_of_codes_is_read_exactly_or_refused(rng):
    pairs = np.stack(np.meshgrid(NUMBERS, NUMBERS), axis=-1).reshape(-1, 2)
    has_largest = np.isin(pairs, [*LARGEST]).any(axis=1)
    representable = np.isin(FNUZ[pairs], FN[~np.isnan(FN)]).all(axis=1)
    good = ~has_largest | representable
    assert (~good).sum() == 2 * 2 * 16  # 240 or -240, first or last, with one of 16 codes
    scales = rng.uniform(0.01, 4, (len(pairs), 1)).astype(np.float32)
    codes, found = fnuz.to_e4m3fn(pairs[good], scales[good], WHOLE_ROW)
    expected = FNUZ[pairs[good]] * scales[good].astype(np.float64)
    np.testing.assert_array_equal(values(codes, found, WHOLE_ROW), expected)
    for row in np.flatnonzero(~good):
        with pytest.raises(ValueError, match=re.escape("but block 0 of row 0 has weights of 240 and odd multiples")):
            fnuz.to_e4m3fn(pairs[row : row + 1], scales[row : row + 1], WHOLE_ROW)


def test_each_block_of_each_row_is_converted_by_itself(rng):
    """The last block is short. Blocks with 240 keep their scale, others get half of it."""
    codes = rng.choice(np.setdiff1d(NUMBERS, [*LARGEST]), (6, 300))
    scales = rng.uniform(0.01, 4, (6, 3)).astype(np.float32)
    odd = FNUZ[codes] * 512 % 1 != 0
    for row, column in ((1, 5), (2, 130), (4, 299)):
        block = slice(column // 128 * 128, column // 128 * 128 + 128)
        codes[row, block][odd[row, block]] = 0x10
        codes[row, column] = 0xFF
    made, found = fnuz.to_e4m3fn(codes, scales, 128)
    wide = np.repeat(scales.astype(np.float64), 128, axis=1)[:, :300]
    np.testing.assert_array_equal(values(made, found, 128), FNUZ[codes] * wide)
    kept = found == scales
    assert {(int(row), int(block)) for row, block in np.argwhere(kept)} == {(1, 0), (2, 1), (4, 2)}
    np.testing.assert_array_equal(found[~kept], scales[~kept] / 2)
    codes[2, 140], codes[2, 141] = 0x01, 0x7F
    with pytest.raises(ValueError, match="block 1 of row 2 has weights of 240"):
        fnuz.to_e4m3fn(codes, scales, 128)


def test_a_scale_without_an_exact_half_is_refused():
    scales = np.array([[1.0], [2.0**-24]], np.float16)  # the least float16
    with pytest.raises(ValueError, match="a scale in block 0 of row 1 whose half is exact in float16"):
        fnuz.to_e4m3fn(np.ones((2, 4), np.uint8), scales, WHOLE_ROW)


def checkpoint(name: str, folder: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """A golden checkpoint whose weights have the same codes in e4m3fnuz, but for -0."""
    arrays, config = golden(name)
    for key, array in arrays.items():
        if array.dtype == ml_dtypes.float8_e4m3fn:
            codes = array.view(np.uint8).copy()
            codes[codes == NAN] = 0
            arrays[key] = codes.view(ml_dtypes.float8_e4m3fnuz)
    return write(folder, arrays, config), arrays


def reader(path: Path) -> compressed_tensors.Reader:
    order = "interleaved" if "gpt_oss" in (path / "config.json").read_text() else None
    return compressed_tensors.Reader(path, gate_up_order=order)


@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_are_read_exactly_and_written_back(name, tmp_path):
    path, arrays = checkpoint(name, tmp_path / "fnuz")
    files = reader(path)
    seen = 0
    for layer in files.layers.values():
        for module in layer.quantized:
            _check(module)
            seen += 1
    assert seen
    compressed_tensors.convert(files, tmp_path / "again")
    found = shards.read_headers(tmp_path / "again")
    assert all(same(found[key].view(), array) for key, array in arrays.items())


def _check(module: Module) -> None:
    """The values of a module's arrays are those of its file."""
    weight, size = module.weight(), module.format.block_size
    stored, scales = (module.pieces[name].view() for name in ("weight", "weight_scale"))
    scales = np.asarray(scales, np.float64)
    rows, columns = stored.shape
    if size == WHOLE_ROW:
        by_element = np.broadcast_to(scales.reshape(-1, 1), (rows, 1))
    else:
        by_element = np.repeat(np.repeat(scales, 128, axis=0), 128, axis=1)[:rows, :columns]
    np.testing.assert_array_equal(
        values(weight.values, weight.scales, size), FNUZ[np.asarray(stored).view(np.uint8)] * by_element
    )
    assert [(array.shape, array.dtype) for array in (weight.values, weight.scales)] == [
        module.abstract(name) for name in ("values", "scales")
    ]


def test_nan_is_refused_by_name(tmp_path):
    arrays, config = golden("fp8_channel_dynamic")
    key = next(key for key, array in arrays.items() if array.dtype == ml_dtypes.float8_e4m3fn)
    for other, array in arrays.items():
        if array.dtype == ml_dtypes.float8_e4m3fn:
            codes = array.view(np.uint8) & 0x7E
            arrays[other] = codes.view(ml_dtypes.float8_e4m3fnuz)
    arrays[key].view(np.uint8)[3, 4] = NAN
    files = compressed_tensors.Reader(write(tmp_path / "nan", arrays, config))
    (name,) = files.layers
    with pytest.raises(CheckpointError, match=re.escape(f"tensor {key!r} must hold no NaN, but has one at (3, 4)")):
        files.experts(name, inputs=False)
