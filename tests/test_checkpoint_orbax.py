import itertools
import os
import shutil
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jmx
import jmx.nnx
from jmx.checkpoint import CheckpointError, orbax, orbax_arrays
from jmx.numerics.layouts import LAYOUTS

pytestmark = pytest.mark.costly


class Model(nnx.Module):
    """Two MoE layers, one inside a list, beside variables of other kinds."""

    def __init__(self, layout: str, seed: int, *, width: int = 64, order: str = "interleaved", extra: bool = False):
        rngs = nnx.Rngs(seed)

        def moe(experts: int) -> jmx.nnx.MoE:
            return jmx.nnx.MoE(
                width,
                96,
                experts,
                2,
                activation=jmx.SwiGLU(),
                bias=True,
                gate_up_order=order,
                layout=layout,
                routing=jmx.SigmoidTopK(2, renormalize=True),
                correction_bias=True,
                rngs=rngs,
            )

        self.linear = nnx.Linear(width, width, rngs=rngs)
        self.inner = nnx.List([moe(8)])
        self.moe = moe(4)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.extra = nnx.data(nnx.Param(jnp.ones(3)) if extra else None)


def arrays(module: nnx.Module) -> dict[str, np.ndarray]:
    """Everything in `module` but quantized weights, by name."""
    found = {".".join(map(str, path)): v.get_value() for path, v in nnx.to_flat_state(nnx.split(module)[1])}
    keys = {name: jax.random.key_data(a) for name, a in found.items() if jnp.issubdtype(a.dtype, jax.dtypes.prng_key)}
    return {name: np.asarray(a) for name, a in (found | keys).items() if not name.endswith(("_values", "_scales"))}


def same(a: jmx.Experts, b: jmx.Experts) -> bool:
    pairs = zip(a.arrays().values(), b.arrays().values(), strict=True)
    return a.layout == b.layout and all(
        x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs
    )


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("source", "target"), [*itertools.product(LAYOUTS, LAYOUTS)])
def test_a_module_is_restored_from_any_layout_into_any(tmp_path, source, target):
    saved = Model(source, 0)
    orbax.save(tmp_path / "saved", saved)
    for module in (Model(target, 1), nnx.eval_shape(lambda: Model(target, 1))):
        restored = orbax.restore(tmp_path / "saved", module)
        for theirs, ours in ((saved.moe, restored.moe), (saved.inner[0], restored.inner[0])):
            assert ours.experts.layout == target
            assert same(ours.experts, theirs.experts.prepare(target))
            assert same(ours.experts.prepare(source), theirs.experts)
        expected, found = arrays(saved), arrays(restored)
        assert {"linear.kernel", "moe.router.kernel", "moe.correction_bias", "dropout.rngs.key"} <= found.keys()
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_the_module_given_stays_as_it_is(tmp_path):
    saved, module = Model("packed", 0), Model("packed", 1)
    before = module.moe.experts
    orbax.save(tmp_path / "saved", saved)
    orbax.restore(tmp_path / "saved", module)
    assert same(module.moe.experts, before)
    assert not same(module.moe.experts, saved.moe.experts)


