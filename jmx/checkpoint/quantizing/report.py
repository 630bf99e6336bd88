"""The quantization errors of each layer's weights, measured in float64."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jmx.checkpoint import shards
from jmx.checkpoint.quantizing.float_experts import PARTS
from jmx.checkpoint.shards import CheckpointError
from jmx.numerics.formats import WHOLE_ROW, BlockScaled, Format
from jmx.util import html
from jmx.util.atomic_files import Kind
from jmx.util.tables import FoldingTable, numbers, words
from jmx.util.typing import Float

_SCHEMA = "jmx.quantize-report/1"


@dataclass
class Errors:
    """Sums over the weights that were quantized.

    Attributes:
        squared_error: the sum of squares of quantized minus source.
        squared: that of the source.
        clipped: the number of weights outside the range of their block's elements.
        count: the number of all weights.
    """

    squared_error: float = 0.0
    squared: float = 0.0
    clipped: int = 0
    count: int = 0

    @property
    def relative_error(self) -> float:
        """||quantized - source|| / ||source||, Frobenius; 0 where all are zero."""
        return math.sqrt(self.squared_error / self.squared) if self.squared else 0.0

    @property
    def clipped_share(self) -> float:
        """The share of weights whose quotient by scale (and zero point) is outside the range of the elements."""
        return self.clipped / self.count if self.count else 0.0

    def __add__(self, other: "Errors") -> "Errors":
        return Errors(
            self.squared_error + other.squared_error,
            self.squared + other.squared,
            self.clipped + other.clipped,
            self.count + other.count,
        )


def measure(weight: Float[np.ndarray, "N K"], quantized: BlockScaled, format: Format) -> Errors:
    """The errors of a canonical `quantized` weight against the floats that it was made from."""
    source = weight.astype(np.float64)
    values, elements = np.asarray(quantized.values).astype(np.float64), format.elements()

    def of_columns(by_block: Float[np.ndarray, "N b"]) -> Float[np.ndarray, "N columns"]:  # broadcasts to (N, K)
        whole_row = format.block_size == WHOLE_ROW
        return by_block if whole_row else np.repeat(by_block, format.block_size, axis=1)[:, : source.shape[1]]

    scales = np.asarray(quantized.scales).astype(np.float64)
    if quantized.global_scales is not None:
        scales *= np.asarray(quantized.global_scales, np.float64)[:, None]
    scales = of_columns(scales)
    zero = 0.0
    if quantized.zero_points is not None:
        zero = of_columns(np.asarray(quantized.zero_points, np.float64))
    difference = (values - zero) * scales - source
    outside = (source < (np.nanmin(elements) - zero) * scales) | (source > (np.nanmax(elements) - zero) * scales)
    return Errors(
        float(np.vdot(difference, difference)),
        float(np.vdot(source, source)),
        int(np.count_nonzero(outside)),
        source.size,
    )


@dataclass
class Report:
    """Errors of each layer's gate, up and down, all experts together; without a gate if experts have none.

    Args:
        format: name of the weights' format.
        form: of the files: "compressed-tensors" or "gpt-oss".
        layers: by the name of the module that holds the experts, by part.
    """

    format: str
    form: str
    layers: dict[str, dict[str, Errors]] = field(default_factory=dict)

    def add(self, layer: str, part: str, errors: Errors) -> None:
        parts = self.layers.setdefault(layer, {})
        parts[part] = parts.get(part, Errors()) + errors

    def total(self) -> dict[str, Errors]:
        """By part, of all layers."""
        layers = self.layers.values()
        found = {part: [parts[part] for parts in layers if part in parts] for part in PARTS}
        return {part: sum(errors, Errors()) for part, errors in found.items() if errors}

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON objects."""

        def shares(parts: dict[str, Errors]) -> dict[str, Any]:
            return {
                part: {"relative_error": errors.relative_error, "clipped_share": errors.clipped_share}
                for part, errors in parts.items()
            }

        return {
            "schema": _SCHEMA,
            "format": self.format,
            "form": self.form,
            "layers": {name: shares(parts) for name, parts in self.layers.items()},
            "total": shares(self.total()),
        }

    def _repr_html_(self) -> str:
        return html.render(self.table())

    def table(self) -> FoldingTable:
        """The report as a table: a row for each layer, and one for all."""
        title = f"experts in {self.format}: relative error, share of weights that are clipped"
        columns = [*words("layer"), *numbers(*(name for part in PARTS for name in (part, f"{part} clipped")))]
        table = FoldingTable(columns, title)
        for name, parts in self.layers.items():
            table.add_row(name, *_cells(parts))
        table.add_section()
        table.add_row("all", *_cells(self.total()))
        return table


def _cells(parts: dict[str, Errors]) -> Iterator[str]:
    for part in PARTS:
        errors = parts.get(part)
        yield "" if errors is None else f"{errors.relative_error:.3%}"
        yield "" if errors is None else f"{errors.clipped_share:.3%}"


def _fault(file: Path) -> str | None:
    """Why the JSON in `file` was not written from `Report.as_dict`; None if it was."""
    try:
        found = shards.read_json(file)
    except CheckpointError as error:
        return str(error)
    match found:
        case {"schema": schema, "format": str(), "form": str(), "layers": dict() as layers, "total": total}:
            if len(found) == 5 and schema == _SCHEMA and all(map(_is_numbers, [*layers.values(), total])):
                return None
    return f"it is not JSON of schema {_SCHEMA!r}"


def _is_numbers(parts: Any) -> bool:
    return (
        isinstance(parts, dict)
        and {*PARTS[1:]} <= parts.keys() <= {*PARTS}
        and all(isinstance(its, dict) and its.keys() == {"relative_error", "clipped_share"} for its in parts.values())
        and all(type(value) in (int, float) for its in parts.values() for value in its.values())
    )


REPORT = Kind("a report of `jmx convert --quantize`", _fault)
