"""Arrays of experts that their sizes, format, layout or each other contradict: refused by name, before any trace."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backend_cases import Case, draw_routing, draw_weights, draw_x

import jmx
from jmx import Experts
from jmx.experts.arrays import check_arrays
from jmx.experts.creation import ORDERS
from jmx.numerics.formats import FORMATS
from jmx.numerics.layouts import LAYOUTS

E, HIDDEN, INTERMEDIATE = 4, 128, 256


def abstract(layout="packed", format="mxfp4", order="interleaved", scale_dtype=None, layers=0):
    """Experts of shapes alone."""

    def make():
        sizes = E, HIDDEN, INTERMEDIATE
        experts = Experts.random(jax.random.key(0), *sizes, gate_up_order=order, format=FORMATS[format])
        if scale_dtype is not None:
            experts = experts.prepare("canonical")
            cast = {
                r: getattr(experts, r)._replace(scales=getattr(experts, r).scales.astype(scale_dtype))
                for r in ("gate_up", "down")
            }
            experts = dataclasses.replace(experts, **cast)
        experts = experts.prepare(layout)
        return Experts.stack([experts] * layers) if layers else experts

    return jax.eval_shape(make)


HELD = [(layout.name, name) for layout in LAYOUTS.values() for name, f in FORMATS.items() if layout.holds(f)]


@pytest.mark.parametrize("order", ORDERS)
def test_what_every_layout_holds_is_taken(order):
    for layout, format in HELD:
        check_arrays(abstract(layout, format, order))


@pytest.mark.parametrize("layout", ["packed", "canonical", "mosaic_sm90"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_scales_may_have_each_dtype_of_the_format(layout, dtype):
    check_arrays(abstract(layout, "int4_g128", scale_dtype=dtype))


def halved(array, axis):
    return jax.ShapeDtypeStruct((*array.shape[:axis], array.shape[axis] // 2, *array.shape[axis + 1 :]), array.dtype)


@pytest.mark.parametrize("layers", [0, 2])
def test_an_array_sliced_along_any_axis_is_named(layers):
    tried = 0
    for layout, format in HELD:
        if format not in ("mxfp4", "nvfp4", "int4_g64_asym_order", "fp8_block"):
            continue
        experts = abstract(layout, format, layers=layers)
        experts = dataclasses.replace(experts, index=jax.ShapeDtypeStruct((), jnp.int32)) if layers else experts
        for name, array in experts.arrays().items():
            for axis in range(array.ndim):
                if array.shape[axis] < 2:
                    continue
                tried += 1
                cut = experts.with_arrays(experts.arrays() | {name: halved(array, axis)})
                with pytest.raises(ValueError, match=r"`experts\.\w+` \(shape \(.*\)\) must be \(.*for \d experts of"):
                    check_arrays(cut)
    assert tried > 100


def test_one_array_of_other_experts_is_named():
    experts = abstract()
    for name, array in experts.arrays().items():
        more = jax.ShapeDtypeStruct((2 * E, *array.shape[1:]), array.dtype)
        wrong = "gate_up_scales" if name == "gate_up_values" else name  # by whose values the others are judged
        with pytest.raises(ValueError, match=rf"`experts\.{wrong}` \(shape .*for {8 if wrong != name else 4} experts"):
            check_arrays(experts.with_arrays(experts.arrays() | {name: more}))


@pytest.mark.parametrize(("layout", "format"), HELD)
def test_cast_arrays_are_named(layout, format):
    experts = abstract(layout, format)
    for name, array in experts.arrays().items():
        dtype = np.int16 if name.endswith("bias") else np.complex64
        cast = experts.with_arrays(experts.arrays() | {name: jax.ShapeDtypeStruct(array.shape, dtype)})
        with pytest.raises(TypeError, match=rf"`experts\.{name}` \(dtype {np.dtype(dtype)}\) must be "):
            check_arrays(cast)


@pytest.mark.parametrize(("layout", "format"), HELD)
def test_arrays_that_are_missing_or_none_too_many_are_named(layout, format):
    experts = abstract(layout, format)
    for role in ("gate_up", "down"):
        for field, array in getattr(experts, role)._asdict().items():
            other = None if array is not None else jax.ShapeDtypeStruct((E,), jnp.float32)
            wrong = dataclasses.replace(experts, **{role: getattr(experts, role)._replace(**{field: other})})
            must = "None" if array is None else "an array"
            with pytest.raises(TypeError, match=rf"`experts\.{role}_{field}` \(.*\) must be {must}"):
                check_arrays(wrong)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"gate_up": None}, TypeError, r"`experts\.gate_up` \(=None\)"),
        ({"gate_up_input_scale": jnp.float32(1)}, TypeError, r"`experts\.gate_up_input_scale` .*must be None"),
        ({"input_format": "fp8_static"}, TypeError, r"`experts\.gate_up_input_scale` \(=None.*must be an array"),
        ({"down_bias": jnp.ones((E, HIDDEN), jnp.int8)}, TypeError, r"`experts\.down_bias` \(dtype int8\) must be f"),
        ({"index": jnp.int32(0)}, ValueError, r"`experts\.gate_up_values` .*must have 4 axes, layers, experts"),
        ({"intermediate_size": INTERMEDIATE // 2}, ValueError, r"`experts\.gate_up_values` .*intermediate_size=128"),
        ({"gate_up_order": None}, ValueError, r"`experts\.gate_up_values` \(shape \(4, 512, 64\)\) must be \(4, 256"),
    ],
)
def test_fields_that_contradict_the_arrays_are_named(change, error, message):
    with pytest.raises(error, match=message):
        check_arrays(dataclasses.replace(abstract(), **change))


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (None, ValueError, r"pass `experts\.layer\(i\)`, not the stack"),
        (jnp.float32(0), TypeError, r"`experts\.index` \(dtype float32\) must be an integer"),
        (jnp.zeros(2, jnp.int32), ValueError, r"`experts\.index` \(shape \(2,\)\)"),
    ],
)
def test_the_layer_of_a_stack_is_looked_at(index, error, message):
    stack = abstract(layers=2)
    check_arrays(dataclasses.replace(stack, index=jnp.int32(0)))
    with pytest.raises(error, match=message):
        check_arrays(dataclasses.replace(stack, index=index))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_moe_and_explain_refuse_a_pytree_that_was_cast(dtype, rng):
    case = Case()
    x, routing = draw_x(rng, case), draw_routing(rng, case)
    cast = jax.tree.map(lambda array: array.astype(dtype), draw_weights(rng, case).experts(case))
    for call in (jmx.moe, jmx.explain):
        with pytest.raises(TypeError, match=rf"`experts\.gate_up_values` \(dtype {dtype}\) must be uint8 for mxfp4"):
            call(x, routing, cast, activation=case.activation)
