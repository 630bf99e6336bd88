"""What readers share that name tensors as the files do, whatever the model."""

from pathlib import Path

import numpy as np

from jmx.checkpoint.placement import ShardingLike, place
from jmx.checkpoint.progress import CountsBytes
from jmx.checkpoint.read_ahead import ReadsAhead
from jmx.checkpoint.shards import CheckpointError, Tensor
from jmx.util.checks import check_str
from jmx.util.typing import Array, Shaped


class SafetensorsReader(CountsBytes, ReadsAhead):
    """Tensors by their names in the files. A family's reader sets `path` and `tensors`."""

    path: Path
    tensors: dict[str, Tensor]

    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def view(self, name: str) -> Shaped[np.ndarray, "..."]:
        """A tensor as a memory map of its file. CheckpointError if no tensor has that name."""
        return self._tensor(name).view()

    def dense(self, name: str, sharding: ShardingLike = None) -> Shaped[Array, "..."]:
        """A tensor outside the experts, by its name in the files; see `jmx.checkpoint.Reader.dense`.

        Raises:
            CheckpointError: no tensor has that name.
            ValueError: a `sharding` that cannot split the array.
        """
        tensor = self._tensor(name)
        array = place(name, tensor.view(), sharding)
        self._advance(tensor.nbytes)
        return array

    def _tensor(self, name: str) -> Tensor:
        if check_str("name", name) not in self.tensors:
            raise CheckpointError(self.path, f"tensor {name!r} is missing")
        return self.tensors[name]
