"""The shapes of an engine's programs, and of what these leave on the device: all that compiling needs."""

import jax
import jax.numpy as jnp

from jmx.models.decoder import Model
from jmx.serving.engine.limits import Limits, Pools
from jmx.serving.engine.sampling import History
from jmx.serving.engine.step import Device, Inputs


class Sizes:
    """What follows of a model's shapes and of limits.

    Args:
        model: with weights, or of shapes.
        limits: of all groups of devices together.

    Raises:
        ValueError: see `Limits.of_group`.

    Attributes:
        groups: of devices, into which a mesh divides requests.
        of_group: limits of each.
        single: rows and blocks of a group in single steps, the smallest first.
        several: likewise of several steps in a call.
        pools: of the model's layers.
        settings: of the scheduler.
        widths: of each pool, the pages of a request's table.
        pages: of each layer, the array of its pages.
    """

    def __init__(self, model: Model, limits: Limits):
        self.groups = 1 if model.split is None else model.split.ways("token")
        self.of_group = limits.of_group(self.groups)
        self.single = self.of_group.sizes()
        self.several = [(rows, 0) for rows in self.of_group.decode_sizes()]
        self.pools = Pools.of(model)
        self.settings = self.of_group.settings(self.pools.windows, self.groups)
        self.widths = [-(-limits.max_length // limits.page)] * len(self.pools.windows)
        layers = [model.cache_layers(self.groups * (pages + 1), limits.page) for pages in self.settings.pages]
        self.pages = [layers[pool][number] for number, pool in enumerate(self.pools.of_layer)]
        self._slots, self._page, self._vocab_size = limits.max_users, limits.page, model.config.vocab_size

    def padding(self, rows: int, blocks: int) -> Inputs:
        """A step that computes nothing, for a caller to fill."""
        return Inputs.padding(rows, blocks, self._page, self.widths, self._slots, self.groups)

    def inputs(self) -> tuple[list[Inputs], list[Inputs]]:
        """Such steps of all sizes, the largest first: single ones, and several in a call."""
        single, several = ([self.padding(*size) for size in reversed(its)] for its in (self.single, self.several))
        return single, several

    def slots(self) -> tuple[jax.Array, History]:
        """The last tokens and the history of slots that are free."""
        return jnp.zeros(self._slots, jnp.int32), History.empty(self._slots, self._vocab_size)

    def device(self) -> Device:
        """What steps leave on one device, as `jax.ShapeDtypeStruct`."""
        its: Device = jax.eval_shape(lambda: Device([], *self.slots()))
        return its._replace(pages=[jax.ShapeDtypeStruct(page.shape, page.dtype) for page in self.pages])
