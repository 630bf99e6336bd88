"""Experts and tokens divided over meshes, beside one device: every mesh and split, and every transformation."""

import dataclasses
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from model_steps import relative_error

import jmx
from jmx.parallel import PlacedExperts, Placement, balance
from jmx.selection.select import select

pytestmark = [
    pytest.mark.costly,
    pytest.mark.devices(8),
    pytest.mark.sampled(4),
    pytest.mark.usefixtures("peer_by_collectives"),
]

E, H, INTERMEDIATE, T, K = 16, 64, 64, 32, 3
EXCHANGES = tuple(jmx.parallel.EXCHANGES)
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
MESHES = ((1, 8), (2, 4), (4, 2), (8, 1))
TOKENS = (("dp", "ep"), ("dp",), ("ep",), ())
C = np.sin(np.arange(T * H, dtype=np.float32)).reshape(T, H)


def mesh_of(shape: tuple[int, ...], kind: str = "auto", names: tuple[str, ...] = ("dp", "ep")) -> Any:
    return jax.make_mesh(shape, names, axis_types=(KINDS[kind],) * len(shape))


def put(tree: Any, mesh: Any, *spec: Any) -> Any:
    return jax.tree.map(lambda array: jax.device_put(array, NamedSharding(mesh, P(*spec))), tree)


def experts_of(format: str = "mxfp4", order: str | None = "interleaved", size: int = INTERMEDIATE) -> jmx.Experts:
    key = jax.random.key(0)
    return jmx.Experts.random(key, E, H, size, gate_up_order=order, format=format, bias_dtype=jnp.float32)


def run(x: Any, logits: Any, experts: Any, split: jmx.Split | None = None, mask: Any = None) -> jax.Array:
    routing = jmx.Logits(logits, jmx.TopKSoftmax(K))
    return jmx.moe(x, routing, experts, activation=jmx.SwiGLU(), backend="xla", split=split, mask=mask)


def loss(floats: Any, experts: Any, split: jmx.Split | None = None) -> jax.Array:
    """Of x, logits and both biases."""
    x, logits, gate_up_bias, down_bias = floats
    if isinstance(experts, jmx.ShardedExperts):
        shards = dataclasses.replace(experts.shards, gate_up_bias=gate_up_bias)
        experts = dataclasses.replace(experts, shards=shards, down_bias=down_bias)
    else:
        experts = dataclasses.replace(experts, gate_up_bias=gate_up_bias, down_bias=down_bias)
    return (run(x, logits, experts, split) * C).sum()


def alike(got: Any, expected: Any, tolerance: float = 1e-6) -> bool:
    return jax.tree.all(jax.tree.map(lambda a, b: relative_error(a, b) <= tolerance, got, expected))


@dataclasses.dataclass
class Whole:
    """Arguments, and what one device computes of them."""

    x: jax.Array
    logits: jax.Array
    experts: jmx.Experts
    y: jax.Array
    gradients: Any


@pytest.fixture(scope="module")
def whole() -> Whole:
    experts = experts_of()
    x = jax.random.normal(jax.random.key(1), (T, H), jnp.float32)
    logits = jax.random.normal(jax.random.key(2), (T, E), jnp.float32)
    floats = x, logits, experts.gate_up_bias, experts.down_bias
    return Whole(x, logits, experts, jax.jit(run)(x, logits, experts), jax.jit(jax.grad(loss))(floats, experts))


