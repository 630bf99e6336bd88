"""How `triton` reads scale codes by words: which ones it does, and the PTX run in numpy."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from ptx import halves, run_ptx
from test_triton_decode import every_code, registers, run_at, weights_of

from jmx.numerics.formats import MXFP4, NVFP4
from jmx.pallas.triton import decode, scale_codes
from jmx.pallas.triton.ptx import FUNNEL_SHIFT, SCALED_FACTORS
from jmx.pallas.triton.scale_codes import ScaleCodes

CODES = np.arange(256, dtype=np.uint32)


@pytest.mark.parametrize(
    ("rows", "groups", "block_k", "by_words"),
    [(64, 90, 128, True), (64, 90, 256, True), (64, 90, 64, False), (64, 90, 512, False), (6, 5, 128, False)],
)
def test_codes_are_read_by_words_where_a_step_has_whole_ones_and_so_has_an_expert(rows, groups, block_k, by_words):
    scales = jnp.zeros((2, rows, groups), jnp.uint8)
    assert (ScaleCodes.of(scales, MXFP4, block_k) is not None) == by_words
    assert ScaleCodes.of(scales, NVFP4, block_k) is None
    assert ScaleCodes.of(scales.astype(jnp.float32), MXFP4, block_k) is None


@pytest.mark.parametrize("codes", [[0, 127, 1, 126], [0, 128, 0, 0], [0, 0, 0, 255], [200, 0, 0, 0]])
def test_codes_of_two_and_above_are_found(codes):
    words = np.zeros((2, 5, 4), np.uint8)
    words[1, 3] = codes
    assert scale_codes.any_large(jnp.asarray(words.view("<i4")[..., 0])) == (max(codes) > 127)


@pytest.mark.parametrize("byte", range(4))
def test_the_ptx_of_words_in_place(byte, rng):
    stored = rng.integers(0, 256, (100, 8), np.uint8)
    low, high = (np.ascontiguousarray(half).view("<u4")[:, 0] for half in (stored[:, :4], stored[:, 4:]))
    expected = np.ascontiguousarray(stored[:, byte : byte + 4]).view("<u4")[:, 0]
    np.testing.assert_array_equal(run_ptx(FUNNEL_SHIFT, low, high, np.full(100, 8 * byte)), expected)


@pytest.mark.parametrize("byte", range(4))
def test_the_ptx_of_every_selected_code(byte, rng):
    """Next to one of each other's, out of words whose other bytes are anything. Scaled, by what elements lack."""
    small, noise = CODES[:128], rng.integers(0, 1 << 32, (2, 128), np.uint32)
    keep = np.uint32(~(0xFF << 8 * byte) & 0xFFFFFFFF)
    codes = np.stack([small, rng.permutation(small)], axis=1)
    words = [noise[i] & keep | codes[:, i] << np.uint32(8 * byte) for i in range(2)]
    factors = halves(run_ptx(SCALED_FACTORS, *words, *[0x4440 + byte] * 2))
    np.testing.assert_array_equal(factors, 2.0 ** (codes.astype(np.float64) - 1))


@pytest.mark.parametrize("position", range(4))
def test_the_ptx_of_elements_with_scaled_factors(position, rng):
    """Every element under every code below 128."""
    words = np.repeat(every_code()[:128, :, None], 2, axis=2).view(np.uint16)
    codes = np.broadcast_to(CODES[:128, None, None], words.shape)
    factors = registers(np.asarray(2.0 ** (codes.astype(np.float64) - 1), ml_dtypes.bfloat16))
    found = run_at(position, decode.packed_decoder(MXFP4, np.dtype(ml_dtypes.bfloat16)), words, factors)
    np.testing.assert_array_equal(found, weights_of(words, codes.astype(np.uint8), position))
