"""DeepSeek's experts: shared ones, and routing that is limited to groups of experts."""

from typing import Any

from flax import nnx

import jmx
from jmx.checkpoint.model_configs.grouped_experts import GroupedExpertsConfig
from jmx.models.decoder import Model
from jmx.models.families import tensors
from jmx.models.shared_experts import SharedExperts
from jmx.models.sources.protocol import Shape

# Names in a layer, in files.
NAMES = tensors.shared_names("mlp.shared_experts") | {"router_correction_bias": "mlp.gate.e_score_correction_bias"}


class GroupedExpertsModel(Model):
    """A model of a `GroupedExpertsConfig`; a family adds `make_attention` and `angles`."""

    def make_shared_experts(self, rngs: nnx.Rngs) -> SharedExperts:
        return SharedExperts(self.config.hidden_size, _shared_size(self.config), dtype=self.dtype, rngs=rngs)

    def moe_options(self) -> dict[str, Any]:
        config = self.config
        return {"activation": jmx.SwiGLU(), "routing": config.routing, "correction_bias": config.correction_bias}


def shapes(config: GroupedExpertsConfig) -> dict[str, Shape]:
    """Shapes of what a layer has beside its experts and router, by neutral name."""
    found = tensors.shared_shapes(config.hidden_size, _shared_size(config))
    return found | ({"router_correction_bias": (config.num_experts,)} if config.correction_bias else {})


def _shared_size(config: GroupedExpertsConfig) -> int:
    return config.n_shared_experts * config.moe_intermediate_size
