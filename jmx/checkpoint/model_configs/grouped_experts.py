"""What the configurations of families with DeepSeek's experts have in common: shared ones, and routing by groups."""

from dataclasses import dataclass
from typing import Any

from jmx.checkpoint.model_configs.decoder_config import DecoderConfig
from jmx.checkpoint.model_configs.decoder_entries import DecoderEntries
from jmx.checkpoint.shards import CheckpointError
from jmx.routing import GroupedTopK


@dataclass(frozen=True, kw_only=True)
class GroupedExpertsConfig(DecoderConfig):
    """A decoder with shared experts, whose routing is limited to groups of experts.

    Args:
        n_shared_experts: experts that every token goes to, each as large as the others.
        n_group, topk_group: groups of experts, and how many of them a token's experts are chosen from.
        scoring: "sigmoid" or "softmax", from router logits to scores.
        correction_bias: whether a bias of each expert is added to scores to choose experts.
        routed_scaling_factor: multiplies these weights.
        num_nextn_predict_layers: layers after the others that predict further tokens. They are not run.
    """

    n_shared_experts: int
    n_group: int
    topk_group: int
    scoring: str
    correction_bias: bool
    routed_scaling_factor: float
    num_nextn_predict_layers: int = 0

    @property
    def routing(self) -> GroupedTopK:
        """How experts are chosen, and weighted."""
        return GroupedTopK(
            self.top_k,
            num_groups=self.n_group,
            topk_groups=self.topk_group,
            scoring=self.scoring,
            renormalize=self.norm_topk_prob,
            routed_scaling_factor=self.routed_scaling_factor,
        )


def grouped_experts_fields(entries: DecoderEntries) -> dict[str, Any]:
    """The fields that `GroupedExpertsConfig` adds, except for groups, `scoring` and `correction_bias`."""
    return {
        "n_shared_experts": entries.size("n_shared_experts"),
        "norm_topk_prob": entries.flag("norm_topk_prob"),
        "routed_scaling_factor": entries.number("routed_scaling_factor"),
        "num_nextn_predict_layers": entries.count("num_nextn_predict_layers"),
    }


def check_groups(entries: DecoderEntries, config: GroupedExpertsConfig) -> None:
    """CheckpointError unless `jmx.GroupedTopK` can choose `top_k` experts from `topk_group` groups of `n_group`."""
    file, num_experts, n_group, topk_group = entries.file, config.num_experts, config.n_group, config.topk_group
    if num_experts % n_group:
        raise CheckpointError(file, f"`n_group` (={n_group}) must divide {num_experts} experts")
    if topk_group > n_group:
        raise CheckpointError(file, f"`topk_group` (={topk_group}) must be at most {n_group}")
    candidates = topk_group * (num_experts // n_group)
    if candidates < config.top_k:
        rule = f"must be at most {candidates}, the experts of `topk_group` (={topk_group}) groups"
        raise CheckpointError(file, f"`num_experts_per_tok` (={config.top_k}) {rule}")
