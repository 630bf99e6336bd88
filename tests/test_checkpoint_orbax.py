import shutil
from itertools import pairwise

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
from jmx.layouts import LAYOUTS


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
    """Everything in `module` but quantised weights, by name."""
    found = {".".join(map(str, path)): v.get_value() for path, v in nnx.to_flat_state(nnx.split(module)[1])}
    keys = {name: jax.random.key_data(a) for name, a in found.items() if jnp.issubdtype(a.dtype, jax.dtypes.prng_key)}
    return {name: np.asarray(a) for name, a in (found | keys).items() if not name.endswith(("_values", "_scales"))}


def same(a: jmx.Experts, b: jmx.Experts) -> bool:
    pairs = zip(a.arrays().values(), b.arrays().values(), strict=True)
    return a.layout == b.layout and all(
        x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs
    )


@pytest.mark.parametrize(("source", "target"), [*pairwise([*sorted(LAYOUTS), min(LAYOUTS)]), ("packed", "packed")])
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


def test_names_and_note_can_be_read_with_plain_orbax(tmp_path):
    saved = Model("packed", 0)
    orbax.save(tmp_path / "saved", saved)
    with ocp.StandardCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(tmp_path / "saved")
    assert metadata.item_metadata.tree["inner.0.gate_up_values"].shape == (8, 192, 32)
    layers = metadata.custom_metadata["jmx_experts"]
    note = {"layout": "packed", "gate_up_order": "interleaved", "format": "mxfp4"}
    assert layers == {"moe.": note, "inner.0.": note}


@pytest.mark.parametrize(
    ("saved", "module", "message"),
    [
        ({}, {"extra": True}, r"array 'extra' is missing; it must be float32 \(3,\)"),
        ({"extra": True}, {}, "array 'extra' is not one that is called for"),
        ({}, {"width": 96}, r"array 'inner\.0\.down_bias' is bfloat16 \(8, 64\), but must be bfloat16 \(8, 96\)"),
        ({}, {"order": "concatenated"}, "`gate_up_order` of 'inner.0.' is 'interleaved', but must be 'concatenated'"),
    ],
)
def test_other_modules_are_refused_by_name(tmp_path, saved, module, message):
    orbax.save(tmp_path / "saved", Model("packed", 0, **saved))
    with pytest.raises(CheckpointError, match="saved: " + message):
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
    with pytest.raises(CheckpointError, match="other: must be a checkpoint that jmx saved"):
        orbax.restore(tmp_path / "other", module)


def test_damaged_data_are_an_error(tmp_path, rng):
    # One array: Orbax drops the reads beside one that fails, and asyncio complains of them in whatever runs next.
    array = rng.integers(0, 256, (100, 100), np.uint8)
    path = tmp_path / "saved"
    orbax_arrays.write(path, {"x": array}, {})
    assert np.array_equal(orbax_arrays.read_one(path, "x"), array)
    data = sorted(path.rglob("d/*"), key=lambda file: file.stat().st_size)
    data[-1].write_bytes(b"")
    with pytest.raises(CheckpointError, match="saved: array 'x' cannot be read"):
        orbax_arrays.read_one(path, "x")
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with pytest.raises(CheckpointError, match="saved: the arrays cannot be read"):
        orbax_arrays.read(path, {"x": jax.ShapeDtypeStruct((100, 100), np.uint8, sharding=place)})


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
