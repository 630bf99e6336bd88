"""Pictures show the numbers that they are given, equal pictures are equal files, and wrong arguments are named."""

import json
import pathlib
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from jmx import parallel, plot
from jmx.checkpoint.quantizing import Errors
from jmx.checkpoint.quantizing import Report as QuantizingReport
from jmx.perf.roofline import Report
from jmx.plot import style

RESULTS = pathlib.Path(__file__).parents[1] / "benchmarks" / "results"


def axes_of(figure) -> Any:
    """The only axes of a picture; Any: what it holds is of known kinds."""
    return figure.axes[0]


def counts(rng, *shape):
    return rng.integers(1, 1000, shape)


def errors(rng) -> QuantizingReport:
    report = QuantizingReport("nvfp4", "compressed-tensors")
    for layer in range(5):
        for part in ("gate", "up", "down"):
            report.add(f"layers.{layer}", part, Errors(rng.uniform(0.1, 1), rng.uniform(50, 100), 3, 1000))
    return report


@pytest.mark.parametrize("shape", [(7, 12), (12,)])
def test_expert_load_is_over_the_average_of_each_layer(rng, shape):
    tokens = counts(rng, *shape)
    figure = plot.expert_load(tokens)
    shown = np.asarray(axes_of(figure).images[0].get_array())
    np.testing.assert_allclose(shown, np.atleast_2d(tokens / tokens.mean(-1, keepdims=True)))
    assert f"{shown.max():.2f} x" in axes_of(figure).get_title()


def test_a_layer_without_tokens_is_empty():
    shown = np.asarray(axes_of(plot.expert_load(np.array([[0, 0], [1, 3]]))).images[0].get_array())
    np.testing.assert_array_equal(shown, [[0, 0], [0.5, 1.5]])


def test_rank_load_has_a_bar_for_each_rank_and_placement(rng):
    tokens = counts(rng, 3, 16)
    before = parallel.Placement.stack([parallel.Placement.identity(16, 4, 4)] * 3)
    comparison = parallel.compare(tokens, before, parallel.balance(tokens, 4, 4, before=before))
    for loads, names in (
        (comparison, ["before", "after"]),
        ({"a": comparison.before, "b": comparison.after, "c": comparison.after}, ["a", "b", "c"]),
    ):
        axes = axes_of(plot.rank_load(loads))
        heights = [[bar.get_height() for bar in bars] for bars in axes.containers]
        np.testing.assert_allclose(heights[0], comparison.before.sum(0))
        np.testing.assert_allclose(heights[-1], comparison.after.sum(0))
        labels = [text.get_text() for text in axes.get_legend().get_texts()]
        assert [label.split(":")[0] for label in labels] == names
        assert f"{parallel.imbalance(comparison.after):.2f} x" in labels[-1]


def test_quantization_error_of_a_report_and_of_its_file(rng, tmp_path):
    report = errors(rng)
    (tmp_path / "report.json").write_text(json.dumps(report.as_dict()))
    expected = [100 * parts["up"].relative_error for parts in report.layers.values()]
    for given in (report, tmp_path / "report.json", str(tmp_path / "report.json")):
        axes = axes_of(plot.quantization_error(given))
        lines = {line.get_label(): line.get_ydata() for line in axes.lines}
        assert lines.keys() == {"gate", "up", "down"}
        np.testing.assert_allclose(lines["up"], expected)
        assert "nvfp4" in axes.get_title()


@pytest.mark.parametrize("name", ["h200-gpt-oss-120b", "cpu-gpt-oss-120b", "h200-formats"])
def test_no_point_is_above_the_roofline(name):
    report = Report.load(str(RESULTS / f"{name}.json"))
    limits, *systems = axes_of(plot.roofline(report)).lines
    copy, dense = report.limits.copy_rate / 1e12, report.limits.dense_rate / 1e12
    np.testing.assert_allclose(limits.get_ydata(), np.minimum(copy * limits.get_xdata(), dense))
    assert {line.get_label() for line in systems} == {row.name for row in report.rows if row.error is None}
    for line in systems:
        if "fp8" not in line.get_label() and "int8" not in line.get_label():  # dense is the rate of bfloat16
            roof = np.minimum(copy * np.asarray(line.get_xdata()), dense)
            assert (np.asarray(line.get_ydata()) < 1.05 * roof).all(), line.get_label()


def test_serving_has_a_line_for_each_server_and_a_point_for_each_number_of_users():
    path = RESULTS / "serving-h200.json"
    points = json.loads(path.read_text())
    servers = {its["server"] for its in points if its["users"]}
    for given in (path, str(path), points[::-1]):
        lines = axes_of(plot.serving(given)).lines
        assert {line.get_label() for line in lines} == servers
        for line in lines:
            its = [its for its in points if its["server"] == line.get_label() and its["users"]]
            assert line.get_xydata().tolist() == [[point["users"], point["tok_s"]] for point in its]
    plain = [{key: value for key, value in its.items() if key != "server"} for its in points if its["users"]]
    assert len(axes_of(plot.serving(plain)).lines) == 1
    many = [points[0] | {"server": str(number)} for number in range(7)]
    for wrong in ([], [{"users": 1}], [points[0] | {"users": None}], many):
        with pytest.raises(ValueError, match="`points`"):
            plot.serving(wrong)
    with pytest.raises(TypeError, match="`points`"):
        plot.serving(3)  # pyright: ignore[reportArgumentType]


