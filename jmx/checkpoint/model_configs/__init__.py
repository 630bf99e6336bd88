"""Configurations of whole models, a module for each family: `Config`, `read_config`, and published models."""

from jmx.checkpoint.model_configs import gpt_oss, qwen3_moe

__all__ = ["gpt_oss", "qwen3_moe"]
