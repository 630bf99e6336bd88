"""The dense parts of a decoder (norm, projection and MLP), and the tensors that their variables consist of."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import jmx
from jmx.models import few_rows
from jmx.models.quantized_weights import QuantizedWeights
from jmx.numerics.formats import precision
from jmx.parallel.peer import all_sum

# Variables of a model, by the neutral names of the tensors that are concatenated in each.
Variables = dict[tuple[str, ...], nnx.Variable]

# From so many tokens on, a product whose result is rounded writes it rounded: on a GPU one kernel adds the bias in
# float32 and rounds, and half the bytes are written and read.
ROUNDED_TOKENS = 256


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + epsilon) * scale over the last axis (Zhang and Sennrich, 2019), in float32.

    Args:
        divided: what its axis is divided as over a mesh, a key of `model_split.DEFAULT_AXES`; None: it is whole.
    """

    def __init__(self, size: int, epsilon: float, *, divided: str | None = None):
        self.scale = nnx.Param(jnp.ones(size, jnp.float32), divided=(divided,))
        self.epsilon = epsilon
        self.divided = divided
        self.summed: tuple[str, ...] = ()  # mesh axes along which devices have other parts of x

    def __call__(self, x: jax.Array) -> jax.Array:
        return (x.astype(jnp.float32) * lax.broadcast_to_rank(self.scale[...], x.ndim) * self.rate(x)).astype(x.dtype)

    def rate(self, x: jax.Array) -> jax.Array:
        """1 / sqrt(mean(x^2) + epsilon), float32 (..., 1)."""
        mean = jnp.mean(x.astype(jnp.float32) ** 2, axis=-1, keepdims=True)
        return lax.rsqrt((lax.pmean(mean, self.summed) if self.summed else mean) + self.epsilon)


class Linear(nnx.Module):
    """x W^T + b in float32. Weights are (out, in), as in checkpoints; there is a bias unless `bias` is False.

    Floats of `dtype` at first; `loading.fill` replaces them by `QuantizedWeights` that stay as a checkpoint has them.

    Args:
        groups: of outputs that sources name separately: each name has as many rows in every group.
        divided: what outputs and inputs are divided as over a mesh, keys of `model_split.DEFAULT_AXES`; None: not at
            all.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool,
        groups: int = 1,
        divided: tuple[str | None, str | None] = (None, None),
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
    ):
        values = nnx.initializers.normal(inputs**-0.5)(rngs.params(), (outputs, inputs), dtype)
        self.groups, self.divided = groups, divided
        self.weights: nnx.Variable = nnx.Param(values, divided=divided)
        self.bias = nnx.data(nnx.Param(jnp.zeros(outputs, dtype), divided=divided[:1]) if bias else None)
        self.summed: tuple[str, ...] = ()  # mesh axes along which devices have other inputs
        self.local = True  # whether arrays in a call are those of one device

    def __call__(self, x: jax.Array, norm: RMSNorm | None = None) -> jax.Array:
        """x (..., in), or the input of `norm` -> float32 (..., out)."""
        if not self.summed:
            return self._by_kernel(x, norm)[0]
        part = project(x, self.weights.get_value(), None, norm).astype(x.dtype)
        out = all_sum(part, self.summed).astype(jnp.float32)
        return out if self.bias is None else out + self.bias[...].astype(jnp.float32)

    def rounded(self, x: jax.Array, norm: RMSNorm | None = None) -> jax.Array:
        """The result for x (..., in), or the input of `norm`, of x's dtype."""
        if self.summed:
            return self(x, norm).astype(x.dtype)
        return self._by_kernel(x, norm, dtype=x.dtype)[0].astype(x.dtype)

    def last_of_groups(self, x: jax.Array, norm: RMSNorm, rows: int, last: int) -> jax.Array:
        """`rounded`, of the `last` of each `rows` outputs alone: (..., groups, last)."""

        def part(array: jax.Array) -> jax.Array:
            return array.reshape(-1, rows, *array.shape[1:])[:, rows - last :].reshape(-1, *array.shape[1:])

        if self.summed:
            return self.rounded(x, norm).reshape(*x.shape[:-1], -1, rows)[..., rows - last :]
        bias = None if self.bias is None else part(self.bias[...])
        out = project(x, part(self.floats(x.dtype)), bias, norm, x.dtype)
        return out.astype(x.dtype).reshape(*x.shape[:-1], -1, last)

    def add_to(self, residual: jax.Array, x: jax.Array) -> jax.Array:
        """The result for x (..., in), rounded to the dtype of `residual` (..., out), added to it."""
        if self.summed:
            return residual + self(x).astype(residual.dtype)
        return self._by_kernel(x, None, residual=residual)[0]

    def beside_norm(self, x: jax.Array, norm: RMSNorm) -> tuple[jax.Array, jax.Array]:
        """The result for the input x of `norm`, and norm(x)."""
        out, normed = self._by_kernel(x, norm, normed=True)
        assert normed is not None
        return out, normed

    def _by_kernel(
        self,
        x: jax.Array,
        norm: RMSNorm | None,
        *,
        residual: jax.Array | None = None,
        normed: bool = False,
        dtype: jax.typing.DTypeLike = jnp.float32,
    ) -> tuple[jax.Array, jax.Array | None]:
        """The result, or with `residual` its sum with that, and with `normed` norm(x): by a kernel where one can.

        The result is float32, or of `dtype`, or with `residual` of its dtype.
        """
        weights, bias = self.weights.get_value(), None if self.bias is None else self.bias[...]
        if self.local and not self.summed:
            found = few_rows.linear(x, weights, bias, norm, residual=residual, normed=normed)
            if found is not None:
                return found
        out = project(x, weights, bias, norm, dtype if residual is None else residual.dtype)
        out = out if residual is None else residual + out.astype(residual.dtype)
        return out, norm(x) if normed and norm is not None else None

    def floats(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        """The weights in floats."""
        return self.weights.get_value().astype(dtype)

    def variables(self, *names: str) -> Variables:
        """The variables, for outputs that sources name separately."""
        found: Variables = {tuple(f"{name}_weight" for name in names): self.weights}
        return found if self.bias is None else found | {tuple(f"{name}_bias" for name in names): self.bias}


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x)), without biases (SwiGLU, Shazeer, 2020)."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs):
        self.gate_up = Linear(hidden_size, 2 * intermediate_size, bias=False, dtype=dtype, rngs=rngs)
        self.down = Linear(intermediate_size, hidden_size, bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, norm: RMSNorm | None = None) -> jax.Array:
        """x (..., H), or the input of `norm` -> float32 (..., H). Between its matrices, values are of x's dtype."""
        gate, up = jnp.split(self.gate_up(x, norm).astype(x.dtype), 2, axis=-1)
        return self.down(jmx.SwiGLU()(gate, up))

    def variables(self, prefix: str = "") -> Variables:
        """The variables, for sources whose names in a layer begin with `prefix`."""
        return self.gate_up.variables(f"{prefix}gate", f"{prefix}up") | self.down.variables(f"{prefix}down")


