"""Mesh axes of each kind that split each axis of each argument: right where no array moves, else refused by name."""

import dataclasses
from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backend_cases import Case, draw_routing, draw_weights, draw_x
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmx
import jmx.linen
import jmx.nnx
from jmx import Logits, Routing
from jmx.experts import partition_names

pytestmark = [pytest.mark.costly, pytest.mark.devices(4), pytest.mark.sampled(3)]

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
BACKENDS = ("xla", "cpu")
CASE = Case(tokens=16, num_experts=4)
BY_TOKEN = ("x", "expert_ids", "weights", "values", "mask")


def on_mesh(shape=(4,), kinds=EXPLICIT):
    kinds = kinds if isinstance(kinds, tuple) else (kinds,) * len(shape)
    return jax.make_mesh(shape, ("a", "b")[: len(shape)], axis_types=kinds)


def near(y, expected, tolerance=2e-6):
    y, expected = np.asarray(y, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(y - expected) <= tolerance * np.linalg.norm(expected)


def draw(rng, leading=(16,), logits=False, **case):
    """Arrays by name, and what makes `moe`'s arguments of them."""
    case = dataclasses.replace(CASE, **case)
    experts = draw_weights(rng, case).experts(case)
    routing = draw_routing(rng, case)
    arrays = {"x": draw_x(rng, case), "mask": rng.random(case.tokens) < 0.8}
    if logits:
        arrays["values"] = rng.standard_normal((case.tokens, case.num_experts), np.float32)
    else:
        arrays |= {"expert_ids": routing.expert_ids, "weights": routing.weights}
    arrays = {name: jnp.asarray(array).reshape(*leading, *array.shape[1:]) for name, array in arrays.items()}
    if logits:
        arrays["correction_bias"] = jnp.asarray(rng.random(case.num_experts), jnp.float32)
    return arrays | experts.arrays(), experts


def loss(experts, backend, c, floats, rest):
    """The sum over y * c, and y; `floats` are what it may be differentiated by."""
    arrays = floats | rest
    if "values" in arrays:
        method = jmx.SigmoidTopK(2, renormalize=True)
        routing = Logits(arrays["values"], method, arrays["correction_bias"])
    else:
        routing = Routing(arrays["expert_ids"], arrays["weights"])
    experts = experts.with_arrays({name: arrays[name] for name in experts.arrays()})
    y = jmx.moe(arrays["x"], routing, experts, activation=CASE.activation, mask=arrays["mask"], backend=backend)
    return (y * c).sum(), y


def y_and_gradients(arrays, experts, backend, c):
    """y, and the gradients of all that has one, in one program."""
    floats = {n: a for n, a in arrays.items() if n in ("x", "weights", "values") or (n.endswith("_bias") and "_" in n)}
    floats.pop("correction_bias", None)
    rest = {name: array for name, array in arrays.items() if name not in floats}
    run = jax.value_and_grad(partial(loss, experts, backend, c), has_aux=True)
    (_, y), gradients = jax.jit(run)(floats, rest)
    return y, gradients


def assert_right_on(mesh, specs, arrays, experts, backend, c, out):
    y, gradients = y_and_gradients(arrays, experts, backend, c)
    placed = {name: jax.device_put(a, NamedSharding(mesh, specs.get(name, P()))) for name, a in arrays.items()}
    with jax.set_mesh(mesh):
        split_y, split_gradients = y_and_gradients(
            placed, experts, backend, jax.device_put(c, NamedSharding(mesh, out))
        )
    assert split_y.sharding.is_equivalent_to(NamedSharding(mesh, out), y.ndim)
    assert near(split_y, y)
    for name, gradient in gradients.items():
        assert near(split_gradients[name], gradient), name
        assert split_gradients[name].sharding.is_equivalent_to(placed[name].sharding, gradient.ndim), name


# Explicit axes


@pytest.mark.sampled(4)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("leading", "logits", "shape", "kinds", "spec"),
    [
        ((16,), False, (4,), EXPLICIT, P("a")),
        ((16,), True, (4,), EXPLICIT, P("a")),
        ((4, 4), False, (4,), EXPLICIT, P(None, "a")),
        ((4, 4), True, (2, 2), EXPLICIT, P("b", "a")),
        ((16,), False, (2, 2), EXPLICIT, P(("a", "b"))),
        ((16,), False, (2, 2), (EXPLICIT, AUTO), P("a")),
        ((16,), False, (2, 2), (AUTO, EXPLICIT), P("b")),
        ((16,), False, (4,), EXPLICIT, P()),
    ],
)
def test_tokens_are_split(backend, leading, logits, shape, kinds, spec, rng):
    arrays, experts = draw(rng, leading, logits)
    c = rng.standard_normal(arrays["x"].shape, np.float32)
    specs = {name: spec for name in arrays if name in BY_TOKEN}
    assert_right_on(on_mesh(shape, kinds), specs, arrays, experts, backend, c, spec)


