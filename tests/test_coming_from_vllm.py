"""docs/coming_from_vllm.md: it has every name of vLLM's lists, and the names of jmx in it exist."""

import argparse
import ast
import functools
import importlib
import importlib.util
import inspect
import json
import pathlib
import re
from typing import Any

import jax
import pytest

import jmx
import jmx.nnx
from jmx import cli, parallel
from jmx.backends import registered_backends
from jmx.numerics.formats import FORMATS
from jmx.numerics.input_formats import FAMILIES, INPUT_FORMATS
from jmx.numerics.layouts import LAYOUTS
from jmx.routing import ROUTING_METHODS
from jmx.selection import vllm_names
from jmx.selection.select import check_backend
from jmx.util.checks import nearest

ROOT = pathlib.Path(__file__).parents[1]

pytestmark = pytest.mark.every_case

PAGE = (ROOT / "docs" / "coming_from_vllm.md").read_text()
THEIRS = json.loads((ROOT / "tests" / "data" / "vllm_names.json").read_text())
LISTS = [name for name in THEIRS if name != "source"]
VERDICTS = ("same", "differs", "not here")

BACKENDS = [backend.name for backend in registered_backends()]
NAMES = {*BACKENDS, *FORMATS, *LAYOUTS, *jmx.ACTIVATIONS, *ROUTING_METHODS, *parallel.EXCHANGES}
ARGUMENTS = {
    name
    for function in (jmx.moe, jmx.nnx.MoE.__init__, jmx.Experts.of, jmx.Experts.quantize)
    for name in inspect.signature(function).parameters
}
# What an argument's values are names of.
VALUES = {"input_format": {*INPUT_FORMATS, *FAMILIES}, "backend": {*BACKENDS}, "weights_on": {"output", "input"}}


def rows() -> list[list[str]]:
    """The cells of each row of the page's tables."""
    lines = [line for line in PAGE.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] != "vLLM" and {*row} != {"---"}]


ROWS = rows()


def codes(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def commands() -> dict[str, argparse.ArgumentParser]:
    (found,) = [action for action in cli.parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return found.choices


@functools.cache
def flags() -> set[str]:
    return {flag for command in commands().values() for flag in command._option_string_actions}


def _is_attribute(owner: Any, *parts: str) -> bool:
    for part in parts:
        if hasattr(owner, "__path__") and importlib.util.find_spec(f"{owner.__name__}.{part}"):
            importlib.import_module(f"{owner.__name__}.{part}")
        if not hasattr(owner, part):
            return False
        owner = getattr(owner, part)
    return True


def exists(name: str) -> bool:
    """Whether a name of jmx exists: an attribute, a command, a flag, an argument with or without a value, or an entry
    of one of the lists of names."""
    if name.startswith(("jmx.", "jax.")):
        return _is_attribute({"jmx": jmx, "jax": jax}[name[:3]], *name.split(".")[1:])
    if name.startswith("jmx "):
        return name.split()[1] in commands()
    if name.startswith("--"):
        return name in flags()
    if "=" in name:
        argument, value = name.split("=")
        if argument not in ARGUMENTS or not value:
            return argument in ARGUMENTS
        found = ast.literal_eval(value)
        return found is None or found in VALUES[argument]
    return name in NAMES


@pytest.mark.parametrize("kind", LISTS)
def test_every_name_of_theirs_is_on_the_page(kind):
    named = [name for row in ROWS for name in codes(row[0]) or [row[0]]]
    missing = [name for name in THEIRS[kind] if name not in named]
    assert not missing


def test_the_page_has_no_other_names_of_theirs():
    listed = {name for kind in LISTS for name in THEIRS[kind]}
    assert not [name for row in ROWS for name in codes(row[0]) or [row[0]] if name not in listed]


def test_the_order_of_preference_is_that_of_the_registry():
    assert f"jmx: {', '.join(f'`{name}`' for name in BACKENDS)}, for every model and format" in PAGE


def test_each_row_has_a_verdict_and_names_that_exist():
    assert len(ROWS) > 150
    faults = []
    for row in ROWS:
        theirs, verdict, ours, why = row
        if not theirs or verdict not in VERDICTS or not codes(ours) or (verdict == "not here" and not why):
            faults.append((row, "must have names of both, a verdict, and what to use instead"))
        if re.sub(r"`[^`]+`", "", ours).strip():
            faults.append((row, "must have names only in the third column"))
        faults += [(name, "does not exist") for name in codes(ours) if not exists(name)]
    assert not faults


def test_names_that_do_not_exist_are_found():
    for name in ("jmx.Expert", "jmx.Experts.preparing", "jmx bnech", "--backed", "input_formats=", "mosaics"):
        assert not exists(name), name
    assert not exists('input_format="fp9"')


# The error about an unknown backend


FOREIGN = [name for name in (*THEIRS["backends"], *THEIRS["moe_backend"]) if name.lower() not in BACKENDS]


@pytest.mark.parametrize("theirs", FOREIGN)
def test_the_error_names_what_the_page_names(theirs):
    (row,) = [row for row in ROWS if theirs in codes(row[0])]
    with pytest.raises(ValueError, match="`backend` ") as caught:
        check_backend(theirs, registered_backends())
    message = str(caught.value)
    assert message.startswith(f"`backend` (={theirs!r}) must be one of {BACKENDS}; ")
    if theirs.lower() in vllm_names.AUTOMATIC:
        assert message.endswith(f"for vLLM's {theirs!r} leave it out")
        return
    found = re.search(r"; vLLM's '(\w+)' is '(\w+)' in jmx, ", message)
    assert found is not None
    assert found[1] == theirs
    assert f"`{found[2]}`" in row[2]
    inputs = re.search(r"input_format='(\w+)'", message)
    assert inputs is None or exists(f'input_format="{inputs[1]}"')


def test_the_table_has_only_their_names_and_ours():
    known = {name.lower() for name in (*THEIRS["backends"], *THEIRS["moe_backend"])}
    assert {*vllm_names.EQUIVALENTS, *vllm_names.AUTOMATIC} | {"triton", "cpu"} == known
    assert {ours for ours, _ in vllm_names.EQUIVALENTS.values()} <= {*BACKENDS}
    assert not {*vllm_names.EQUIVALENTS} & {*BACKENDS}


def test_spelling_and_case_do_not_matter_and_absent_backends_are_not_named():
    assert "'cutlass' in jmx" in vllm_names.meant("FlashInfer-CUTLASS", BACKENDS)
    assert vllm_names.meant("marlin", ["big", "fast"]) == nearest("marlin", ["big", "fast"]) == ""
    assert vllm_names.meant("mosiac", BACKENDS) == "; did you mean 'mosaic'?"


@pytest.mark.parametrize(
    "arguments",
    [
        ["explain", "--backend", "marlin"],
        ["tune", "--backend", "marlin"],
        ["bench", "--backends", "xla,marlin"],
        ["generate", "examples/gpt_oss_demo", "a", "--backend", "marlin"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_the_command_line_names_it_too(arguments, capsys):
    assert cli.main(arguments) == cli.EXIT_USAGE
    assert "vLLM's 'marlin' is 'mosaic' in jmx, on Hopper" in capsys.readouterr().err