def test_kernels_adds_up_launches_of_a_name():
    events = [
        {"name": "mosaic_block_n8", "start": 10.0, "end": 25.0},
        {"name": "fusion_3", "start": 0.0, "end": 2.0},
        {"name": "fusion_11", "start": 2.0, "end": 5.5},
    ]
    axes = axes_of(plot.kernels(events, highlight="mosaic"))
    assert [label.get_text() for label in axes.get_yticklabels()] == ["mosaic_block_n8", "fusion x 2"]
    assert [bar.get_width() for bar in axes.patches] == [15.0, 5.5]
    assert axes.patches[0].get_facecolor() != axes.patches[1].get_facecolor()
    assert axes.get_title() == "3 launches, 20.5 us"


def test_kernels_of_a_saved_profile_are_all_of_its_time():
    profile = json.loads((RESULTS / "profiles" / "h200.json").read_text())
    axes = axes_of(plot.kernels(profile["kernels"], highlight=profile["backend"]))
    expected = sum(kernel["end"] - kernel["start"] for kernel in profile["kernels"])
    assert sum(bar.get_width() for bar in axes.patches) == pytest.approx(expected)


def test_many_kernels_are_summed_up_in_the_last_bar():
    events = [{"name": f"kernel{chr(97 + i)}", "start": 0.0, "end": i + 1.0} for i in range(15)]
    axes = axes_of(plot.kernels(events))
    assert axes.get_yticklabels()[-1].get_text() == "3 others"
    assert axes.patches[-1].get_width() == 1 + 2 + 3


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_equal_pictures_are_equal_files(rng, tmp_path, ending):
    tokens = counts(rng, 4, 8)
    for name in "ab":
        style.save(plot.expert_load(tokens), str(tmp_path / f"{name}.{ending}"))
    assert (tmp_path / f"a.{ending}").read_bytes() == (tmp_path / f"b.{ending}").read_bytes()


def test_a_notebook_shows_the_picture(rng):
    figure: Any = plot.expert_load(counts(rng, 4, 8))
    assert figure._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize(("bytes_per_token", "unit"), [(None, "nats a token"), (4.0, "bits per byte")])
def test_training_loss_is_in_either_unit(rng, bytes_per_token, unit):
    losses = rng.uniform(1, 9, 5)
    curve = [(20 * number, loss) for number, loss in enumerate(losses, 1)]
    axes = axes_of(plot.training_loss(curve, bytes_per_token=bytes_per_token))
    steps, shown = axes.lines[0].get_data()
    assert steps.tolist() == [20, 40, 60, 80, 100]
    np.testing.assert_allclose(shown, losses if bytes_per_token is None else losses / np.log(2) / bytes_per_token)
    assert axes.get_ylabel() == unit


@pytest.mark.parametrize("wrong", [0.0, -1.0, np.nan])
def test_bytes_of_a_token_are_above_0(wrong):
    with pytest.raises(ValueError, match="`bytes_per_token`"):
        plot.training_loss([(1, 2.0)], bytes_per_token=wrong)


LAUNCH = {"name": "a", "start": 0.0, "end": 1.0}


@pytest.mark.parametrize(
    ("function", "arguments", "error", "message"),
    [
        ("expert_load", ([1, 2],), TypeError, "`counts`"),
        ("expert_load", (np.ones((1, 2, 3)),), ValueError, r"`counts` \(shape \(1, 2, 3\)\)"),
        ("expert_load", (np.array([1.0, -1.0]),), ValueError, r"`counts\[1\]` \(=-1\)"),
        ("rank_load", (np.ones(4),), TypeError, "`loads`"),
        ("rank_load", ({},), ValueError, "`loads`"),
        ("rank_load", ({"a": np.ones(4), "b": np.ones(5)},), ValueError, r"`loads` .*\(4,\), \(5,\)"),
        ("rank_load", ({str(i): np.ones(4) for i in range(7)},), ValueError, "1 to 6"),
        ("quantization_error", (3,), TypeError, "`report`"),
        ("quantization_error", (QuantizingReport("int4_g32", "gpt-oss"),), ValueError, "at least one layer"),
        ("quantization_error", (str(RESULTS / "cpu.json"),), ValueError, "`report` .*cpu.json.*must be a report"),
        ("roofline", (str(RESULTS / "cpu.json"),), TypeError, "`report`"),
        ("training_loss", ([],), ValueError, r"`curve` \(=\[\]\)"),
        ("training_loss", ([1.0, 2.0],), ValueError, "`curve`"),
        ("training_loss", ([(1, 2, 3)],), ValueError, "`curve`"),
        ("training_loss", ("x",), ValueError, "`curve`"),
        ("kernels", (3,), TypeError, "`events`"),
        ("kernels", ([],), ValueError, "`events`"),
        ("kernels", ([LAUNCH, 3],), TypeError, r"`events\[1\]`"),
        ("kernels", ([{"name": "a"}],), ValueError, r"`events\[0\]` .* must have end, start"),
    ],
)
def test_wrong_arguments_are_named(function, arguments, error, message):
    with pytest.raises(error, match=message):
        getattr(plot, function)(*arguments)


def test_a_highlight_that_is_no_name_is_an_error():
    with pytest.raises(TypeError, match="`highlight`"):
        plot.kernels([LAUNCH], highlight=3)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("figure", [lambda: plot.expert_load(np.ones((2, 3))), lambda: plot.kernels([LAUNCH])])
def test_without_matplotlib_the_remedy_is_named(monkeypatch, figure):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'jmx-moe\[bench\]'"):
        figure()
