"""What a call has of each token, as one value: its arrays, and what is static of them."""

from typing import Any, NamedTuple

from jmx.routing.leading import arrays_of, with_arrays
from jmx.routing.logits import Logits
from jmx.routing.routing import Routing, as_int32
from jmx.util.checks import is_array
from jmx.util.typing import Shaped


class Tokens(NamedTuple):
    """What a call has of each token: x (..., H), its routing, and the mask; see `jmx.moe`."""

    x: Any
    routing: Any
    mask: Any

    def arrays(self) -> dict[str, Shaped[Any, "..."]]:
        """The arrays, by name; without those that are no arrays, which are rejected later."""
        arrays = arrays_of(self.routing) if isinstance(self.routing, Routing | Logits) else {}
        return {name: array for name, array in {"x": self.x, **arrays, "mask": self.mask}.items() if is_array(array)}

    def for_jit(self) -> "Tokens":
        """With expert ids in 32 bits: jit narrows numpy's 64 bits."""
        if isinstance(self.routing, Logits):
            return self
        return self._replace(routing=self.routing._replace(expert_ids=as_int32(self.routing.expert_ids)))

    def divided(self) -> tuple[Any, Any]:
        """The arrays with axes of tokens, and the routing without them, as `of_parts` takes them."""
        arrays = arrays_of(self.routing)
        return (self.x, arrays, self.mask), with_arrays(self.routing, dict.fromkeys(arrays))

    @classmethod
    def of_parts(cls, by_token: Any, rest: Any) -> "Tokens":
        x, arrays, mask = by_token
        return cls(x, with_arrays(rest, arrays), mask)
