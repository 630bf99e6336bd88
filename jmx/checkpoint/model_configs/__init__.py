"""Configurations of whole models, a module for each family: `Config`, `read_config`, and published models."""

from jmx.checkpoint.model_configs import deepseek_v3, glm4_moe, gpt_oss, mixtral, olmoe, qwen2_moe, qwen3_moe

__all__ = ["deepseek_v3", "glm4_moe", "gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"]