@pytest.mark.parametrize("name", ["x", "expert_ids", "weights", "mask"])
def test_arrays_that_are_whole_follow_the_one_that_is_split(name, rng):
    arrays, experts = draw(rng)
    c = rng.standard_normal(arrays["x"].shape, np.float32)
    assert_right_on(on_mesh(), {name: P("a")}, arrays, experts, "xla", c, P("a"))


@pytest.mark.parametrize("logits", [False, True])
def test_what_is_no_token_must_be_whole(logits, rng):
    arrays, experts = draw(rng, (4, 4), logits)
    mesh, tried = on_mesh((2,)), 0
    for name, array in arrays.items():
        tokens = 2 if name in BY_TOKEN else 0
        for axis in range(tokens, array.ndim):
            if array.shape[axis] % 2:  # jax itself refuses to split it
                continue
            tried += 1
            split = {name: jax.device_put(array, NamedSharding(mesh, P(*(None,) * axis, "a")))}
            called = name if name in (*BY_TOKEN, "correction_bias") else f"experts.{name}"
            where = rf"`{called}` \(.*@a.* along axis {axis}.*'a'"
            if axis == 0 and called.startswith("experts."):  # one array of the experts is split, and no other one
                where = r"`experts\.\w+` \(.*must be split along its first axis.*"
            with pytest.raises(ValueError, match=rf"{where}.*jax\.reshard"):
                loss(experts, None, 1.0, {}, arrays | split)
    assert tried == 18


def test_arrays_split_in_different_ways_are_named(rng):
    arrays, experts = draw(rng)
    mesh = on_mesh((2, 2))
    for name, axis in (("x", "a"), ("expert_ids", "b")):
        arrays[name] = jax.device_put(arrays[name], NamedSharding(mesh, P(axis)))
    with pytest.raises(ValueError, match=r"`expert_ids` \(.*16@b.*must be split as `x` is, along axis 0 over 'a'"):
        loss(experts, None, 1.0, {}, arrays)


def test_one_mesh_axis_splits_one_axis_of_the_tokens(rng):
    arrays, experts = draw(rng, (4, 4))
    mesh = on_mesh()
    arrays["x"] = jax.device_put(arrays["x"], NamedSharding(mesh, P("a")))
    arrays["mask"] = jax.device_put(arrays["mask"], NamedSharding(mesh, P(None, "a")))
    with pytest.raises(ValueError, match=r"`mask` .*axis 1 over 'a', which splits another axis of the tokens"):
        loss(experts, None, 1.0, {}, arrays)


def test_an_axis_of_one_device_splits_nothing(rng):
    arrays, experts = draw(rng)
    y = loss(experts, "xla", 1.0, {}, arrays)[1]
    mesh = on_mesh((1,))
    arrays = {n: jax.device_put(a, NamedSharding(mesh, P(*(None,) * (a.ndim - 1), "a"))) for n, a in arrays.items()}
    assert near(loss(experts, "xla", 1.0, {}, arrays)[1], y)


def test_outside_of_any_context_and_with_host_arrays(rng):
    arrays, experts = draw(rng)
    y = loss(experts, "xla", 1.0, {}, arrays)[1]
    arrays = {name: np.asarray(array) for name, array in arrays.items() if name in BY_TOKEN} | experts.arrays()
    arrays["expert_ids"] = arrays["expert_ids"].astype(np.int64)
    arrays["expert_ids"][0] += 1 << 32  # which int32 would wrap around to an expert's
    arrays["x"] = jax.device_put(arrays["x"], NamedSharding(on_mesh(), P("a")))
    split = loss(experts, "xla", 1.0, {}, arrays)[1]
    assert jax.typeof(split).sharding.spec == P("a", None)
    split, y = np.asarray(split), np.asarray(y)
    assert near(split[1:], y[1:])
    assert not split[0].any()