# Results and gradients


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("tokens", TOKENS, ids="-".join)
@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize("kind", KINDS)
def test_divided_experts_compute_what_one_device_does(
    whole: Whole, kind: str, shape: Any, tokens: Any, exchange: str
) -> None:
    mesh, split = mesh_of(shape, kind), jmx.Split(expert="ep", tokens=tokens, exchange=exchange)
    experts = put(whole.experts, mesh, "ep")
    x, logits = put((whole.x, whole.logits), mesh, tokens or None)
    with jax.set_mesh(mesh):
        compiled = jax.jit(partial(run, split=split)).lower(x, logits, experts).compile()
        y = compiled(x, logits, experts)
        assert np.array_equal(y, compiled(x, logits, experts))
        floats = x, logits, experts.gate_up_bias, experts.down_bias
        gradients = jax.jit(jax.grad(partial(loss, split=split)))(floats, experts)
    assert alike(y, whole.y)
    assert alike(gradients, whole.gradients)
    # Weights stay where they are.
    for line in re.findall(r".* all-gather(?:-start)?\(.*", compiled.as_text() or ""):
        gathered = max(int(np.prod([int(n) for n in dims.split(",")])) for dims in re.findall(r"\[([\d,]+)\]", line))
        assert gathered <= T * (2 * H + 4 * K), line


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("tokens", [("dp", "ep"), ("dp", "ep", "tp"), ("tp",), ("dp",), ()], ids="-".join)
@pytest.mark.parametrize(("shards", "intermediate"), [(2, "tp"), (4, "tp"), (4, ("tp", "dp"))])
def test_divided_shards_compute_what_one_device_does(
    whole: Whole, shards: int, intermediate: Any, tokens: Any, exchange: str
) -> None:
    mesh = mesh_of((2, 2, 2), names=("dp", "ep", "tp"))
    split = jmx.Split(expert="ep", tokens=tokens, intermediate=intermediate, exchange=exchange)
    experts = jmx.ShardedExperts.of(whole.experts, shards)
    floats = whole.x, whole.logits, experts.shards.gate_up_bias, experts.down_bias
    with jax.set_mesh(mesh):
        y = jax.jit(partial(run, split=split))(whole.x, whole.logits, experts)
        gradients = jax.jit(jax.grad(partial(loss, split=split)))(floats, experts)
    assert alike(y, whole.y)
    shards_of = dataclasses.replace(experts.shards, gate_up_bias=gradients[2])
    joined = dataclasses.replace(experts, shards=shards_of, down_bias=gradients[3]).whole()
    assert alike((*gradients[:2], joined.gate_up_bias, joined.down_bias), whole.gradients)


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "int4_g32_asym_order", "int8_channel", "fp8_block", "fp8_tensor"])
@pytest.mark.parametrize("order", ["concatenated", None])
@pytest.mark.parametrize("backend", ["xla", "cpu"])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_formats(format: str, order: str | None, backend: str, exchange: str) -> None:
    experts = experts_of(format, order, 128)
    x = jax.random.normal(jax.random.key(1), (T, H), jnp.float32)
    logits = jax.random.normal(jax.random.key(2), (T, E), jnp.float32)
    activation = jmx.SwiGLU() if order else jmx.SiLU()

    def layer(experts: Any, split: jmx.Split | None = None) -> jax.Array:
        routing = jmx.Logits(logits, jmx.TopKSoftmax(K))
        return jmx.moe(x, routing, experts, activation=activation, split=split, backend=backend)

    try:
        expected = jax.jit(layer)(experts)
    except jmx.NoBackendError as e:
        pytest.skip(str(e).splitlines()[0])
    with jax.set_mesh(mesh_of((2, 2, 2), names=("dp", "ep", "tp"))):
        for given, intermediate in ((experts, None), (jmx.ShardedExperts.of(experts, 2), "tp")):
            split = jmx.Split(expert="ep", tokens=("dp", "ep"), intermediate=intermediate, exchange=exchange)
            assert relative_error(jax.jit(partial(layer, split=split))(given), expected) <= 2e-6


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_everything_to_one_device_and_empty_devices(whole: Whole, exchange: str) -> None:
    split = jmx.Split(expert="ep", tokens=("dp", "ep"), exchange=exchange)
    for favourites in ((0,), (E - 1, 5)):
        logits = whole.logits.at[:, favourites].add(50)
        with jax.set_mesh(mesh_of((2, 4))):
            y = jax.jit(partial(run, split=split))(whole.x, logits, whole.experts)
        assert alike(y, run(whole.x, logits, whole.experts))


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_row_of_nan_affects_itself_only(whole: Whole, exchange: str) -> None:
    split = jmx.Split(expert="ep", tokens=("dp", "ep"), exchange=exchange)
    with jax.set_mesh(mesh_of((2, 4))):
        y = np.asarray(jax.jit(partial(run, split=split))(whole.x.at[5].set(jnp.nan), whole.logits, whole.experts))
    assert np.isnan(y[5]).all()
    assert relative_error(np.delete(y, 5, 0), np.delete(np.asarray(whole.y), 5, 0)) <= 1e-6


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_padding_tokens_route_nowhere(whole: Whole, exchange: str) -> None:
    split, mask = jmx.Split(expert="ep", tokens=("dp", "ep"), exchange=exchange), np.arange(T) % 3 > 0
    with jax.set_mesh(mesh_of((2, 4))):
        y = jax.jit(partial(run, split=split, mask=mask))(whole.x, whole.logits, whole.experts)
    assert alike(y, jnp.where(mask[:, None], whole.y, 0))


