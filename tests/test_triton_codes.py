"""How `triton` reads scale codes by words: which ones it does, and the PTX run in numpy."""

import jax.numpy as jnp
import numpy as np
import pytest
from ptx import halves, run_ptx

from jmx.formats import MXFP4, NVFP4
from jmx.pallas import triton_codes
from jmx.pallas.triton_codes import Codes
from jmx.pallas.triton_elements import PICKED_FACTORS, SHIFTED

CODES = np.arange(256, dtype=np.uint32)


@pytest.mark.parametrize(
    ("rows", "groups", "block_k", "by_words"),
    [(64, 90, 128, True), (64, 90, 256, True), (64, 90, 64, False), (64, 90, 512, False), (6, 5, 128, False)],
)
def test_codes_are_read_by_words_where_a_step_has_whole_ones_and_so_has_an_expert(rows, groups, block_k, by_words):
    scales = jnp.zeros((2, rows, groups), jnp.uint8)
    assert (Codes.of(scales, MXFP4, block_k) is not None) == by_words
    assert Codes.of(scales, NVFP4, block_k) is None
    assert Codes.of(scales.astype(jnp.float32), MXFP4, block_k) is None


@pytest.mark.parametrize("count", [-4, -1, 0, 1, 2, 3, 4, 9])
def test_a_nan_is_found_in_any_byte_that_a_row_has_and_in_no_other(count, rng):
    words = rng.integers(0, 255, (1000, 4), np.uint8)
    words[np.arange(0, 1000, 2), rng.integers(0, 4, 500)] = 255
    words[1::2][:100] = [254, 0, 1, 254]
    found = triton_codes._nans(jnp.asarray(words.view("<i4")[:, 0]), triton_codes._beyond(jnp.int32(count)))
    np.testing.assert_array_equal(found != 0, (words[:, : max(count, 0)] == 255).any(axis=1))


@pytest.mark.parametrize("byte", range(4))
def test_the_ptx_of_words_in_place(byte, rng):
    stored = rng.integers(0, 256, (100, 8), np.uint8)
    low, high = (np.ascontiguousarray(half).view("<u4")[:, 0] for half in (stored[:, :4], stored[:, 4:]))
    expected = np.ascontiguousarray(stored[:, byte : byte + 4]).view("<u4")[:, 0]
    np.testing.assert_array_equal(run_ptx(SHIFTED, low, high, np.full(100, 8 * byte)), expected)


@pytest.mark.parametrize("byte", range(4))
def test_the_ptx_of_every_code_picked(byte, rng):
    """Next to one of each other's, out of words whose other bytes are anything."""
    others, noise = rng.permutation(CODES), rng.integers(0, 1 << 32, (2, 256), np.uint32)
    keep = np.uint32(~(0xFF << 8 * byte) & 0xFFFFFFFF)
    words = [noise[i] & keep | codes << np.uint32(8 * byte) for i, codes in enumerate((CODES, others))]
    factors = halves(run_ptx(PICKED_FACTORS, *words, *[0x4440 + byte] * 2))
    codes = np.stack([CODES, others], axis=1)
    np.testing.assert_array_equal(factors, 2.0 ** (np.minimum(codes, 254).astype(np.float64) - 127))
