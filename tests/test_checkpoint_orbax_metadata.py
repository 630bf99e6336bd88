"""A checkpoint's metadata on its MoE layers: only experts of the same sizes and kind are restored, from any layout."""

import copy
import dataclasses
import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import jmx
import jmx.nnx
from jmx.checkpoint import CheckpointError, orbax, orbax_arrays
from jmx.checkpoint.orbax_metadata import KEY, VERSION, Layer, note_of, saved_as
from jmx.experts import Experts
from jmx.numerics.formats import FORMATS
from jmx.numerics.layouts import LAYOUTS

pytestmark = [pytest.mark.costly, pytest.mark.sampled(3)]


def layouts_in(custom_metadata, layers):
    stored = orbax_arrays.Stored({}, custom_metadata)
    return [its.layout for its in saved_as(orbax_arrays.note(pathlib.Path("saved"), stored, KEY), layers)]


def abstract(layout="packed", *, inputs=None, lead=(), scales=None, **options):
    """Experts without arrays: E = 2, H = 64, I = 96 unless `options` have others."""
    defaults: dict = {"num_experts": 2, "hidden_size": 64, "intermediate_size": 96}
    defaults |= {"gate_up_order": "interleaved", "bias": False}

    def make():
        experts = Experts.random(jax.random.key(0), **(defaults | options))
        if scales is not None:
            experts = experts.with_arrays(
                {n: a.astype(scales) if n.endswith("_scales") else a for n, a in experts.arrays().items()}
            )
        if inputs is not None:
            static = [jnp.float32(1)] * 2 if inputs in ("fp8_static", "nvfp4") else []
            experts = experts.with_inputs(inputs, *static)
        experts = jax.tree.map(lambda a: jnp.broadcast_to(a, (*lead, *a.shape)), experts)
        return experts.prepare(layout)

    return jax.eval_shape(make)


KINDS = [
    {},
    *({"num_experts": n} for n in (1, 3)),
    *({"hidden_size": n} for n in (32, 96, 128)),
    *({"intermediate_size": n} for n in (32, 64, 128, 192)),
    *({"gate_up_order": order} for order in ("concatenated", None)),
    {"gate_up_order": None, "intermediate_size": 192},
    *({"bias": True, "bias_dtype": dtype} for dtype in (jnp.bfloat16, jnp.float32)),
    *({"inputs": name} for name in ("fp8_token", "fp8_static", "mxfp8", "mxfp4", "nvfp4", "int8_token")),
    *({"lead": lead} for lead in ((2,), (3,), (1, 2))),
    *({"format": FORMATS[f]} for f in ("mxint4", "nvfp4", "int4_g32", "int8_g32", "fp8_channel", "fp8_tensor")),
    *({"format": FORMATS[f"int4_g32{more}"]} for more in ("_asym", "_order", "_asym_order")),
    {"format": FORMATS["fp8_channel"], "scales": jnp.bfloat16},
    {"format": FORMATS["fp8_block"], "hidden_size": 128, "intermediate_size": 128},
    {"format": FORMATS["fp8_block"], "hidden_size": 128, "intermediate_size": 192},
]


def read(note):
    """`note` as it comes back from a file."""
    return json.loads(json.dumps(note))


EVERY = [
    (number, layout)
    for number, kind in enumerate(KINDS)
    for layout in LAYOUTS
    if LAYOUTS[layout].holds(kind.get("format", jmx.MXFP4))
]


@pytest.fixture(scope="module")
def every():
    """Experts of each kind in each layout that holds them: many have arrays of the same shapes."""
    return {(number, layout): abstract(layout, **KINDS[number]) for number, layout in EVERY}


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("saved", "layout"), EVERY)
def test_only_experts_of_one_kind_are_restored_whatever_the_layouts(every, saved, layout):
    note = read(note_of([Layer("moe", every[saved, layout])]))
    for (wanted, _), experts in every.items():
        if saved == wanted:
            assert layouts_in(note, [Layer("moe", experts)]) == [layout]
            continue
        with pytest.raises(CheckpointError, match=rf"^saved/_CHECKPOINT_METADATA: `{KEY}\.layers\.moe\.\w+"):
            layouts_in(note, [Layer("moe", experts)])


def moe(layout, intermediate_size, seed=0):
    return jmx.nnx.MoE(64, intermediate_size, 2, 1, layout=layout, router=False, rngs=nnx.Rngs(seed))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_that_a_layout_pads_to_one_shape_are_refused(tmp_path, layout):
    sizes = (96, 128, 64)
    for size in sizes:
        orbax.save(tmp_path / str(size), moe(layout, size))
    for saved, wanted, target in itertools.product(sizes, sizes, LAYOUTS):
        if saved != wanted:
            module = nnx.eval_shape(lambda wanted=wanted, target=target: moe(target, wanted))
            message = rf"{saved}/_CHECKPOINT_METADATA: `jmx_experts\.layers\.\.intermediate_size` \(={saved}\) must be"
            with pytest.raises(CheckpointError, match=message):
                orbax.restore(tmp_path / str(saved), module)