def test_bfloat16_tokens_and_weights_of_a_routing(whole: Whole) -> None:
    """Tokens and routing of different sizes in one collective."""
    x = whole.x.astype(jnp.bfloat16)
    ids, weights = jmx.route(jmx.Logits(whole.logits, jmx.TopKSoftmax(K)))
    for dtype in (jnp.float32, jnp.bfloat16):
        routing = jmx.Routing(ids, weights.astype(dtype))
        call = partial(jmx.moe, activation=jmx.SwiGLU(), backend="xla")
        expected = call(x, routing, whole.experts)
        with jax.set_mesh(mesh_of((1, 8))):
            y = call(x, routing, whole.experts, split=jmx.Split(expert="ep", tokens="ep"))
        assert y.dtype == jnp.bfloat16
        assert relative_error(y.astype(jnp.float32), expected.astype(jnp.float32)) <= 1e-2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spare", [0, 8])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_experts_in_the_slots_of_a_placement(whole: Whole, spare: int, kind: str, exchange: str) -> None:
    """Also by one compiled program for two placements."""
    mesh, split = mesh_of((2, 4), kind), jmx.Split(expert="ep", tokens=("dp", "ep"), exchange=exchange)
    counts = np.arange(E)[::-1] ** 2
    with jax.set_mesh(mesh):
        layer: Any = jax.jit(partial(run, split=split))
        x, logits = put((whole.x, whole.logits), mesh, ("dp", "ep"))
        for placement in (Placement.identity(E, 4, spare), balance(counts, 4, spare)):
            placed = PlacedExperts.of(whole.experts, placement)
            assert alike(jax.jit(run)(whole.x, whole.logits, placed), whole.y)
            assert alike(layer(x, logits, placed.split(mesh, "ep")), whole.y)
        assert layer._cache_size() == 1


@pytest.mark.every_case
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_single_rank_exchanges_nothing(whole: Whole, exchange: str) -> None:
    """The kernels of `peer` take two ranks and more."""
    with jax.set_mesh(mesh_of((8, 1))):
        split = jmx.Split(expert="ep", tokens=("dp", "ep"), exchange=exchange)
        lowered = jax.jit(partial(run, split=split)).lower(whole.x, whole.logits, whole.experts)
    text = lowered.as_text()
    assert not [name for name in ("all_gather", "all_to_all", "reduce_scatter", "all_reduce") if name in text]


