"""Every format: shapes of its arrays, packing and padding."""

import runpy
from dataclasses import FrozenInstanceError
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from bits import assert_same_bits, bits
from dequantized import KINDS

import jmx
from jmx.numerics.formats import (
    FLOATS,
    FORMATS,
    MXFP4,
    NVFP4,
    WHOLE_ROW,
    BlockScaled,
    Format,
    from_offset_binary,
    is_packed,
    logical_shape,
    pack,
    unpack,
    with_float_scales,
)
from jmx.numerics.quantization import dequantize, random
from jmx.numerics.resizing import pad, unpad

SHAPE = (2, 6, 256)
QUANTIZED = {name: format for name, format in FORMATS.items() if not format.is_float}
every_format = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
every_quantized_format = pytest.mark.parametrize("format", QUANTIZED.values(), ids=QUANTIZED)
every_kind = pytest.mark.parametrize("format", [FORMATS[name] for name in ("mxfp4", *KINDS)], ids=["mxfp4", *KINDS])


@pytest.fixture
def key(rng):
    return jax.random.key(rng.integers(2**31))


@every_quantized_format
def test_pack_and_unpack_are_inverse(format, key):
    q = random(key, SHAPE, format)
    assert is_packed(q)
    assert pack(q) is q
    canonical = unpack(q, format)
    assert canonical.values.dtype == format.element_dtype
    assert canonical.scales.dtype == format.scale_dtype
    assert unpack(canonical, format) is canonical
    on_host = jax.tree.map(np.asarray, q)
    host_canonical = unpack(on_host, format)
    for array in jax.tree.leaves((host_canonical, pack(host_canonical))):
        assert isinstance(array, np.ndarray)
    for other in (jax.jit(unpack, static_argnums=1)(q, format), host_canonical):
        assert not is_packed(other)
        assert_same_bits(other, canonical)
    for other in (pack(canonical), jax.jit(pack)(canonical), pack(host_canonical)):
        assert_same_bits(other, q)


@every_quantized_format
def test_the_even_element_is_in_the_low_nibble(format, key):
    q = jax.tree.map(np.asarray, random(key, SHAPE, format))
    values = bits(unpack(q, format).values)
    if format.element_bits == 4:
        np.testing.assert_array_equal(q.values, values[..., ::2] & 15 | values[..., 1::2] << 4)
    else:
        np.testing.assert_array_equal(q.values, values)


def test_int4_is_twos_complement():
    packed = BlockScaled(np.arange(16, dtype=np.uint8)[None], np.ones((1, 1), jnp.bfloat16))
    expected = [*range(8), *range(-8, 0)]
    for q in (packed, jax.tree.map(jnp.asarray, packed)):
        np.testing.assert_array_equal(np.asarray(unpack(q, FORMATS["mxint4"]).values)[0, ::2].astype(int), expected)


@pytest.mark.parametrize("name", ["mxint4", "int4_g64", "int8_g32", "int8_g32_order"])
@pytest.mark.parametrize("host", [False, True])
def test_offset_binary_is_the_same_integers(name, host, key):
    format = FORMATS[name]
    q = random(key, SHAPE, format)
    canonical = unpack(q, format)
    half = 1 << format.element_bits - 1
    codes = np.asarray(canonical.values).astype(int) + half
    packed = codes.astype(np.uint8)
    if format.element_bits == 4:
        packed = packed[..., ::2] | packed[..., 1::2] << 4
    there = np.asarray if host else jnp.asarray
    assert_same_bits(from_offset_binary(q._replace(values=there(packed)), format), q)
    if format.element_bits == 4:
        given = canonical._replace(values=there(codes.astype(ml_dtypes.uint4)))
        found = from_offset_binary(given, format)
        assert found.values.dtype == jnp.int4
        assert_same_bits(found, canonical)


def test_what_is_no_offset_binary_is_refused(key):
    q = random(key, SHAPE, FORMATS["mxint4"])
    for name in ("mxfp4", "nvfp4", "fp8_tensor", "int4_g32_asym"):
        with pytest.raises(ValueError, match=rf"`format` \(={name}\) must be one of integers without zero points"):
            from_offset_binary(q, FORMATS[name])
    with pytest.raises(TypeError, match=r"`q.values` \(dtype int4\) must be uint4 or uint8"):
        from_offset_binary(unpack(q, FORMATS["mxint4"]), FORMATS["mxint4"])
    whole = unpack(random(key, SHAPE, FORMATS["int8_g32"]), FORMATS["int8_g32"])
    with pytest.raises(TypeError, match=r"`q.values` \(dtype int8\) must be uint8"):
        from_offset_binary(whole, FORMATS["int8_g32"])


