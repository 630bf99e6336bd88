"""The families of models, a module each."""

from jmx.models.config import Config
from jmx.models.families import deepseek_v3, glm4_moe, gpt_oss, mixtral, olmoe, qwen2_moe, qwen3_moe
from jmx.models.families.family import Family

FAMILIES: dict[str, Family] = {
    its.FAMILY.name: its.FAMILY for its in (gpt_oss, qwen3_moe, mixtral, qwen2_moe, olmoe, glm4_moe, deepseek_v3)
}


def published() -> dict[str, Config]:
    """The configurations of published models of all families, by name."""
    return {name: config for family in FAMILIES.values() for name, config in family.published.items()}