def project(
    x: jax.Array,
    weights: jax.Array | QuantizedWeights,
    bias: jax.Array | None,
    norm: RMSNorm | None,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> jax.Array:
    """x W^T + b, or norm(x) W^T + b, float32, or of many tokens of `dtype`; see `Linear`.

    Quantized weights are rounded to x's dtype, whatever the number of rows. Those of several rows in float32 would be
    more exact, and XLA's GPU compiler would write and read twice the bytes for their product.
    """
    if isinstance(weights, QuantizedWeights):
        weights = weights.astype(x.dtype)
    if x.size == x.shape[-1]:
        # For one row, a plain sum reads the weights once, at memory bandwidth, and fuses with neighboring operations.
        # A product would be autotuned by XLA's GPU compiler, in buffers three times as large as the weights.
        # The norm's rate multiplies the result, so that its sum and the scaled row are computed in one kernel.
        row = x.astype(jnp.float32).reshape(-1) * (1 if norm is None else norm.scale[...])
        row = lax.optimization_barrier(row)
        out = jnp.sum(weights.astype(jnp.float32) * row[None], axis=-1).reshape(*x.shape[:-1], -1)
        out *= 1 if norm is None else norm.rate(x)
    else:
        x = x if norm is None else norm(x)
        exact = precision(weights.dtype)
        tokens = x.size // x.shape[-1]
        many = isinstance(tokens, int) and tokens >= ROUNDED_TOKENS
        result = dtype if many else jnp.float32
        out = jnp.einsum("...i,oi->...o", x, weights, precision=exact, preferred_element_type=result)
    return out if bias is None else out + lax.broadcast_to_rank(bias.astype(out.dtype), out.ndim)


class Place(NamedTuple):
    """A variable of a model, and where its rows come from.

    Args:
        names: neutral names of tensors.
        variable: of the model.
        groups: the variable has as many groups of rows, each of as many rows of every tensor.
        linear: whose weights it is, or None.
    """

    names: tuple[str, ...]
    variable: nnx.Variable
    groups: int
    linear: Linear | None


def places(module: Any, prefix: str) -> Iterator[Place]:
    """The variables of a module, whose names in the model begin with `prefix`."""
    linears = [its for _, its in nnx.iter_modules(module) if isinstance(its, Linear)]
    weights = {id(its.weights): its for its in linears}
    groups = {id(variable): its.groups for its in linears for variable in (its.weights, its.bias)}
    for names, variable in module.variables().items():
        its = id(variable)
        yield Place(tuple(prefix + name for name in names), variable, groups.get(its, 1), weights.get(its))
