"""How meshes divide whole models: what is refused, what each device needs of memory, and what is read for it."""

import contextlib
import json
import socket
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from child_environment import importing
from flax import nnx

from jmx import cli
from jmx.checkpoint import placement
from jmx.checkpoint.compressed_tensors import reader as compressed_reader
from jmx.checkpoint.gpt_oss import reader as gpt_oss_reader
from jmx.checkpoint.quantizing import reader as float_reader
from jmx.cli import mesh_argument
from jmx.models import FAMILIES, ModelSplit, Runner, Sampler, from_source, load, memory, random_source
from jmx.models.loading import file_source

pytestmark = [
    pytest.mark.devices(8),
    pytest.mark.filterwarnings("ignore:.* modules outside experts are quantized", "ignore:.* tensors, such as"),
]

TINY = Path(__file__).resolve().parents[1] / "tests" / "data" / "gpt_oss_tiny"
DATA = Path(__file__).parent / "data"
CHECKPOINTS = {
    "gpt_oss": TINY,
    "quantized": DATA / "qwen3_moe" / "nvfp4",
    "floats": DATA / "families" / "mixtral",
    "latents": DATA / "deepseek_v3" / "published",
}


def mesh_of(**sizes: int) -> Any:
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), devices=jax.devices()[: prod(sizes.values())])


# What is refused


@pytest.mark.parametrize(
    ("sizes", "axes", "message"),
    [
        ({"x": 2}, None, r"`mesh` \(axes \('x',\)\) must have axes that divide something, and \['x'\] do not: by def"),
        ({"ep": 2}, {"experts": "ep"}, r"`axes` \(=\{'experts': 'ep'\}\) must have keys among \['expert', 'interm"),
        ({"ep": 2}, {"expert": "tp"}, r"`axes\['expert'\]` \(='tp'\) must be an axis of the mesh, one of \('ep',\)"),
        ({"ep": 2}, {"expert": ("ep", "ep")}, r"`axes\['expert'\]` .* must not name a mesh axis twice"),
        ({"ep": 2}, {"intermediate": "ep"}, r"must not divide both 'expert' and 'intermediate' by \['ep'\]"),
        ({"ep": 2}, {"token": "ep"}, r"must not divide both 'heads' and 'token' by \['ep'\]"),
        ({"ep": 2}, {"expert": None, "heads": None}, r"must have axes that divide something, and \['ep'\] do not"),
    ],
)
def test_axes_that_are_refused(sizes: dict[str, int], axes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelSplit.of(mesh_of(**sizes), axes)


@pytest.mark.parametrize(
    ("sizes", "axes", "message"),
    [
        ({"ep": 3}, {}, r"`mesh` \(expert by 'ep', 3 devices\) must divide `num_experts` \(=8\) of the config evenly"),
        (
            {"ep": 4},
            {},
            r"\(heads by 'ep', 4 devices\) must divide `num_key_value_heads` \(=2\) .*: None\} \(--mesh-ax",
        ),
        ({"tp": 8}, {}, r"\(heads by 'tp', 8 devices\) must divide `num_attention_heads` \(=4\) of the config evenly"),
    ],
)
def test_a_model_that_is_not_divided_evenly_is_refused_before_it_is_read(
    sizes: dict[str, int], axes: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpt_oss_reader, "send", lambda *_: pytest.fail("read"))
    with pytest.raises(ValueError, match=message):
        load(TINY, mesh=mesh_of(**sizes), axes=axes)


def test_latents_are_divided_by_heads_of_queries_alone() -> None:
    """Of a model with one key head for all."""
    config = FAMILIES["deepseek_v3"].published["deepseek-v3"]
    ModelSplit.of(mesh_of(ep=8)).check(config)


# The command line


@pytest.mark.parametrize("text", ["ep", "ep=", "ep=two", "=2", "ep=-1", "ep=2,", "ep=2;tp=2", "ep=2,ep=2", "ep=0"])
def test_meshes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=rf"`--mesh` \(='{text}'\) must "):
        mesh_argument.sizes(text)


@pytest.mark.parametrize("text", ["heads", "heads=", "heads=a+", "heads=a,heads=b", "Heads=a"])
def test_axes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"`--mesh-axes` \(='.*'\) must be WHAT=AXIS"):
        mesh_argument.axes(text)


