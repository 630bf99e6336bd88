"""The families of models, a module each."""

from jmx.models.families import gpt_oss, qwen3_moe
from jmx.models.families.family import Family

FAMILIES: dict[str, Family] = {its.name: its for its in (gpt_oss.FAMILY, qwen3_moe.FAMILY)}