@pytest.mark.every_case
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_device_knows_among_how_many_experts_tokens_choose(
    whole: Whole, exchange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or among how many slots: blocks of rows are of that size."""
    found, mesh = [], mesh_of((2, 4))
    monkeypatch.setattr(
        "jmx.layer.select",
        lambda problem, *rest: found.append((problem.num_experts, problem.num_routed)) or select(problem, *rest),
    )
    split = jmx.Split(expert="ep", tokens=("dp", "ep"), exchange=exchange, mesh=mesh)
    for experts in (whole.experts, PlacedExperts.of(whole.experts, Placement.identity(E, 4, 8)).split(mesh, "ep")):
        tokens = 16 * (11 + EXCHANGES.index(exchange))  # as no other test has: jit would reuse its traces
        x, logits = (jax.ShapeDtypeStruct((tokens, size), jnp.float32) for size in (H, E))
        jax.eval_shape(partial(run, split=split), x, logits, experts)
    assert {*found} == {(4, 16), (6, 24)}


# Transformations


@pytest.mark.parametrize("kind", ["vmap", "vmap of grad", "scan", "map", "remat", "eager", "two axes of tokens"])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_transformations(whole: Whole, kind: str, exchange: str) -> None:
    mesh, split = mesh_of((2, 4)), jmx.Split(expert="ep", tokens=("dp", "ep"), exchange=exchange)
    experts = put(whole.experts, mesh, "ep")
    x, logits, c = (array.reshape(2, T // 2, -1) for array in (whole.x, whole.logits, C))  # two tokens a device
    layer = partial(run, experts=experts, split=split)

    def weighted(x: Any, logits: Any, c: Any) -> jax.Array:
        return (layer(x, logits) * c).sum()

    dx = whole.gradients[0]
    with jax.set_mesh(mesh):
        got, expected = {
            "vmap": lambda: (jax.jit(jax.vmap(layer))(x, logits), whole.y),
            "vmap of grad": lambda: (jax.jit(jax.vmap(jax.grad(weighted)))(x, logits, c), dx),
            "scan": lambda: (jax.lax.scan(lambda _, part: (None, layer(*part)), None, (x, logits))[1], whole.y),
            "map": lambda: (jax.lax.map(lambda part: layer(*part), (x, logits)), whole.y),
            "remat": lambda: (jax.jit(jax.grad(jax.checkpoint(weighted)))(whole.x, whole.logits, C), dx),
            "eager": lambda: (layer(whole.x, whole.logits), whole.y),
            "two axes of tokens": lambda: (
                jax.jit(layer)(whole.x.reshape(8, T // 8, H), whole.logits.reshape(8, T // 8, E)),
                whole.y,
            ),
        }[kind]()
    assert alike(got.reshape(T, H), expected)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_an_exported_call(whole: Whole, exchange: str) -> None:
    mesh, split = mesh_of((2, 4)), jmx.Split(expert="ep", tokens=("dp", "ep"), exchange=exchange)
    arguments = (*put((whole.x, whole.logits), mesh, ("dp", "ep")), put(whole.experts, mesh, "ep"))
    described = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), arguments)
    with jax.set_mesh(mesh):
        exported = export.export(jax.jit(partial(run, split=split)))(*described)
        assert alike(jax.jit(exported.call)(*arguments), whole.y)


@pytest.mark.parametrize("manual", [{"dp", "ep"}, {"dp", "ep", "tp"}], ids=["some", "all"])
def test_inside_shard_map(whole: Whole, manual: set[str]) -> None:
    mesh = mesh_of((2, 2, 2), names=("dp", "ep", "tp"))
    body = partial(run, split=jmx.Split(expert="ep", tokens=("dp", "ep")))
    tokens = P(("dp", "ep"))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(tokens, tokens, P("ep")), out_specs=tokens, axis_names=manual)
    assert alike(jax.jit(mapped)(whole.x, whole.logits, whole.experts), whole.y)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_inside_shard_map_outside_of_any_jit(whole: Whole, exchange: str, check_vma: bool) -> None:
    body = partial(run, split=jmx.Split(expert="ep", tokens="ep", exchange=exchange))
    specs, options = (P("ep"), P("ep"), P("ep")), {"mesh": mesh_of((1, 8)), "check_vma": check_vma}
    mapped = jax.shard_map(body, in_specs=specs, out_specs=P("ep"), **options)
    assert alike(mapped(whole.x, whole.logits, whole.experts), whole.y)
    gradient = jax.grad(lambda x: (mapped(x, whole.logits, whole.experts) * C).sum())
    assert alike(gradient(whole.x), whole.gradients[0])
    both = jax.vmap(body, in_axes=(0, 0, None))
    batched = jax.shard_map(both, in_specs=(P(None, "ep"), P(None, "ep"), P("ep")), out_specs=P(None, "ep"), **options)
    pair = batched(jnp.stack([whole.x] * 2), jnp.stack([whole.logits] * 2), whole.experts)
    assert alike(pair, jnp.stack([whole.y] * 2))


# Explicit axes


def test_the_split_of_explicit_axes_is_read_off_the_types(whole: Whole) -> None:
    mesh = mesh_of((2, 4), "explicit")
    experts = put(whole.experts, mesh, "ep")
    for spec in ((("dp", "ep"),), ("dp",), ()):
        x, logits = put((whole.x, whole.logits), mesh, *spec)
        y = jax.jit(run)(x, logits, experts)
        assert alike(y, whole.y)
        assert jax.typeof(y).sharding.spec[0] == (spec[0] if spec else None)
        floats = x, logits, experts.gate_up_bias, experts.down_bias
        assert alike(jax.jit(jax.grad(loss))(floats, experts), whole.gradients)


# Rejections


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"expert": 3}, r"`expert` \(=3, an int\)"),
        ({"tokens": ("a", 3)}, r"`tokens` \(=3, an int\)"),
        ({"expert": ("a", None)}, r"`expert` \(=None, a NoneType\)"),
        ({"tokens": ("a", "a")}, r"`tokens` \(=\('a', 'a'\)\) must not name a mesh axis twice"),
        ({"expert": "a", "intermediate": ("b", "a")}, r"`intermediate` .* must not name 'a', as `expert` does"),
        ({"exchange": "pigeons"}, r"`exchange` \(='pigeons'\) must be one of .*gather"),
        ({"mesh": "a"}, r"`mesh` \(='a', a str\)"),
    ],
)
def test_splits_that_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        jmx.Split(**fields)


def test_a_split_prints_what_was_given() -> None:
    split = jmx.Split(expert="ep", tokens=("ep",), intermediate=(), hidden=None, chunks=2, mesh=mesh_of((1, 8)))
    assert repr(split) == "Split(expert='ep', tokens=('ep',), chunks=2)"


def test_calls_that_are_refused(whole: Whole) -> None:
    x, logits, experts = whole.x, whole.logits, whole.experts
    with pytest.raises(ValueError, match=r"`split` .* must have a mesh: call within `jax\.set_mesh"):
        run(x, logits, experts, jmx.Split(expert="ep"))
    with jax.set_mesh(mesh_of((1, 8))):
        with pytest.raises(ValueError, match=r"must name axes of the mesh, \('dp', 'ep'\), not 'zz'"):
            run(x, logits, experts, jmx.Split(expert="zz"))
        with pytest.raises(ValueError, match=r"must divide axis 0 of x, of size 30, evenly over 8 devices: add"):
            run(x[:30], logits[:30], experts, jmx.Split(expert="ep", tokens="ep"))
        with pytest.raises(ValueError, match=r"must be None for jmx\.Experts: gate and up have to be divided"):
            run(x, logits, experts, jmx.Split(intermediate="ep"))
        with pytest.raises(ValueError, match=r"`expert` .* must divide the 12 experts evenly, over 8 dev"):
            run(x, logits[:, :12], jax.tree.map(lambda a: a[:12], experts), jmx.Split(expert="ep"))
        with pytest.raises(ValueError, match=r"`intermediate` .* must divide the 2 shards evenly, over 8 dev"):
            run(x, logits, jmx.ShardedExperts.of(experts, 2), jmx.Split(intermediate="ep"))
        other = jmx.Split(expert="ep", tokens="ep", mesh=mesh_of((4, 2)))
        for call in (run, jax.jit(run, static_argnums=3)):
            with pytest.raises(
                ValueError, match=r"`split\.mesh` \(=\{'dp': 4, 'ep': 2\}\) must be the mesh in scope, \{'d"
            ):
                call(x, logits, experts, other)
    abstract = jmx.Split(expert="ep", tokens="ep", mesh=mesh_of((1, 8)).abstract_mesh)
    with pytest.raises(ValueError, match=r"`split\.mesh` .* must be a jax\.sharding\.Mesh where no array is on one"):
        run(x, logits, experts, abstract)
    assert alike(run(put(x, mesh_of((1, 8))), logits, experts, abstract), whole.y)
    mesh = mesh_of((2, 4), "explicit")
    divided = put(experts, mesh, "ep")
    with pytest.raises(ValueError, match=r"`split\.tokens` \(='dp'\) must be the Explicit mesh axes that split"):
        run(put(x, mesh, "ep"), put(logits, mesh, "ep"), divided, jmx.Split(expert="ep", tokens="dp"))
    with pytest.raises(ValueError, match=r"`experts\.gate_up_values` .* must not be split along axis 1"):
        run(put(x, mesh), put(logits, mesh), put(experts, mesh, None, "ep"))


@pytest.mark.parametrize("exchange", [None, "rows"])
@pytest.mark.parametrize("constraints", [(), ("mod(T, 8) == 0",)])
def test_a_symbolic_number_of_tokens_is_refused(
    whole: Whole, exchange: str | None, constraints: tuple[str, ...]
) -> None:
    split = jmx.Split(expert="ep", tokens="ep", exchange=exchange, mesh=mesh_of((1, 8)))
    (tokens,) = jax.export.symbolic_shape("T", constraints=constraints)
    x, logits = (jax.ShapeDtypeStruct((tokens, its.shape[1]), its.dtype) for its in (whole.x, whole.logits))
    with pytest.raises(ValueError, match=r"`x` \(shape \(T, \d+\)\) must not have a symbolic number of tokens"):
        jax.export.export(jax.jit(partial(run, split=split)))(x, logits, whole.experts)


def test_manual_axes_have_to_be_all_of_a_split(whole: Whole) -> None:
    body = partial(run, split=jmx.Split(expert="ep", tokens=("dp", "ep")))
    mapped = jax.shard_map(body, mesh=mesh_of((2, 4)), in_specs=P("ep"), out_specs=P("ep"), axis_names={"ep"})
    with pytest.raises(ValueError, match=r"must name Manual mesh axes only, or none: 'ep' are, 'dp' are not"):
        jax.jit(mapped)(whole.x, whole.logits, whole.experts)
