"""A module of floats among quantized ones: an expert, or a projection of one, that a tool left as it was."""

from collections.abc import Mapping

from jmx.checkpoint.compressed_tensors.module import Piece, Shape
from jmx.checkpoint.compressed_tensors.tensor_names import FLOATS
from jmx.checkpoint.shards import CheckpointError


class FloatModule:
    """A module whose weight is not quantized.

    Args:
        name: in the checkpoint.
        pieces: its tensors, by their name after the module's: a weight, and perhaps a bias.

    Raises:
        CheckpointError: the weight is missing, or a tensor has another dtype or shape.
    """

    scheme = None

    def __init__(self, name: str, pieces: Mapping[str, Piece]):
        self.name, self.pieces = name, pieces
        self.file = next(iter(pieces.values())).tensor.file
        if "weight" not in pieces:
            raise CheckpointError(self.file, f"tensor '{name}.weight' is missing")
        shape = pieces["weight"].shape
        for last, piece in pieces.items():
            if piece.dtype not in FLOATS:
                raise piece.error(f"is {piece.dtype}, but must be {' or '.join(FLOATS)}")
            if len(piece.shape) != (2 if last == "weight" else 1) or piece.shape[0] != shape[0] or 0 in piece.shape:
                raise piece.error(f"has shape {piece.shape}, but must be a matrix, or a bias of its rows")

    @property
    def shape(self) -> Shape:
        """(N, K), the contracted axis last."""
        return self.pieces["weight"].shape