@pytest.mark.parametrize(("shape", "spec"), [((4,), P("a")), ((2, 2), P("a", "b"))])
def test_vmap_over_an_axis_that_is_split(shape, spec, rng):
    arrays, experts = draw(rng, (4, 4))
    x, ids, weights = (arrays[name] for name in ("x", "expert_ids", "weights"))
    c = rng.standard_normal(x.shape, np.float32)

    def run(x, ids, weights, bias, c):
        given = dataclasses.replace(experts, down_bias=bias)

        def one(x, ids, weights):
            return jmx.moe(x, Routing(ids, weights), given, activation=CASE.activation, backend="xla")

        def total(x, weights, bias):
            nonlocal given
            given = dataclasses.replace(experts, down_bias=bias)
            return (jax.vmap(one)(x, ids, weights) * c).sum()

        def of_each(x, ids, weights, c):
            def alone(bias):
                y = jmx.moe(
                    x, Routing(ids, weights), dataclasses.replace(experts, down_bias=bias), activation=CASE.activation
                )
                return (y * c).sum()

            return jax.grad(alone)(bias)

        return (
            jax.vmap(one)(x, ids, weights),
            jax.grad(total, argnums=(0, 1, 2))(x, weights, bias),
            jax.vmap(of_each)(x, ids, weights, c),
        )

    expected = jax.jit(run)(x, ids, weights, experts.down_bias, c)
    mesh = on_mesh(shape)
    placed = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in ((x, spec), (ids, spec), (weights, spec))]
    with jax.set_mesh(mesh):
        bias, c = jax.device_put(experts.down_bias, P()), jax.device_put(c, spec)
        found = jax.jit(run)(*placed, bias, c)
    assert found[0].sharding.is_equivalent_to(NamedSharding(mesh, spec), 3)
    for y, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert near(y, wanted)


@pytest.mark.parametrize("method", [jmx.TopKSoftmax(2), jmx.GroupedTopK(2, 4, 2, "sigmoid", renormalize=True)])
@pytest.mark.parametrize("spec", [P("a"), P(None, "a")])
def test_route_of_split_tokens(method, spec, rng):
    values = jnp.asarray(rng.standard_normal((4, 4, 8)), jnp.float32)
    expected = jmx.route(Logits(values, method))
    found = jmx.route(Logits(jax.device_put(values, NamedSharding(on_mesh(), spec)), method))
    assert (np.asarray(found.expert_ids) == expected.expert_ids).all()
    assert near(found.weights, expected.weights)
    assert jax.typeof(found.weights).sharding.spec == P(*spec, *(None,) * (3 - len(spec)))


def test_route_and_token_counts_name_what_must_be_whole(rng):
    values = jnp.asarray(rng.standard_normal((4, 8)), jnp.float32)
    mesh = on_mesh()
    with pytest.raises(ValueError, match=r"`values` .*along axis 1.*'a'"):
        jmx.route(Logits(jax.device_put(values, NamedSharding(mesh, P(None, "a"))), jmx.TopKSoftmax(2)))
    routing = jmx.route(Logits(values, jmx.TopKSoftmax(2)))
    split = jax.device_put(routing.expert_ids, NamedSharding(mesh, P("a")))
    with pytest.raises(ValueError, match=r"`expert_ids` .*along axis 0.*'a'"):
        jmx.token_counts(Routing(split, routing.weights), 8)


# Flax modules on Explicit axes


@pytest.mark.parametrize("in_scope", [True, False])
@pytest.mark.parametrize("spec", [P("a"), P(None, "a")])
def test_modules_take_split_tokens(spec, in_scope, rng):
    x = jnp.asarray(rng.standard_normal((4, 4, 64)), jnp.float32)
    sizes = {"bias": True, "param_dtype": jnp.float32, "layout": "packed"}
    layer, linen = jmx.nnx.MoE(64, 64, 4, 2, rngs=nnx.Rngs(0), **sizes), jmx.linen.MoE(64, 64, 4, 2, **sizes)
    variables = linen.init(jax.random.key(0), x)

    def run(layer, variables, x):
        gradient = nnx.grad(lambda layer, x: (layer(x) ** 2).sum())(layer, x)
        return layer(x), linen.apply(variables, x), jax.tree.leaves(gradient)

    expected = jax.jit(run)(layer, variables, x)
    mesh = on_mesh()
    with jax.set_mesh(mesh) if in_scope else nullcontext():
        found = jax.jit(run)(layer, variables, jax.device_put(x, NamedSharding(mesh, spec)))
    for y, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert near(y, wanted, 1e-5)
    assert jax.typeof(found[0]).sharding.spec == P(*spec, *(None,) * (3 - len(spec)))


