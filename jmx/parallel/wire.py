"""The wire format of tokens: FP8 codes, where experts round the tokens to this format in any case.

Each block of a row goes as its codes and its largest magnitude, which stands for the scale: the scale is a function of
it. The receiver makes tokens of these that round to the same codes with the same scales. They are not the sender's
tokens, but experts, which round them first, compute the same bits.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax

from jmx.meshes import Names
from jmx.numerics import element_codes, input_formats, rounding
from jmx.numerics.input_formats import INPUT_FORMATS, InputFormat
from jmx.util.typing import Array, Float, Float32, Int32, Shaped, UInt, UInt8

FORMATS = tuple(
    format.name
    for format in (
        input_formats.FP8_TOKEN,
        input_formats.FP8_BLOCK,
        input_formats.FP8_BLOCK_UE8M0,
        input_formats.MXFP8,
    )
)
# Bytes that a device saves for each copy of its tokens that it sends, from which they are coded. With fewer, the
# kernels that code and decode take longer than the bytes that they save, by estimate.
LEAST_SAVED = 2 << 20
_AMAX_BYTES = 2  # of tokens of 16 bits

# Arrays of this device's tokens, and axes -> those of all devices.
Collective = Callable[[tuple[Shaped[Array, "T _"], ...], Names], list[Shaped[Array, "nT _"]]]


@dataclass(frozen=True)
class Wire:
    """Codes of rows of `hidden_size` elements, bfloat16 or float16, in an input format."""

    format: InputFormat
    hidden_size: int

    @classmethod
    def of(cls, num_tokens: int, hidden_size: int, itemsize: int, input_format: str | None) -> "Wire | None":
        """That of a device's tokens, of `itemsize` bytes an element; None: they are sent as they are.

        `input_format`: what the experts' first product rounds the tokens to; None: nothing.
        """
        if input_format not in FORMATS or itemsize != _AMAX_BYTES:
            return None
        wire = cls(INPUT_FORMATS[input_format], hidden_size)
        return wire if num_tokens * (hidden_size * itemsize - wire.token_bytes) >= LEAST_SAVED else None

    @property
    def token_bytes(self) -> int:
        """Bytes of a row."""
        return self.hidden_size + _AMAX_BYTES * self._num_blocks

    @property
    def _num_blocks(self) -> int:
        return self.format.scales_shape((self.hidden_size,))[-1]

    def encode(self, x: Float[Array, "T H"]) -> UInt[Array, "T m"]:
        """Codes and largest magnitudes of each row, in one buffer: unsigned integers of 16 bits, of 8 if H is odd."""
        codes = lax.bitcast_convert_type(input_formats.quantize(x, self.format).values, jnp.uint8)
        magnitudes = lax.bitcast_convert_type(x, jnp.uint16) & 0x7FFF
        amax = self._largest(magnitudes)  # as integers, which are in the order of the magnitudes
        if self.hidden_size % 2:
            return jnp.concatenate([codes, lax.bitcast_convert_type(amax, jnp.uint8).reshape(len(x), -1)], axis=1)
        pairs = lax.bitcast_convert_type(codes.reshape(len(x), -1, 2), jnp.uint16)
        return jnp.concatenate([pairs, amax], axis=1)

    def decode(self, buffer: UInt[Array, "T m"], dtype: jnp.dtype) -> Float[Array, "T H"]:
        """Rows of `dtype` that `quantize` rounds to the codes in the buffer, and to their scales.

        An element is the centre of the numbers that round to its code, rounded to `dtype`: that one has the same code,
        too, also among subnormals. Of those with the largest code of a block, at least one had the largest magnitude.
        All get it: its scale is therefore the block's, and its code theirs.
        """
        codes, amax = self._parts(buffer)
        largest = self._of_elements(self._largest(codes & 0x7F))
        everyones = self._of_elements(amax)
        scale = self._of_elements(self._scales(lax.bitcast_convert_type(amax, dtype)))
        inner = lax.bitcast_convert_type(_centres(codes & 0x7F, scale, dtype), jnp.uint16)
        bits = jnp.where(codes & 0x7F == largest, everyones, inner)
        return lax.bitcast_convert_type(bits | (codes >> 7).astype(jnp.uint16) << 15, dtype)

    def _parts(self, buffer: UInt[Array, "T m"]) -> tuple[UInt8[Array, "T H"], UInt[Array, "T b"]]:
        """Codes, and largest magnitudes."""
        num_tokens, size = len(buffer), self.hidden_size
        if size % 2:
            tail = buffer[:, size:].reshape(num_tokens, -1, _AMAX_BYTES)
            return buffer[:, :size], lax.bitcast_convert_type(tail, jnp.uint16)
        codes = lax.bitcast_convert_type(buffer[:, : size // 2], jnp.uint8)
        return codes.reshape(num_tokens, size), buffer[:, size // 2 :]

    def _scales(self, amax: Float[Array, "T b"]) -> Int32[Array, "T b"]:
        """float32 bits of the scales of blocks with these largest magnitudes."""
        powers = self.format.scale_dtype != jnp.float32
        format = input_formats.FP8_BLOCK_UE8M0 if powers else input_formats.FP8_TOKEN  # the same rules for scales
        scales = input_formats.quantize(amax[..., None], format).scales[..., 0]
        if powers:
            scales = element_codes.power_of_two(lax.bitcast_convert_type(scales, jnp.uint8))
        return lax.bitcast_convert_type(scales, jnp.int32)

    @property
    def _block_size(self) -> int:
        size = self.format.block_size
        return size if isinstance(size, int) else self.hidden_size

    def _largest(self, values: UInt[Array, "T H"]) -> UInt[Array, "T b"]:
        """The largest one of each block."""
        short = self._num_blocks * self._block_size - self.hidden_size
        whole = jnp.pad(values, ((0, 0), (0, short)))
        return whole.reshape(len(values), self._num_blocks, self._block_size).max(axis=-1, initial=0)

    def _of_elements(self, of_blocks: Shaped[Array, "T b"]) -> Shaped[Array, "T H"]:
        return jnp.repeat(of_blocks, self._block_size, axis=1)[:, : self.hidden_size]


@dataclass(frozen=True)
class Coded:
    """A collective of tokens and their routing that sends tokens in a wire format, or as they are if that is None."""

    wire: Wire | None
    collective: Collective

    def __call__(self, arrays: tuple[Shaped[Array, "T _"], ...], axes: Names) -> list[Shaped[Array, "nT _"]]:
        if self.wire is None:
            return self.collective(arrays, axes)
        x, *others = arrays
        buffer, *received = self.collective((self.wire.encode(x), *others), axes)
        return [self.wire.decode(buffer, x.dtype), *received]


def _centres(codes: UInt8[Array, "T H"], scale: Int32[Array, "T H"], dtype: jnp.dtype) -> Float[Array, "T H"]:
    """The centres of the numbers that round to e4m3 codes without a sign, times scales (float32 bits), in `dtype`."""

    def by_floats(codes: UInt8[Array, "T H"], scale: Int32[Array, "T H"]) -> Float[Array, "T H"]:
        return (_unscaled(codes) * lax.bitcast_convert_type(scale, jnp.float32)).astype(dtype)

    def by_integers(codes: UInt8[Array, "T H"], scale: Int32[Array, "T H"]) -> Float[Array, "T H"]:
        """XLA's CPU code flushes subnormals of float32, and of bfloat16."""
        bits = rounding.times(lax.bitcast_convert_type(_unscaled(codes), jnp.int32), scale)
        if dtype != jnp.bfloat16:
            return lax.bitcast_convert_type(bits, jnp.float32).astype(dtype)
        upper = bits + 0x7FFF + (bits >> 16 & 1) >> 16
        return lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16)

    return lax.platform_dependent(codes, scale, cuda=by_floats, default=by_integers)


def _unscaled(codes: UInt8[Array, "T H"]) -> Float32[Array, "T H"]:
    """The centres. Below a power of two the numbers of e4m3 are twice as close as above it."""
    values = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    power = (codes & 7 == 0) & (codes >> 3 >= 2)
    return values * jnp.where(power, jnp.float32(1 + 2**-6), jnp.float32(1))