def test_meshes_and_axes_of_the_command_line() -> None:
    assert mesh_argument.sizes("dp=2, ep=4") == {"dp": 2, "ep": 4}
    assert mesh_argument.axes("heads=none,expert=dp+ep") == {"heads": None, "expert": ("dp", "ep")}
    assert dict(mesh_argument.make("dp=2,ep=4").shape) == {"dp": 2, "ep": 4}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mesh", "ep=16"], "`--mesh` (='ep=16') needs 16 devices, and there are 8"),
        (["--mesh", "zz=2"], "must have axes that divide something, and ['zz'] do not"),
        (["--mesh-axes", "heads=none"], "`--mesh-axes` (='heads=none') needs --mesh"),
        (["--mesh", "ep=3"], "must divide `num_experts` (=8) of the config evenly"),
        (["--mesh", "dp=2"], "`prompts` (of 1 rows) must be a multiple of 2 rows"),
    ],
)
def test_commands_that_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpt_oss_reader, "send", lambda *_: pytest.fail("read"))
    assert cli.main(["generate", str(TINY), "--prompt-ids", "1,2", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.costly
def test_the_command_generates_the_same_over_a_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for options in ([], ["--mesh", "dp=2,ep=4", "--mesh-axes", "heads=none"]):
        arguments = ["--prompt-ids", "1,2,3", "--prompt-ids", "4", "--dtype", "float32", "--max-new-tokens", "5"]
        assert cli.main(["generate", str(TINY), *arguments, *options, "--ignore-eos", "--json"]) == 0
        found.append([json.loads(line)["ids"] for line in capsys.readouterr().out.splitlines()])
    assert found[0] == found[1]


def test_a_model_that_does_not_fit_on_each_device(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available", lambda _: 1 << 20)
    arguments = ["--random", "gpt-oss-120b", "--mesh", "ep=2", "--max-new-tokens", "8"]
    assert cli.main(["generate", *arguments]) == 1
    err = capsys.readouterr().err
    assert "the model needs at least 33.88 GB on each device (weights 33.80 GB, the cache 75.50 MB" in err
    assert "and cpu 0 has 0.52 MB free" in err  # two devices share the memory of this machine


# Memory


@pytest.mark.costly
@pytest.mark.sampled(3)
@pytest.mark.parametrize("sizes", [{"ep": 2}, {"tp": 2}, {"dp": 2, "ep": 2}], ids=["ep", "tp", "dp_ep"])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_each_device_needs_what_was_computed(checkpoint: str, sizes: dict[str, int]) -> None:
    axes = {"intermediate": None} if checkpoint in ("floats", "latents") else {}
    source, split = file_source(CHECKPOINTS[checkpoint]), ModelSplit.of(mesh_of(**sizes), axes)
    needs = memory.needed(source, [1, 1], 1, dtype="float32", split=split)
    model = from_source(source, dtype=jnp.float32, split=split)
    for number in range(split.mesh.size):
        arrays = jax.tree.leaves(nnx.state(model))
        assert needs.weights == sum(array.addressable_shards[number].data.nbytes for array in arrays)
        cache = model.empty_cache(2, 16).layers
        assert needs.cache == sum(array.addressable_shards[number].data.nbytes for array in cache)


def test_the_largest_gpt_oss_fits_on_two_cards_of_80_gb_and_not_on_one() -> None:
    """Of an H100 jax takes three quarters by default. 30.5 GB of experts, 1.0 of attention, 2.3 of both tables."""
    source = random_source(FAMILIES["gpt_oss"].published["gpt-oss-120b"])
    card = 0.75 * 79.6 * 2**30
    one = memory.needed(source, [1024], 64)
    two = memory.needed(source, [1024], 64, split=ModelSplit.of(mesh_of(ep=2)))
    assert one.total > card > two.total
    assert (round(one.total / 1e9, 1), round(two.total / 1e9, 1)) == (65.4, 33.9)
    tables = 2 * 201088 * 2880 * 2
    assert abs(two.weights - (one.weights + tables) / 2) < 1e8  # all else is divided, but for norms and routers
    assert two.cache == one.cache // 2


# Reading


class Recorded:
    """A view that records the slices which are read of it."""

    def __init__(self, name: str, view: Any, log: list[tuple[str, Any, float]]):
        self.shape, self.ndim, self._name, self._view, self._log = view.shape, view.ndim, name, view, log

    def __getitem__(self, index: Any) -> Any:
        part = self._view[index]
        place = tuple(its.indices(size) for its, size in zip(index, self.shape, strict=True))
        self._log.append((self._name, place, part.size / prod(self.shape)))
        return part


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any, float]]:
    """Name, place and share of every slice that is read."""
    log: list[tuple[str, Any, float]] = []
    send = placement.send

    def recorded(name: str, view: Any, *arguments: Any) -> Any:
        return send(name, Recorded(name, view, log), *arguments)

    for module in (placement, gpt_oss_reader, compressed_reader):
        monkeypatch.setattr(module, "send", recorded)
    monkeypatch.setattr(float_reader, "place", lambda *a: jax.block_until_ready(recorded(*a)))
    return log


@pytest.mark.costly
@pytest.mark.sampled(3)
@pytest.mark.parametrize("sizes", [{"ep": 2}, {"tp": 2}, {"ep": 2, "tp": 2}, {"dp": 2, "ep": 2}], ids=str)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_each_device_reads_its_own_slices(checkpoint: str, sizes: dict[str, int], read: list[Any]) -> None:
    """Of experts, one part for each device along "ep" and "tp"; of queries, keys and values, its heads."""
    floats = checkpoint in ("floats", "latents")
    axes: dict[str, Any] = {"heads": "ep" if "ep" in sizes else "tp", **({"intermediate": None} if floats else {})}
    if floats and "tp" in sizes:
        axes["expert"] = tuple(name for name in ("ep", "tp") if name in sizes)
    source, split = file_source(CHECKPOINTS[checkpoint]), ModelSplit.of(mesh_of(**sizes), axes)
    read.clear()
    from_source(source, dtype=jnp.float32, split=split)
    parts = split.mesh.size // sizes.get("dp", 1)
    experts = [its for its in read if its[0].startswith(("gate_up", "down_")) or its[0].endswith("experts")]
    others = [its for its in read if its not in experts]
    assert {round(share * parts, 6) for _, _, share in experts} == {1.0}
    layers = len(source.layers)
    assert len(experts) % (layers * split.mesh.size) == 0  # each device reads for itself
    if checkpoint == "quantized":  # as queries are, which are read whole, and dequantized
        return
    heads = [share for name, _, share in others if any(word in name for word in ("q_weight", "q_proj", "q_b_proj"))]
    assert heads
    assert set(heads) == {1 / split.ways("heads")}


def test_every_byte_of_experts_is_read_by_one_device(read: list[Any]) -> None:
    from_source(file_source(TINY), dtype=jnp.float32, split=ModelSplit.of(mesh_of(ep=2, tp=2), {"heads": "tp"}))
    places = [(name, place) for name, place, _ in read if name == "gate_up_values"]
    assert len({place for _, place in places}) == 4
    covered = np.zeros(8, int)
    for place in {place for _, place in places}:
        covered[slice(*place[0])] += 1
    assert covered.tolist() == [1] * 8


def test_nothing_is_read_ahead_where_processes_have_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    source, split = file_source(TINY), ModelSplit.of(mesh_of(ep=2))
    monkeypatch.setattr(source, "read_ahead", lambda _: pytest.fail("read ahead"))
    monkeypatch.setattr(ModelSplit, "of_several_processes", True)
    from_source(source, dtype=jnp.float32, split=split)


@pytest.mark.costly
def test_each_of_two_processes_reads_its_parts_and_both_generate_the_same() -> None:
    """All that is divided is read by half by each, and no tensor whole but those that every device has."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    file = Path(__file__).with_name("model_process.py")
    environment = importing(file.parents[1], JAX_PLATFORMS="cpu")
    command = [sys.executable, "-W", "error", str(file)]
    with contextlib.ExitStack() as stack:
        processes = []
        for number in range(2):
            arguments = [*command, str(number), str(port), str(TINY)]
            started = subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True)
            processes.append(stack.enter_context(started))
            stack.callback(started.kill)
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    reader = gpt_oss_reader.Reader(TINY)
    divided = sum(reader.nbytes(layer) for layer in reader.layers)
    for layer in reader.layers:
        names = ("q_weight", "q_bias", "k_weight", "k_bias", "v_weight", "v_bias", "o_weight", "sinks")
        divided += sum(array.nbytes for name, array in reader.layer(layer).items() if name in names)
    assert [its["read"] for its in found] == [reader.nbytes() - divided // 2] * 2
    alone = Runner(load(TINY, dtype=jnp.float32)).generate([[1, 2, 3], [4, 5]], Sampler(), 4)
    assert [its["tokens"] for its in found] == [[tokens.tolist() for tokens in alone]] * 2
