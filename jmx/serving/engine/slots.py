"""What a step's inputs have of each slot, kept between steps: of many requests, few things change from step to step."""

from collections.abc import Sequence

import numpy as np

from jmx.models.sampling import Sampler
from jmx.serving.engine.sampling import Rows
from jmx.serving.engine.step import Inputs
from jmx.serving.scheduling import Tokens


class Slots:
    """Tables of pages and parameters of sampling, by slot.

    Args:
        count: slots.
        widths: of each pool, the pages of a table.
    """

    def __init__(self, count: int, widths: Sequence[int]):
        self._tables = [np.zeros((count, width), np.int32) for width in widths]
        self._held: list[list[Sequence[int]]] = [[()] * count for _ in widths]
        self._rows = Rows.greedy(count)
        self._prompts = np.zeros(count, np.int64)

    def begin(self, slot: int, sampler: Sampler, prompt: int) -> None:
        """Notes a request's sampler and how many tokens its prompt has."""
        self._rows.put(slot, sampler, 0)
        self._prompts[slot] = prompt

    def fill(self, inputs: Inputs, places: Sequence[int], items: Sequence[Tokens]) -> None:
        """Sets all but tokens in the rows `places` of a step's inputs."""
        at = np.asarray(places, np.int64)
        slots = np.asarray([item.slot for item in items], np.int64)
        inputs.slots[at] = slots
        inputs.positions[at] = [item.start for item in items]
        inputs.counts[at] = [item.count for item in items]
        inputs.draws[at] = [item.draws for item in items]
        for number, (tables, held) in enumerate(zip(self._tables, self._held, strict=True)):
            for item in items:
                if (table := item.tables[number]) is not held[item.slot]:
                    held[item.slot] = table
                    tables[item.slot, : len(table)] = table
                    tables[item.slot, len(table) :] = 0
            inputs.tables[number][at] = tables[slots]
        rows = inputs.sampling
        rows.integers[at], rows.floats[at] = self._rows.integers[slots], self._rows.floats[slots]
        rows.integers[at, 2] = np.maximum(inputs.positions[at] + inputs.counts[at] - self._prompts[slots], 0)
