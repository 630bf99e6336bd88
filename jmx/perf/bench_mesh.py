"""Times one layer divided over a mesh against the limits of its devices and links: the core of `jmx bench --mesh`."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

from jax.sharding import Mesh

from jmx.parallel import Split
from jmx.parallel.division import Division
from jmx.perf.bench import TOLERANCE
from jmx.perf.divided import Case, Layers, Times, Weights
from jmx.perf.machine import describe_machine, measure_limits, measure_links, out_of_memory
from jmx.perf.mesh_memory import MeshMemory
from jmx.perf.roofline import DividedRow, Limits, Report
from jmx.perf.settings import Settings
from jmx.perf.shapes import Shape, routed_shape
from jmx.selection.costs import Floor, Peak, flops, times_bfloat16
from jmx.selection.environment import Environment
from jmx.selection.problem import weight_bytes

_LAYERS = 8  # different layers in one call


def run(
    model: str,
    tokens: Sequence[int],
    mesh: Mesh,
    splits: Sequence[Split],
    *,
    format: str | None = None,
    **options: Any,
) -> Report:
    """Measures the limits of a device and of its links, then the divided layer at every token count.

    All programs are compiled first, and those of one token count take turns.

    Args:
        model, options: those of `Settings`. 8 layers by default.
        tokens: token counts of one device.
        mesh: the devices, all of one host; all axes divide the layer.
        splits: ways to divide the layer, which differ in how tokens are exchanged only. One that does not run at some
            token counts has no rows of these, and `progress` gets the reason.
        format: "WEIGHTS" or "WEIGHTS:INPUTS"; None: that of the model's shape.

    Raises:
        ValueError: as for `Settings`; sizes that the mesh does not divide, an exchange that runs at no token count, or
            more layers than the memory of the first device holds. Nothing has been measured yet, and no weights have
            been made.
    """
    settings = Settings(model, tokens, None if format is None else [format], **options)
    progress, repeats = settings.progress, settings.repeats
    shape = routed_shape(model, settings.routing)
    shape = shape if format is None else shape.in_formats(format)
    divisions = _divisions(shape, tokens, mesh, splits, progress)
    described = Layers.of(shape, splits[0], mesh, settings.layers or _LAYERS, settings.drawn_seed)
    progress("compiling")
    cases = [
        Case(described, count, {str(its.split): its.split for its in divided}, settings.routing, settings.drawn_seed)
        for count, divided in divisions.items()
    ]
    memory = MeshMemory.of(described, cases)
    progress(str(memory))
    memory.check(described.num_layers)
    device = mesh.devices.flat[0]
    progress(f"measuring the limits of {device.device_kind}")
    axes = splits[0].exchanged or splits[0].summed or splits[0].names("hidden")
    links = measure_links(mesh, axes, repeats)
    machine = Machine(measure_limits(repeats), links)
    values = describe_machine(device) | {"mesh": dict(mesh.shape), "link_GBs": None if links is None else links / 1e9}
    about = settings.as_dict(shape) | {"split": [str(split) for split in splits]}
    weights = described.drawn()
    rows: list[DividedRow] = []
    for case, divided in zip(cases, divisions.values(), strict=True):
        for row in _rows(case, weights, divided, machine, repeats):
            rows.append(row)
            progress(str(row))
        settings.so_far(Report(values, machine.limits, about, tuple(rows)))
    return Report(values, machine.limits, about, tuple(rows))


class Machine(NamedTuple):
    """Measured rates of a device, and of its links in bytes a second (None: there are none)."""

    limits: Limits
    links: float | None


def _divisions(
    shape: Shape, tokens: Sequence[int], mesh: Mesh, splits: Sequence[Split], progress: Callable[[str], None]
) -> dict[int, list[Division]]:
    """How those of the splits that run divide the calls with each token count. ValueError for one that runs at none."""
    found: dict[int, list[Division]] = {count: [] for count in tokens}
    for split in splits:
        rejections = []
        for count in found:
            its = division(shape, count, mesh, split)
            if its.call is None or its.chosen is not None:
                found[count].append(its)
                continue
            asked = [(name, reason) for name, _, reason in its.trail if split.exchange in (None, name)]
            rejections.append("; ".join(f"{name}: {reason}" for name, reason in asked))
            progress(f"{split} does not run with {count} tokens a device: {rejections[-1]}")
        if len(rejections) == len(found):
            raise ValueError(f"`exchange` (={split.exchange!r}) cannot run this call: {rejections[0]}")
    return {count: divided for count, divided in found.items() if divided}


def division(shape: Shape, count: int, mesh: Mesh, split: Split) -> Division:
    """How the split divides a call with `count` tokens a device."""
    devices = prod(mesh.shape[name] for name in split.names("tokens"))
    its = Division.of(shape.problem(count * devices, "packed"), split, mesh.shape)
    return its.of_logits(shape.method, Environment.of_device(mesh.devices.flat[0]))


def _rows(
    case: Case, weights: Weights, divided: Sequence[Division], machine: Machine, repeats: int
) -> Iterator[DividedRow]:
    """The measured rows of a token count, one for each split."""
    rows = [
        DividedRow(
            system=" ".join(filter(None, (division.mesh, division.chosen, _chunks(division.split)))),
            tokens=case.num_tokens,
            weights=case.layers.layout,
            layers=case.layers.num_layers,
            mesh=division.mesh,
            exchange=division.chosen,
            sent_bytes=division.bytes_before + division.bytes_after,
            chunks=division.split.chunks,
        )
        for division in divided
    ]
    try:
        x, logits = case.draw()
        times = case.measure(weights, x, logits, repeats)
    except Exception as e:  # reported in the rows, as those of `jmx.perf.bench`
        if not out_of_memory(e):
            raise
        yield from (dataclasses.replace(row, error="out of memory") for row in rows)
        return
    used = float(case.shares(logits).used.mean())
    for row, division in zip(rows, divided, strict=True):
        yield _against_floor(_timed(row, times, str(division.split)), case, division, machine, used)


def _chunks(split: Split) -> str:
    return "" if split.chunks == 1 else f"in {split.chunks} chunks"


def _timed(row: DividedRow, times: Times, label: str) -> DividedRow:
    us, split, error = times.median(), times.samples[label], times.relative_error[label]
    wrong = f"wrong result: relative error {error:.1e} is above {TOLERANCE:.0e}"
    return dataclasses.replace(
        row,
        us=us[label],
        spread=(max(split) - min(split)) / us[label],
        experts_us=us["experts"],
        exchange_us=us[label] - us["experts"],
        fullest_experts_us=us["fullest"],
        waits_us=us["fullest"] - us["experts"],
        one_us=us["one"],
        all_on_one_us=us["all_on_one"],
        efficiency=times.efficiency(label),
        rel_err=error,
        temporary_bytes=times.temporary_bytes[label],
        error=None if error <= TOLERANCE else wrong,
    )


def _against_floor(row: DividedRow, case: Case, division: Division, machine: Machine, used: float) -> DividedRow:
    """The row with what a device does on average: experts in use, bytes, flops, and the floor."""
    assert row.us is not None
    limits, links, local = machine.limits, machine.links, division.local
    devices = division.expert_devices
    operations = flops(local) / devices  # of the tokens that come to a device, those of its own experts
    least_bytes = weight_bytes(local, used)
    dense = limits.dense_rate * times_bfloat16(local, Environment.of_device(case.layers.mesh.devices.flat[0]))
    sent = row.sent_bytes or 0
    floor_us = Floor.of(least_bytes, operations, Peak(limits.copy_rate, dense, links), sent if links else 0).us
    return dataclasses.replace(
        row,
        active=used,
        tb_s=least_bytes / row.us / 1e6,
        tflop_s=operations / row.us / 1e6,
        floor_us=floor_us,
        over_floor=row.us / floor_us,
    )
