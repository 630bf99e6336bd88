"""The families of models, a module each."""

from jmx.models.families import deepseek_v3, glm4_moe, gpt_oss, mixtral, olmoe, qwen2_moe, qwen3_moe
from jmx.models.families.family import Family

FAMILIES: dict[str, Family] = {
    its.FAMILY.name: its.FAMILY for its in (gpt_oss, qwen3_moe, mixtral, qwen2_moe, olmoe, glm4_moe, deepseek_v3)
}
