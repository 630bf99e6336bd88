"""HTML forms of results in notebooks: the facts of the printed form, in tables, with every text escaped."""

import html.parser

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Group
from rich.text import Text

import jmx
from jmx import lora, parallel
from jmx.checkpoint.quantizing import Errors
from jmx.checkpoint.quantizing import Report as QuantizingReport
from jmx.perf.roofline import Limits, Report, Row
from jmx.util import html as forms
from jmx.util.tables import FoldingTable, numbers, words


class Elements(html.parser.HTMLParser):
    """The texts of a document, and whether every element is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.rows = 0
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        if tag != "br":
            self.open.append(tag)
        self.rows += tag == "tr"

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_a_table_has_its_cells_and_the_side_that_they_are_aligned_to():
    table = FoldingTable([*words("name"), *numbers("us")], "a < b", "one\ntwo")
    table.add_row("x & y", "1.5")
    table.add_row(Text("chosen", "bold green"), "2")
    text = forms.render(table)
    assert Elements(text).texts == ["a < b", "name", "us", "x & y", "1.5", "chosen", "2", "one", "two"]
    assert '<td style="text-align:right">1.5</td>' in text
    assert "font-weight:bold" in text[text.index("chosen") - 60 : text.index("chosen")]


def test_lines_and_tables_keep_their_order():
    table = FoldingTable(words("a"))
    table.add_row("b")
    assert Elements(forms.render(Group(Text("before"), table, Text("after")))).texts == ["before", "a", "b", "after"]


def explanation(backend=None):
    experts = jmx.Experts.random(jax.random.key(0), 8, 128, 64, gate_up_order="interleaved")
    return jmx.explain(
        jnp.ones((4, 128)),
        jmx.Logits(jnp.ones((4, 8)), jmx.TopKSoftmax(2)),
        experts,
        activation="swiglu",
        backend=backend,
    )


@pytest.mark.parametrize("backend", [None, "mosaic"])
def test_an_explanation_shows_every_fact_that_it_prints(backend):
    found = explanation(backend)
    shown = " ".join(Elements(found._repr_html_()).texts)
    assert str(found.problem) in shown
    for name, summary, no in found.trail:
        if no is None:
            assert name in shown
            assert summary in shown
    assert ("a call raises NoBackendError" in shown) == (backend is not None)
    assert "experts used" in shown


@pytest.mark.parametrize("tokens", [0, 1, 8, 9])
def test_a_routing_shows_its_first_tokens(rng, tokens):
    ids = rng.integers(0, 16, (tokens, 2))
    weights = rng.random((tokens, 2), np.float32)
    text = jmx.Routing(jnp.asarray(ids), jnp.asarray(weights))._repr_html_()
    elements = Elements(text)
    assert elements.texts[0].startswith(f"{tokens} tokens, 2 experts each")
    assert elements.rows == 1 + min(tokens, 8)
    assert ("of which the first" in text) == (tokens > 8)
    for i in range(min(tokens, 8)):
        assert f"{ids[i, 0]}, {ids[i, 1]}" in elements.texts
        assert f"{weights[i, 0]:.3f}, {weights[i, 1]:.3f}" in elements.texts


def test_a_routing_that_is_traced_shows_its_types():
    found = []

    @jax.jit
    def traced(ids):
        found.append(jmx.Routing(ids, jnp.ones(ids.shape))._repr_html_())
        return ids

    traced(jnp.zeros((3, 2), jnp.int32))
    assert found[0].startswith("<pre>Routing(")
    assert Elements(found[0])


def test_a_comparison_of_placements_has_a_row_for_each_rank(rng):
    counts = rng.integers(1, 100, (2, 8))
    before = parallel.Placement.stack([parallel.Placement.identity(8, 4, 2)] * 2)
    found = parallel.compare(counts, before, parallel.balance(counts, 4, 2, before=before))
    elements = Elements(found._repr_html_())
    assert elements.rows == 5
    words = [word for line in str(found).splitlines() for word in line.split()]
    assert " ".join(elements.texts).split() == words


def test_errors_of_merged_adapters_have_a_row_for_each_expert():
    experts = jmx.Experts.random(jax.random.key(0), 3, 64, 32, gate_up_order="interleaved")
    adapters = lora.LoRA(2, dtype=jnp.float32).random(jax.random.key(1), experts)
    found = lora.requantize(experts, jax.tree.map(jnp.ones_like, adapters))  # which change the weights
    elements = Elements(found._repr_html_())
    assert elements.rows == 4
    assert f"{found.errors['down'][2]:.4f}" in elements.texts
    assert f"{found.relative_errors['gate_up'][0]:.4f}" in elements.texts


def test_reports_show_a_row_for_each_layer_and_system():
    report = QuantizingReport("nvfp4", "compressed-tensors")
    report.add("layers.0", "gate", Errors(1.0, 100.0, 1, 100))
    elements = Elements(report._repr_html_())
    assert elements.rows == 3
    assert {"layers.0", "10.000%", "1.000%"} <= {*elements.texts}
    row = Row("xla", 4, us=12.0, tb_s=1.0, tflop_s=2.0, over_floor=3.0, rel_err=1e-3, error="<wrong>")
    benchmark = Report({"device": "cpu"}, Limits(1e12, 2e12), {"model": "small", "routing": "uniform"}, (row,))
    elements = Elements(benchmark._repr_html_())
    assert {"xla", "12.0", "3.00"} <= {*elements.texts}
    assert any("<wrong>" in text for text in elements.texts)