NOTE = read(note_of([Layer("moe", abstract("mosaic_sm90", bias=True)), Layer("", abstract("cutlass_sm90"))]))
LAYERS = [Layer("moe", abstract(bias=True)), Layer("", abstract())]


def places(value, path=()):
    """The path of everything in a JSON value, itself among them."""
    found = [path]
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            found += places(value[key], (*path, key))
    return found


def at(value, path):
    for key in path:
        value = value[key]
    return value


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([*FORMATS, *LAYOUTS]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NEAR = [-1, 0, 1, True, False, None, 2, 2.0, "2", 64, 64.0, -64, 95, 97, 2**31, 10**400, "", "mxfp4", [], {}, [2], [[]]]


@given(st.data())
def test_a_note_with_anything_changed_is_refused(data):
    note = copy.deepcopy(NOTE)
    path = data.draw(st.sampled_from(places(note)))
    if not path:
        note = data.draw(JSON)
    else:
        parent, key = at(note, path[:-1]), path[-1]
        match data.draw(st.sampled_from(["replace", "near", "remove", "add"])):
            case "replace":
                parent[key] = data.draw(JSON)
            case "near":
                parent[key] = data.draw(st.sampled_from(NEAR))
            case "remove":
                del parent[key]
            case "add" if isinstance(parent, dict):
                parent[data.draw(st.text(max_size=5).filter(lambda new: new not in parent))] = data.draw(JSON)
            case "add":
                parent.append(data.draw(JSON))
    if isinstance(note, dict) and note.keys() > {KEY}:  # another program's entry beside ours
        assert layouts_in(note, LAYERS) == ["mosaic_sm90", "cutlass_sm90"]
    elif (layouts := only_layouts_differ(note)) is not None:  # which the arrays' shapes have to confirm
        assert layouts_in(note, LAYERS) == layouts
    else:
        with pytest.raises(CheckpointError, match=r"^saved/_CHECKPOINT_METADATA: "):
            layouts_in(note, LAYERS)


def only_layouts_differ(note):
    """The layouts, if `note` is NOTE but for these."""
    try:
        layouts = [note[KEY]["layers"][layer.path]["layout"] for layer in LAYERS]
        held = all(LAYOUTS[layout].holds(jmx.MXFP4) for layout in layouts)
    except (TypeError, KeyError, IndexError):
        return None
    expected = copy.deepcopy(NOTE)
    for layer, layout in zip(LAYERS, layouts, strict=True):
        expected[KEY]["layers"][layer.path]["layout"] = layout
    return layouts if held and json.dumps(note, sort_keys=True) == json.dumps(expected, sort_keys=True) else None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda note: note.clear(), "its custom metadata lack 'jmx_experts'"),
        (lambda note: note.update({KEY: [1]}), r"`jmx_experts` \(=\[1\]\) must be an object"),
        (lambda note: note.update({KEY: note[KEY]["layers"]}), r"`jmx_experts\.version` is missing"),
        (lambda note: note[KEY].update(version=VERSION + 1), r"`jmx_experts\.version` \(=2\) must be 1, which"),
        (lambda note: note[KEY].update(version=True), r"`jmx_experts\.version` \(=True\) must be 1, which"),
        (lambda note: note[KEY].update(more=1), r"`jmx_experts\.more` \(=1\) is not a known key"),
        (lambda note: note[KEY].pop("layers"), r"`jmx_experts\.layers` is missing"),
        (lambda note: note[KEY]["layers"].pop("moe"), r"`jmx_experts\.layers\.moe` is missing"),
        (lambda note: note[KEY]["layers"].update(b={}), r"`jmx_experts\.layers\.b` \(=\{\}\) is not a known key"),
        (lambda note: note[KEY]["layers"].update(moe=None), r"`jmx_experts\.layers\.moe` \(=None\) must be an object"),
        (lambda note: moe_of(note).pop("layout"), r"moe\.layout` is missing"),
        (lambda note: moe_of(note).update(layout="sm90"), r"moe\.layout` \(='sm90'\) must be one of \['canonical', "),
        (lambda note: moe_of(note).update(layout=None), r"moe\.layout` \(=None\) must be one of"),
        (
            lambda note: moe_of(note).update(format="mxfp5"),
            r"moe\.format` \(='mxfp5'\) must be 'mxfp4', as in",
        ),
        (lambda note: moe_of(note).update(input_format="fp9"), r"moe\.input_format` \(='fp9'\) must be None"),
        (lambda note: moe_of(note).update(hidden_size=-64), r"moe\.hidden_size` \(=-64\) must be 64, as in `module`"),
        (lambda note: moe_of(note).update(hidden_size="64"), r"moe\.hidden_size` \(='64'\) must be 64"),
        (
            lambda note: moe_of(note).update(num_experts=10**30),
            r"moe\.num_experts` \(=1000000000000000000000000000000\)",
        ),
        (lambda note: moe_of(note).pop("intermediate_size"), r"moe\.intermediate_size` is missing"),
        (lambda note: moe_of(note).update(arrays=[]), r"moe\.arrays` \(=\[\]\) must be an object"),
        (lambda note: moe_of(note)["arrays"].pop("down_bias"), r"moe\.arrays\.down_bias` is missing"),
        (lambda note: moe_of(note)["arrays"].update(order="x"), r"moe\.arrays\.order` \(='x'\) is not a known key"),
    ],
)
def test_the_key_that_is_wrong_is_named(change, message):
    note = copy.deepcopy(NOTE)
    change(note)
    with pytest.raises(CheckpointError, match="^saved/_CHECKPOINT_METADATA: .*" + message):
        layouts_in(note, LAYERS)