@every_kind
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", [(6, 384), (9, 256)])
def test_pad_and_unpad_are_inverse(format, packed, shape, key):
    q = random(key, SHAPE, format)
    q = q if packed else unpack(q, format)
    padded = pad(q, shape, format)
    assert is_packed(padded) == (packed and not format.is_float)
    assert logical_shape(padded, format) == (2, *shape)
    values = np.array(dequantize(padded, jnp.float32, format))
    np.testing.assert_array_equal(values[:, :6, :256], dequantize(q, jnp.float32, format))
    values[:, :6, :256] = 0
    assert not values.any()
    assert_same_bits(unpad(padded, SHAPE[1:], format), q)
    twice = jax.jit(lambda q: unpad(pad(q, shape, format), SHAPE[1:], format))(q)
    assert_same_bits(twice, q)


@every_format
def test_a_format_describes_its_arrays(format, key):
    assert FORMATS[format.name] is format
    packed = random(key, (5, 6, 384), format)
    for weight, is_packed_ in ((unpack(packed, format), False), (packed, True)):
        abstract = format.abstract((5, 6, 384), packed=is_packed_)
        assert jax.tree.map(lambda a: (a.shape, a.dtype), abstract) == jax.tree.map(
            lambda a: (a.shape, a.dtype), weight
        )
        assert logical_shape(weight, format) == (5, 6, 384)
        assert [name for name, array in weight._asdict().items() if array is not None] == list(format.arrays)
    assert format.bytes((5, 6, 384)) == sum(array.nbytes for array in jax.tree.leaves(packed))
    assert hash(format) == hash(FORMATS[format.name])


@pytest.mark.parametrize("format", FLOATS, ids=lambda format: format.name)
def test_floats_have_one_form_without_scales(format, key):
    q = random(key, SHAPE, format)
    assert q.scales is None
    assert q.values.dtype == format.element_dtype
    assert not is_packed(q)
    assert pack(q) is unpack(q, format) is q
    assert logical_shape(q, format) == SHAPE
    assert format.bytes(SHAPE) == q.values.nbytes
    assert format.elements_in_a_byte == 1
    assert format.whole_size(7) == 7
    with pytest.raises(ValueError, match="must have elements of at most 8 bits"):
        format.elements()
    with pytest.raises(TypeError, match=r"`scales` \(dtype float32\) must be None for canonical"):
        logical_shape(q._replace(scales=jnp.ones((2, 6, 1))), format)


def test_names_are_those_of_the_field():
    assert {"mxfp4", "nvfp4", "mxint4", "int4_g128", "int8_channel_asym", "int4_g32_asym_order"} < set(FORMATS)
    assert {"fp8_tensor", "fp8_channel", "fp8_block"} < set(FORMATS)
    assert "mxfp8" in set(FORMATS)
    assert "int4_channel_order" not in set(FORMATS)
    with pytest.raises(FrozenInstanceError):
        MXFP4.block_size = 16  # pyright: ignore[reportAttributeAccessIssue]


def test_sizes_that_are_not_whole_blocks_are_refused(key):
    for name, size, whole in (
        ("mxfp4", 2870, 32),
        ("nvfp4", 24, 16),
        ("int4_channel", 31, 2),
    ):
        with pytest.raises(
            ValueError, match=rf"`hidden_size` \(={size}\) must be a multiple of {whole} for {name.upper()}"
        ):
            FORMATS[name].check_size("hidden_size", size)
    FORMATS["int8_channel"].check_size("hidden_size", 31)
    assert FORMATS["fp8_block"].num_blocks(130, "hidden_size") == 2
    assert MXFP4.num_blocks(2880, "hidden_size") == 90
    q = random(key, (3, 64))
    with pytest.raises(ValueError, match=r"\(=80\) must be a multiple of 32"):
        pad(q, (3, 80))
    with pytest.raises(ValueError, match=r"\(=8\) must be a multiple of 32"):
        unpad(q, (3, 8))
    with pytest.raises(ValueError, match=r"`shape` \(=\(0, 64\)\) must be at least \(3, 64\)"):
        pad(q, (0, 64))
    with pytest.raises(ValueError, match=r"`shape` \(=\(4, 64\)\) must be at most \(3, 64\)"):
        unpad(q, (4, 64))