@pytest.mark.devices(4)
def test_restored_arrays_are_sharded_as_the_module(tmp_path):
    orbax.save(tmp_path / "saved", Model("packed", 0))
    mesh = jax.make_mesh((4,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("expert"))
    module = Model("canonical", 1)
    weights = vars(module.moe)["gate_up_values"]
    weights.set_value(jax.device_put(weights.get_value(), sharding))
    restored = orbax.restore(tmp_path / "saved", module)
    assert restored.moe.experts.gate_up.values.sharding.is_equivalent_to(sharding, 3)
    everywhere = NamedSharding(mesh, PartitionSpec())
    shardings = jax.tree.map(lambda array: array.sharding, nnx.split(restored)[1])
    assert all(s in (sharding, everywhere) for s in jax.tree.leaves(shardings))
    assert same(restored.moe.experts.prepare("packed"), Model("packed", 0).moe.experts)


AXIS_TYPES = (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit)


@pytest.fixture(scope="module")
def saved_layers(tmp_path_factory):
    """A layer, and where it is saved in each of three layouts."""
    folder = tmp_path_factory.mktemp("layers")
    layer = nnx_moe()
    for layout in ("packed", "mosaic_sm90", "cutlass_sm90"):
        layer.prepare(layout)
        orbax.save(folder / layout, layer)
    return layer, folder


def nnx_moe(layout="packed", seed=0, **options):
    return jmx.nnx.MoE(256, 128, 4, 2, bias=True, layout=layout, rngs=nnx.Rngs(seed), **options)


@pytest.mark.devices(4)
@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", AXIS_TYPES)
@pytest.mark.parametrize("source", ["packed", "mosaic_sm90", "cutlass_sm90"])
@pytest.mark.parametrize(
    ("target", "axes"),
    [
        ("packed", {"expert": "a", "intermediate": "b"}),
        ("packed", {"hidden": ("a", "b")}),
        ("mosaic_sm90", {"expert": ("a", "b")}),
        ("cutlass_sm90", {"expert": "b", "hidden": "a"}),
    ],
)
def test_restored_arrays_are_where_the_module_says_whatever_layout_was_saved(saved_layers, source, target, axes, kind):
    layer, folder = saved_layers
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        module = nnx.eval_shape(lambda: nnx_moe(target, 1, axes=axes))
        restored = orbax.restore(folder / source, module)
    places = {key: v.get_value().sharding.spec for key, v in nnx.to_flat_state(nnx.state(module))}
    assert any(any(spec) for spec in places.values())
    for key, variable in nnx.to_flat_state(nnx.state(restored)):
        array = variable.get_value()
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, places[key]), array.ndim)
    host = jax.tree.map(np.asarray, (restored.experts, layer.experts.prepare(target)))
    assert same(*host)
    with pytest.raises(ValueError, match=r"`module` has '\w+' split over a mesh of .* and no devices: restore inside"):
        orbax.restore(folder / source, module)


@pytest.mark.devices(4)
def test_a_module_on_a_mesh_needs_none_in_scope(saved_layers):
    layer, folder = saved_layers
    mesh = jax.make_mesh((4,), ("a",), axis_types=AXIS_TYPES[1:])
    with jax.set_mesh(mesh):
        module = nnx_moe("packed", 1, axes={"expert": "a"})
    restored = orbax.restore(folder / "mosaic_sm90", module)
    assert restored.gate_up_values.get_value().sharding == module.gate_up_values.get_value().sharding
    assert same(*jax.tree.map(np.asarray, (restored.experts, layer.experts.prepare("packed"))))


def test_layers_of_a_vmapped_module_are_restored(tmp_path):
    def stacked(layout, seed=0, size=3, intermediate=96):
        def make(rngs):
            return jmx.nnx.MoE(64, intermediate, 4, 2, layout=layout, router=False, rngs=rngs)

        return nnx.vmap(make)(nnx.Rngs(seed).split(size))

    saved = stacked("cutlass_sm90")
    orbax.save(tmp_path / "saved", saved)
    restored = orbax.restore(tmp_path / "saved", nnx.eval_shape(lambda: stacked("packed", 1)))
    assert restored.experts.gate_up.values.shape[:2] == (3, 4)
    assert same(restored.experts, saved.experts.prepare("packed"))
    for options, message in (
        ({"size": 2}, r"leading_axes` \(=\[3\]\) must be \[2\]"),
        ({"intermediate": 128}, "intermediate_size` "),
    ):
        with pytest.raises(CheckpointError, match=message):
            orbax.restore(tmp_path / "saved", nnx.eval_shape(lambda options=options: stacked("packed", **options)))


class Holder(nnx.Module):
    """A MoE layer and another variable."""

    def __init__(self, value):
        self.moe = jmx.nnx.MoE(64, 96, 4, 2, layout="packed", rngs=nnx.Rngs(0))
        self.value = nnx.data(value if isinstance(value, nnx.Module) else nnx.Variable(value))


def tied():
    moe = jmx.nnx.MoE(64, 96, 4, 2, layout="packed", rngs=nnx.Rngs(1))
    holder = Holder(moe)
    moe.down_values = holder.moe.down_values
    return holder


