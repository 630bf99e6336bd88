"""A decoding step as a program of its own, by `jax.export`: a process runs it without jmx's models."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.export

from jmx.models.forward import Weights
from jmx.models.model_split import ModelSplit
from jmx.serving.engine.sampling import Level
from jmx.serving.engine.step import Device, Inputs, Results, draw_of, pass_of


class ExportedStep(NamedTuple):
    """A step over flat lists of arrays.

    Args:
        program: takes weights, what the last step left on the device, and inputs; returns what the step leaves there,
            and results: each a list of arrays.
        device, inputs, results: the names of these arrays, such as `.tokens`, in their order. Those of weights are the
            model's variables, in the order of its state.
    """

    program: jax.export.Exported
    device: list[str]
    inputs: list[str]
    results: list[str]


def export_step(
    weights: Weights,
    pools: Sequence[int],
    split: ModelSplit | None,
    device: Device,
    inputs: Inputs,
    checks: Sequence[jax.export.DisabledSafetyCheck] = (),
) -> ExportedStep:
    """The step of these sizes.

    Args:
        weights, pools: as of `pass_of`.
        split: how a mesh divides the model, or None.
        device: of an engine; only shapes are used.
        inputs: of the step, likewise.
        checks: of `jax.export` that are disabled; docs/exporting.md has those of each backend.
    """
    run, draw = pass_of(weights, pools), draw_of(split)

    def step(arrays: list[Any], device: Device, inputs: Inputs) -> tuple[Device, Results]:
        pages, passed = run(arrays, device.pages, device.tokens, inputs)
        given = inputs.slots, inputs.draws, inputs.sampling
        tokens, history, results = draw((), device.tokens, device.history, passed.logits, *given, level=Level.ALL)
        return Device(pages, tokens, history), results

    device_tree, inputs_tree = jax.tree.structure(device), jax.tree.structure(inputs)

    def flat(arrays: list[Any], device: list[Any], inputs: list[Any]) -> tuple[list[Any], list[Any]]:
        left, results = step(arrays, jax.tree.unflatten(device_tree, device), jax.tree.unflatten(inputs_tree, inputs))
        return jax.tree.leaves(left), jax.tree.leaves(results)

    shapes = jax.tree.map(lambda its: jax.ShapeDtypeStruct(its.shape, its.dtype), (weights.arrays, device, inputs))
    _, results = jax.eval_shape(step, *shapes)
    arguments = weights.arrays, jax.tree.leaves(device), jax.tree.leaves(inputs)
    program = jax.export.export(jax.jit(flat, donate_argnums=1), disabled_checks=checks)(*arguments)
    return ExportedStep(program, *map(_names, (device, inputs, results)))


def _names(tree: Any) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]