def test_modules_name_a_split_hidden_axis(rng):
    x = jnp.asarray(rng.standard_normal((4, 64)), jnp.float32)
    layer, linen = jmx.nnx.MoE(64, 64, 4, 2, rngs=nnx.Rngs(0)), jmx.linen.MoE(64, 64, 4, 2)
    variables = linen.init(jax.random.key(0), x)
    split = jax.device_put(x, NamedSharding(on_mesh(), P(None, "a")))
    for call in (layer, layer.route, partial(linen.apply, variables)):
        with pytest.raises(ValueError, match=r"`x` \(float32\[4,64@a\]\) must not be split along axis 1"):
            call(split)


# Manual axes


def sharded(body, mesh, in_specs, out_specs, check):
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [8, 256])  # of which each device has few, and many
@pytest.mark.parametrize("split", ["x", "routing", "both", "experts", "none"])
def test_gradients_through_shard_map_that_checks_types(backend, tokens, split, rng):
    arrays, experts = draw(rng, (tokens,), tokens=tokens)
    c = rng.standard_normal(arrays["x"].shape, np.float32)
    y, gradients = y_and_gradients(arrays, experts, backend, c)
    by_token = {"both": {*BY_TOKEN}, "none": set(), "experts": set(), "x": {"x"}, "routing": {*BY_TOKEN} - {"x"}}[split]
    by_expert = {*experts.arrays()} if split == "experts" else set()
    specs = {name: P("a") if name in by_token | by_expert else P() for name in arrays}
    mesh = on_mesh(kinds=AUTO)

    def body(arrays, c):
        if split in ("x", "routing"):  # the other one, whole, is split here
            count = tokens // 4
            start = jax.lax.axis_index("a") * count
            whole = {name for name in BY_TOKEN if name in arrays and name not in by_token}
            cut = {name: jax.lax.dynamic_slice_in_dim(arrays[name], start, count) for name in whole}
            arrays = arrays | cut
        if split == "experts":
            arrays = arrays | {"expert_ids": arrays["expert_ids"] - jax.lax.axis_index("a")}
        y = loss(experts, backend, 1.0, {}, arrays)[1]
        return jax.lax.psum(y, "a") if split == "experts" else y

    out = P("a") if by_token else P()
    run = sharded(body, mesh, (specs, P()), out, True)

    def total(floats):
        y = run(arrays | floats, c)
        return (y * c).sum(), y

    floats = {name: arrays[name] for name in gradients}
    (_, split_y), found = jax.value_and_grad(total, has_aux=True)(floats)
    assert near(split_y, y)
    for name, gradient in gradients.items():
        assert near(found[name], gradient), name