def of_one_name():
    return Holder(nnx.Dict({"a.b": nnx.Param(jnp.ones(1)), "a": nnx.Dict(b=nnx.Param(jnp.zeros(1)))}))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: {"a": 1}, TypeError, r"`module` \(=\{'a': 1\}, a dict\) must be a flax\.nnx\.Module"),
        (lambda: Holder(3), TypeError, r"variable 'value' of `module` \(a int\) must be an array"),
        (lambda: Holder("x"), TypeError, r"variable 'value' of `module` \(a str\) must be an array"),
        (lambda: Holder(None), TypeError, r"variable 'value' of `module` \(a NoneType\) must be an array"),
        (lambda: Holder({"a": jnp.ones(2)}), TypeError, r"variable 'value' of `module` \(a dict\) must be an array"),
        (of_one_name, ValueError, "`module` must not have two variables that are called 'value.a.b'"),
        (tied, ValueError, r"`module` must have 'value\.down_values' in one place only, but shares it"),
    ],
)
def test_modules_that_cannot_be_restored_are_not_saved(tmp_path, make, error, message):
    module = make()
    with pytest.raises(error, match=message):
        orbax.save(tmp_path / "saved", module)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(error, match=message):
        orbax.restore(tmp_path / "saved", module)


def test_shapes_cannot_be_saved(tmp_path):
    with pytest.raises(TypeError, match=r"variable '[\w.]+' of `module` \(a ShapeDtypeStruct\) must have a value"):
        orbax.save(tmp_path / "saved", nnx.eval_shape(lambda: Holder(jnp.ones(2))))
    assert list(tmp_path.iterdir()) == []


def test_arrays_of_numpy_and_shared_layers_come_back(tmp_path, rng):
    value = rng.normal(size=(2, 3)).astype(np.float32)
    for number, other in enumerate((value, value[0, 0])):
        orbax.save(tmp_path / str(number), Holder(other))
        restored = orbax.restore(tmp_path / str(number), Holder(np.zeros_like(other)))
        np.testing.assert_array_equal(arrays(restored)["value"], other)
    saved = Holder(1)
    saved.value = nnx.data(saved.moe)  # whole layers may be
    orbax.save(tmp_path / "shared", saved)
    restored = orbax.restore(tmp_path / "shared", saved)
    assert restored.value is restored.moe
    assert same(restored.moe.experts, saved.moe.experts)


def test_names_and_note_can_be_read_with_plain_orbax(tmp_path):
    saved = Model("packed", 0)
    orbax.save(tmp_path / "saved", saved)
    with ocp.StandardCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(tmp_path / "saved")
    assert metadata.item_metadata.tree["inner.0.gate_up_values"].shape == (8, 192, 32)
    note = metadata.custom_metadata["jmx_experts"]
    assert (note["version"], sorted(note["layers"])) == (1, ["inner.0", "moe"])
    assert note["layers"]["inner.0"] == {
        "layout": "packed",
        "leading_axes": [],
        "num_experts": 8,
        "hidden_size": 64,
        "intermediate_size": 96,
        "format": "mxfp4",
        "gate_up_order": "interleaved",
        "input_format": None,
        "arrays": {
            "gate_up_values": "float4_e2m1fn[8, 192, 64]",
            "gate_up_scales": "float8_e8m0fnu[8, 192, 2]",
            "gate_up_bias": "bfloat16[8, 192]",
            "down_values": "float4_e2m1fn[8, 64, 96]",
            "down_scales": "float8_e8m0fnu[8, 64, 3]",
            "down_bias": "bfloat16[8, 64]",
        },
    }


@pytest.mark.parametrize(
    ("saved", "module", "message"),
    [
        ({}, {"extra": True}, r": array 'extra' is missing; it must be float32 \(3,\)"),
        ({"extra": True}, {}, ": array 'extra' is not one that is called for"),
        ({}, {"width": 96}, r"/_CHECKPOINT_METADATA: `jmx_experts\.layers\.inner\.0\.hidden_size` \(=64\) must be 96"),
        (
            {},
            {"order": "concatenated"},
            r".*\.gate_up_order` \(='interleaved'\) must be 'concatenated', as in `module`",
        ),
    ],
)
def test_other_modules_are_refused_by_name(tmp_path, saved, module, message):
    orbax.save(tmp_path / "saved", Model("packed", 0, **saved))
    with pytest.raises(CheckpointError, match="saved" + message):
        orbax.restore(tmp_path / "saved", nnx.eval_shape(lambda: Model("canonical", 1, **module)))


