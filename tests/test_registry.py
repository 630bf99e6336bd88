"""The list of backends: order, names, layouts, traces from before, and entry points of other packages."""

import itertools
import re
import subprocess
import sys
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import pytest

import jmx
from jmx.backends import registered_backends
from jmx.numerics import layouts
from jmx.numerics.layouts import PACKED
from jmx.selection.registry import Registry

NUMBER = itertools.count()


@dataclass(frozen=True)
class Constant:
    """A backend that runs everything and returns its number."""

    name: str
    number: int = 0
    summary: str = "for tests"

    def supports(self, problem, environment):
        return None

    def apply(self, problem, x, routing, experts, environment):
        return jnp.full_like(x, self.number)


@pytest.fixture
def registry(monkeypatch):
    """The registry of jmx, to which a test may add."""
    mine = Registry(registered_backends())
    monkeypatch.setattr("jmx.backends.REGISTRY", mine)
    yield mine
    jax.clear_caches()


def names(registry):
    return [backend.name for backend in registry.backends()]


def call(x):
    experts = jmx.Experts.random(jax.random.key(0), 8, 64, 96, gate_up_order="interleaved")
    routing = jmx.Routing(jnp.zeros((3, 1), jnp.int32), jnp.ones((3, 1)))
    return jmx.moe(x, routing, experts, activation=jmx.SwiGLU())


def test_before_gives_the_place_in_the_list():
    registry = Registry((Constant("a"), Constant("xla")))
    registry.register(Constant("b"))
    registry.register(Constant("c"), before="a")
    registry.register(Constant("d"), before=None)
    assert names(registry) == ["c", "a", "b", "xla", "d"]
    with pytest.raises(ValueError, match=re.escape("`before` (='e') must be one of")):
        registry.register(Constant("f"), before="e")
    assert names(registry) == ["c", "a", "b", "xla", "d"]


def test_a_name_that_is_taken_is_an_error_and_nothing_is_registered():
    registry = Registry((Constant("xla"),))
    fresh = replace(PACKED, name=f"fresh{next(NUMBER)}")
    with pytest.raises(ValueError, match=re.escape("`backend.name` (='xla') is taken")):
        registry.register(Constant("xla"), [fresh])
    with pytest.raises(ValueError, match=re.escape("`layouts[1].name` (='packed') is taken by another layout")):
        registry.register(Constant("a"), [fresh, replace(PACKED)])
    assert names(registry) == ["xla"]
    assert fresh.name not in layouts.LAYOUTS


def test_what_lacks_a_member_is_no_backend():
    class Nameless:
        summary = supports = apply = "x"

    for wrong in (Nameless(), Constant, None):
        with pytest.raises(TypeError, match=r"`backend`.*must have a name, a summary, supports and apply"):
            jmx.register_backend(wrong)  # pyright: ignore[reportArgumentType]


def test_a_registered_backend_is_one_like_the_others(registry):
    layout = replace(PACKED, name=f"fresh{next(NUMBER)}")
    jmx.register_backend(Constant("first", 7), layouts=[layout], before="mosaic")
    assert layouts.get(layout.name) is layout
    assert float(call(jnp.ones((3, 64)))[0, 0]) == 7
    with jmx.use_backend("xla"):
        assert float(call(jnp.ones((3, 64)))[0, 0]) != 7
    with jmx.use_backend("first"):
        assert float(call(jnp.ones((3, 64)))[0, 0]) == 7
    problem = jmx.Problem(1, 64, 96, 8, 2, "bfloat16", "mxfp4", jmx.SwiGLU(), "interleaved", True, "packed")
    assert jmx.explain(problem).chosen == "first"


def test_what_was_traced_before_chooses_anew(registry):
    jitted = jax.jit(call)
    assert float(jitted(jnp.ones((3, 64)))[0, 0]) != 7
    jmx.register_backend(Constant("later", 7), before="mosaic")
    assert float(jitted(jnp.ones((3, 64)))[0, 0]) == 7


def distribution(directory, name, module, code):
    """Writes a module, and beside it what an installer writes of a package that has an entry point for it."""
    (directory / f"{module}.py").write_text(code)
    info = directory / f"{name}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[jmx.test]\n{module} = {module}:register\n")


def test_an_entry_point_that_fails_is_one_warning_and_others_go_on(tmp_path, monkeypatch):
    loaded = f"loaded{next(NUMBER)}"
    distribution(tmp_path, "broken_package", "broken_entry", "raise ImportError('no such library')")
    distribution(tmp_path, "whole_package", "whole_entry", f"def register(): import {loaded}")
    (tmp_path / f"{loaded}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    registry = Registry((Constant("xla"),), "jmx.test")
    assert loaded not in sys.modules
    with pytest.warns(UserWarning, match="'broken_entry' of the package 'broken_package'.*no such library") as found:
        assert names(registry) == ["xla"]
    assert len(found) == 1
    assert loaded in sys.modules
    assert names(registry) == ["xla"]  # with no other warning


@pytest.mark.costly
def test_importing_jmx_loads_no_entry_point():
    code = """
import importlib.metadata
read = importlib.metadata.entry_points
def entry_points(**group):
    assert group != {"group": "jmx.backends"}
    return read(**group)
importlib.metadata.entry_points = entry_points
import jmx, jmx.nnx, jmx.linen, jmx.cli, jmx.perf.bench
try:
    jmx.backends.registered_backends()
except AssertionError:
    print("then")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "then\n", done.stderr