def moe_of(note):
    return note[KEY]["layers"]["moe"]


def test_a_layout_of_another_format_is_neither_written_nor_read():
    int4 = abstract(format=FORMATS["int4_g32"])
    note = read(note_of([Layer("moe", int4)]))
    moe_of(note)["layout"] = "cutlass_sm90"
    with pytest.raises(CheckpointError, match=r"moe\.layout` \(='cutlass_sm90'\) must be one of \['canonical'"):
        layouts_in(note, [Layer("moe", int4)])
    for name, message in (("cutlass_sm90", "must hold 'int4_g32'"), ("sm90", "must be one of")):
        with pytest.raises(ValueError, match=rf"`layout` \(='{name}'\)(.* of 'moe')? {message}"):
            note_of([Layer("moe", dataclasses.replace(int4, layout=name))])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: None, "must be that of a checkpoint that jmx wrote"),
        (lambda raw: b"", "the file must be JSON"),
        (lambda raw: raw[: len(raw) // 2], "the file must be JSON"),
        (lambda raw: b"\xff\xfe{", "the file must be JSON"),
        (lambda raw: b"[" * 100_000, "the file must nest arrays and objects at most 100 deep"),
        (lambda raw: b"[]", "must be a JSON object, not list"),
        (lambda raw: b"null", "must be a JSON object, not NoneType"),
        (lambda raw: b"7", "must be a JSON object, not int"),
        (lambda raw: b'"a"', "must be a JSON object, not str"),
        (lambda raw: b"{}", "custom metadata lack 'jmx_experts'"),
        (lambda raw: raw.replace(b'"version"', b'"version": 1, "version"'), "must name each key once"),
        (lambda raw: raw.replace(b'"hidden_size": 64', b'"hidden_size": ' + b"6" * 5000), "the file must be JSON"),
        (lambda raw: raw.replace(b'"jmx_experts"', b'"jmx"'), "custom metadata lack 'jmx_experts'"),
        (lambda raw: raw.replace(b'"version": 1', b'"version": 0'), r"`jmx_experts\.version` \(=0\) must be 1"),
        (lambda raw: raw.replace(b": 96", b": 128"), r"layers\.\.intermediate_size` \(=128\) must be 96"),
        (lambda raw: raw.replace(b": 96", b": 96.0"), r"layers\.\.intermediate_size` \(=96\.0\) must be 96"),
    ],
)
def test_a_damaged_file_of_custom_metadata_is_named(tmp_path, damage, message):
    orbax.save(tmp_path / "saved", moe("cutlass_sm90", 96))
    file = tmp_path / "saved" / orbax_arrays.CUSTOM_METADATA
    raw = file.read_bytes()
    file.unlink()
    if (damaged := damage(raw)) is not None:
        assert damaged != raw
        file.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=f"saved/_CHECKPOINT_METADATA: .*{message}"):
        orbax.restore(tmp_path / "saved", nnx.eval_shape(lambda: moe("packed", 96)))


def test_experts_of_every_kind_come_back_bit_for_bit(tmp_path, rng):
    """Those with more arrays than weights: order, zero points, static scales of inputs."""

    class Layers(nnx.Module):
        def __init__(self, layout, scale):
            experts = [
                Experts.random(
                    jax.random.key(seed), 2, 64, 96, gate_up_order="interleaved", format=FORMATS[name], bias=seed > 0
                )
                for seed, name in enumerate(("int4_g32_asym_order", "nvfp4", "mxfp4"))
            ]
            experts[2] = experts[2].with_inputs("fp8_static", scale, jnp.float32(2 * scale))
            self.layers = nnx.List(
                jmx.nnx.MoE(
                    *(64, 96, 2, 1),
                    bias=each.gate_up_bias is not None,
                    router=False,
                    layout=layout,
                    format=each.format,
                    gate_up_order="interleaved",
                    experts=each,
                    rngs=nnx.Rngs(0),
                )
                for each in experts
            )

    scale = jnp.float32(rng.uniform(0.5, 2))
    saved = Layers("mosaic_sm90", scale)
    orbax.save(tmp_path / "saved", saved)
    restored = orbax.restore(tmp_path / "saved", nnx.eval_shape(lambda: Layers("packed", scale)))
    for theirs, ours in zip(saved.layers, restored.layers, strict=True):
        expected, found = theirs.experts.prepare("packed").arrays(), ours.experts.arrays()
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            assert found[name].dtype == array.dtype
            assert np.asarray(found[name]).tobytes() == np.asarray(array).tobytes()