def test_arrays_that_do_not_fit_are_refused(key):
    q = unpack(random(key, SHAPE, NVFP4), NVFP4)
    with pytest.raises(ValueError, match=r"`global_scales` \(=None\) must be float32 \(2, 6\) for canonical NVFP4"):
        logical_shape(q._replace(global_scales=None), NVFP4)
    with pytest.raises(ValueError, match=r"`global_scales` \(shape \(2,\)\) must be \(2, 6\) for NVFP4"):
        logical_shape(q._replace(global_scales=jnp.ones(2)), NVFP4)
    with pytest.raises(TypeError, match=r"`zero_points` \(dtype float32\) must be None for canonical NVFP4"):
        logical_shape(q._replace(zero_points=q.global_scales), NVFP4)
    with pytest.raises(TypeError, match=r"`scales` \(dtype float32\) must be float8_e4m3fn for canonical NVFP4"):
        logical_shape(q._replace(scales=q.scales.astype(jnp.float32)), NVFP4)
    with pytest.raises(TypeError, match=r"`scales` \(dtype float8_e4m3fn\) must be uint8 for packed NVFP4"):
        logical_shape(q._replace(values=pack(q).values), NVFP4)
    with pytest.raises(TypeError, match=r"`values` \(dtype float32\) must be float4_e2m1fn"):
        logical_shape(q._replace(values=q.values.astype(jnp.float32)), NVFP4)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_scales_of_integers_keep_the_dtype_they_come_in(dtype, key):
    format = FORMATS["int4_g32_asym"]
    q = random(key, SHAPE, format)
    q = q._replace(scales=q.scales.astype(dtype))
    assert logical_shape(q, format) == SHAPE
    assert unpack(q, format).scales.dtype == pad(q, (8, 512), format).scales.dtype == dtype


# What no kernel has code for. Each would be decoded wrongly: as e8m0 scales, in another block, or without its scales.
STRANGE = [
    Format("e2m1_bfloat16", MXFP4.element_dtype, 4, 32, (np.dtype(jnp.bfloat16),)),
    Format("e2m1_row", MXFP4.element_dtype, 4, WHOLE_ROW, (np.dtype(np.float32),)),
    Format("e2m1_e8m0_g16", MXFP4.element_dtype, 4, 16, MXFP4.scale_dtypes),
    Format("e2m1_e4m3_g32", MXFP4.element_dtype, 4, 32, NVFP4.scale_dtypes),
    Format("int4_e8m0", np.dtype(jnp.int4), 4, 32, MXFP4.scale_dtypes),
    Format("int4_g16", np.dtype(jnp.int4), 4, 16, (np.dtype(np.float32),)),
    Format("int4_global", np.dtype(jnp.int4), 4, 32, (np.dtype(np.float32),), ("values", "scales", "global_scales")),
    Format("e4m3_e8m0", np.dtype(jnp.float8_e4m3fn), 8, 32, MXFP4.scale_dtypes),
]


@pytest.mark.parametrize(
    "file",
    ["pallas/mosaic_sm90/layout.py", "pallas/mosaic_sm90_fp8/layout.py", "pallas/triton/ptx.py", "ffi/cpu/backend.py"],
)
def test_kernels_take_no_new_format_whose_scales_they_do_not_know(file, monkeypatch):
    """As if it had been in FORMATS when the kernels' lists of formats were made."""

    def formats_of(module):
        return module["LAYOUT"].formats if "LAYOUT" in module else module.get("FORMAT_NAMES") or module["FORMATS"]

    path = Path(jmx.__file__).parent / file
    now = formats_of(runpy.run_path(str(path)))
    assert {*now} <= {*FORMATS}
    for format in STRANGE:
        monkeypatch.setitem(FORMATS, format.name, format)
    assert formats_of(runpy.run_path(str(path))) == now


def test_kernels_take_new_formats_that_are_decoded_alike(monkeypatch):
    before = with_float_scales(jnp.int4)
    format = Format("int4_bfloat16", np.dtype(jnp.int4), 4, 64, (np.dtype(jnp.bfloat16),))
    monkeypatch.setitem(FORMATS, format.name, format)
    assert with_float_scales(jnp.int4) == (*before, format.name)