def test_what_is_no_checkpoint_is_refused(tmp_path):
    module = Model("packed", 0)
    with pytest.raises(CheckpointError, match="nowhere: must be an Orbax checkpoint"):
        orbax.restore(tmp_path / "nowhere", module)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="empty: must be an Orbax checkpoint"):
        orbax.restore(tmp_path / "empty", module)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "other", {"x": np.ones(3)})
    with pytest.raises(CheckpointError, match=r"other/_CHECKPOINT_METADATA: .* lack 'jmx_experts'"):
        orbax.restore(tmp_path / "other", module)


DAMAGE = {
    "missing": lambda raw: None,
    "empty": lambda raw: b"",
    "cut short": lambda raw: raw[: len(raw) // 2],
    "garbage": lambda raw: b"\xff" + raw[::-1],
    "null": lambda raw: b"null",
    "list": lambda raw: b"[1]",
    "object": lambda raw: b"{}",
    "too deep": lambda raw: b"[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_an_error_or_is_not_read(tmp_path, rng, damage):
    # One array: Orbax drops the reads beside one that fails, and asyncio complains of them in whatever runs next.
    array = rng.integers(0, 256, (100, 100), np.uint8)
    orbax_arrays.write(tmp_path / "whole", {"x": array}, {"note": 1})
    assert np.array_equal(orbax_arrays.read_one(tmp_path / "whole", "x"), array)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {"x": jax.ShapeDtypeStruct((100, 100), np.uint8, sharding=place)}
    refused = set()
    for file in [file for file in (tmp_path / "whole").rglob("*") if file.is_file()]:
        path, name = tmp_path / "saved", file.relative_to(tmp_path / "whole")
        shutil.copytree(tmp_path / "whole", path)
        (path / name).unlink()
        if (damaged := DAMAGE[damage](file.read_bytes())) is not None:
            (path / name).write_bytes(damaged)
        for call in (
            lambda path=path: orbax_arrays.describe(path).custom_metadata == {"note": 1},
            lambda path=path: np.array_equal(orbax_arrays.read(path, wanted)["x"], array),
            lambda path=path: np.array_equal(orbax_arrays.read_one(path, "x"), array),
        ):
            try:
                right = call()
            except CheckpointError as error:
                refused.add(name.parts[0])
                right = str(error).startswith(str(path))
            assert right or name.name == orbax_arrays.CUSTOM_METADATA  # which nothing uses if it gets no note
        shutil.rmtree(path)
    assert refused >= {"_METADATA", "manifest.ocdbt", "d", "ocdbt.process_0"}


def test_nothing_is_overwritten_and_nothing_left_behind(tmp_path, monkeypatch):
    orbax.save(tmp_path / "saved", Model("packed", 0))
    with pytest.raises(FileExistsError, match="saved must not exist yet"):
        orbax.save(tmp_path / "saved", Model("packed", 1))
    shutil.rmtree(tmp_path / "saved")

    wait, interrupts = ocp.StandardCheckpointer.wait_until_finished, [KeyboardInterrupt]

    def interrupted_once(checkpointer):
        if interrupts:
            raise interrupts.pop()
        wait(checkpointer)

    monkeypatch.setattr(ocp.StandardCheckpointer, "wait_until_finished", interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        orbax.save(tmp_path / "saved", Model("packed", 0))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("presses", [1, 3])
def test_an_interruption_waits_for_orbax(presses, tmp_path, monkeypatch):
    """Its threads would go on writing, into a directory that is being removed."""
    save = ocp.StandardCheckpointer.save

    def interrupted(*arguments, **options):
        for _ in range(presses):
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        save(*arguments, **options)

    monkeypatch.setattr(ocp.StandardCheckpointer, "save", interrupted)
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell it is ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            orbax_arrays.write(tmp_path / "saved", {"a": np.arange(3)}, {"b": 1})
    finally:
        signal.signal(signal.SIGINT, earlier)
    assert os.listdir(tmp_path) == ["saved"]
    assert orbax_arrays.describe(tmp_path / "saved").custom_metadata == {"b": 1}