def test_scan_remat_and_vmap_inside_shard_map_that_checks_types(rng):
    arrays, experts = draw(rng, (4, 4))
    mesh = on_mesh(kinds=AUTO)

    def body(x, ids, weights, bias):
        given = dataclasses.replace(experts, gate_up_bias=bias)

        @jax.checkpoint
        def one(x, ids, weights):
            return jmx.moe(x, Routing(ids, weights), given, activation=CASE.activation)

        def step(x, _):
            return x + jax.vmap(one)(x, ids, weights), None

        return jax.lax.scan(step, x, None, 2)[0]

    def run(body):
        def total(x, weights, bias):
            return (body(x, arrays["expert_ids"], weights, bias) ** 2).sum()

        return jax.jit(jax.grad(total, argnums=(0, 1, 2)))(arrays["x"], arrays["weights"], experts.gate_up_bias)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(P("a"), P("a"), P("a"), P()), out_specs=P("a"))
    for found, expected in zip(run(mapped), run(body), strict=True):
        assert near(found, expected, 1e-5)


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("layout", ["packed", "canonical", "mosaic_sm90"])
def test_experts_split_by_expert_inside_shard_map(check, layout, rng):
    arrays, experts = draw(rng)
    experts = experts.prepare(layout)
    routing = Routing(arrays["expert_ids"], arrays["weights"])
    y = jmx.moe(arrays["x"], routing, experts, activation=CASE.activation, backend="xla")

    def body(experts):
        ids = routing.expert_ids - jax.lax.axis_index("a")  # those of other devices' experts contribute nothing
        part = jmx.moe(arrays["x"], Routing(ids, routing.weights), experts, activation=CASE.activation, backend="xla")
        return jax.lax.psum(part, "a")

    assert near(sharded(body, on_mesh(kinds=AUTO), P("a"), P(), check)(experts), y)


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("order", ["interleaved", "concatenated"])
@pytest.mark.parametrize("axis", ["hidden", "intermediate"])
def test_weights_sliced_inside_shard_map_are_named(axis, order, check, rng):
    arrays, experts = draw(rng, order=order, intermediate=64)
    specs = experts.with_arrays({name: P(*axes) for name, axes in partition_names(experts, {axis: "a"}).items()})
    routing = Routing(arrays["expert_ids"], arrays["weights"])

    def body(experts):
        return jax.lax.psum(jmx.moe(arrays["x"], routing, experts, activation=CASE.activation), "a")

    with pytest.raises(ValueError, match=r"`experts\.gate_up_values` \(shape \(4, .*jmx\.ShardedExperts along"):
        sharded(body, on_mesh((2,), AUTO), (specs,), P(), check)(experts)


@pytest.mark.parametrize("axis", ["expert", "hidden", "intermediate"])
@pytest.mark.parametrize("layout", ["packed", "canonical", "mosaic_sm90"])
def test_a_stack_split_inside_shard_map_keeps_its_layers(layout, axis, rng):
    arrays, experts = draw(rng, hidden=256, intermediate=256)
    stack = jmx.Experts.stack([draw(rng, hidden=256, intermediate=256)[1].prepare(layout), experts.prepare(layout)])
    specs = stack.with_arrays({name: P(*axes) for name, axes in partition_names(stack, {axis: "a"}).items()})
    x, ids, weights = (arrays[name] for name in ("x", "expert_ids", "weights"))

    def body(stack, layer):
        first = 2 * jax.lax.axis_index("a") if axis == "expert" else 0
        return jax.lax.psum(
            jmx.moe(x, Routing(ids - first, weights), stack.layer(layer), activation=CASE.activation), "a"
        )

    run = sharded(body, on_mesh((2,), AUTO), (specs, P()), P(), True)
    if axis == "expert":
        y = jmx.moe(x, Routing(ids, weights), experts, activation=CASE.activation)
        assert near(run(stack, jnp.int32(1)), y)
    else:
        with pytest.raises(ValueError, match=r"`experts\.\w+` .*jmx\.ShardedExperts along|not evenly divisible"):
            run(stack, jnp.int32(1))


def test_tokens_split_over_an_explicit_axis_inside_shard_map(rng):
    """Along a Manual axis and an Explicit one at a time; jax has gradients of such nests where nothing is checked."""
    arrays, experts = draw(rng)
    c = rng.standard_normal(arrays["x"].shape, np.float32)
    y, gradients = y_and_gradients(arrays, experts, "xla", c)
    mesh = on_mesh((2, 2))
    by_token = {name: P(("a", "b")) for name in arrays if name in BY_TOKEN}
    placed = {name: jax.device_put(a, NamedSharding(mesh, by_token.get(name, P()))) for name, a in arrays.items()}
    specs = {name: P("a") if name in by_token else P() for name in arrays}

    def run(check, arrays):
        body = partial(loss, experts, "xla", 1.0, {})
        return jax.shard_map(
            lambda arrays: body(arrays)[1],
            in_specs=(specs,),
            out_specs=P("a"),
            axis_names={"a"},
            check_vma=check,
        )(arrays)

    def total(floats, rest):
        y = run(False, floats | rest)
        return (y * jax.device_put(c, P(("a", "b")))).sum(), y

    with jax.set_mesh(mesh):
        checked = jax.jit(partial(run, True))(placed)
        floats = {name: placed.pop(name) for name in gradients}
        (_, split_y), found = jax.jit(jax.value_and_grad(total, has_aux=True))(floats, placed)
    assert near(checked, y)
    assert near(split_y, y)
    for name, gradient in gradients.items():
        assert near(found[name], gradient), name
