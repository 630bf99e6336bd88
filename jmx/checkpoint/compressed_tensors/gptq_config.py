"""Configs of GPTQ, `quant_method` "gptq", as AutoGPTQ, GPTQModel and transformers write them.

The config names no modules: every linear module that files hold in words of 32 bits is quantized. See
https://github.com/ModelCloud/GPTQModel (its QuantizeConfig). vLLM's "moe_wna16" reads the same files.
"""

from pathlib import Path
from typing import Any

from jmx.checkpoint.compressed_tensors.config import GPTQ, GPTQ_V2, LARGEST, Group, Quantization, Scheme
from jmx.checkpoint.compressed_tensors.targets import Target, parse_target, targets_of
from jmx.checkpoint.config_object import ConfigObject

METHOD = "gptq"

# How zero points are stored -> the storage. In the older one they are one less than their value.
_FORMATS = {"gptq": GPTQ, "gptq_v2": GPTQ_V2, None: GPTQ}

# What calibration used, what kernels of other packages prefer, and how the model is found: no weight depends on it.
_ELSEWHERE = (
    "act_group_aware",
    "autogptq_version",
    "backend",
    "batch_size",
    "block_name_to_quantize",
    "cache_block_outputs",
    "cache_examples_on_gpu",
    "damp_auto_increment",
    "damp_percent",
    "dataset",
    "disable_exllama",
    "exllama_config",
    "hyb_act",
    "max_input_length",
    "meta",
    "model_file_base_name",
    "model_name_or_path",
    "model_seqlen",
    "module_name_preceding_first_block",
    "modules_in_block_to_quantize",
    "mse",
    "pad_token_id",
    "parallel_packing",
    "static_groups",
    "tokenizer",
    "true_sequential",
    "use_cuda_fp16",
    "use_exllama",
    "v2",
    "v2_alpha",
    "version",
)
# How AutoRound found the integers, which it writes into its own configs and into those of GPTQ and AWQ.
OF_AUTO_ROUND = (
    "amp",
    "autoround_version",
    "dynamic_max_gap",
    "enable_alg_ext",
    "enable_minmax_tuning",
    "enable_norm_bias_tuning",
    "enable_quanted_input",
    "gradient_accumulate_steps",
    "iters",
    "low_gpu_mem_usage",
    "lr",
    "minmax_lr",
    "not_use_best_mse",
    "nsamples",
    "provider",
    "quant_block_list",
    "scale_dtype",
    "seqlen",
    "super_bits",
    "super_group_size",
    "supported_types",
    "to_quant_block_names",
    "train_bs",
)
FLOAT_BITS = (16, 32)  # of what is not quantized
INPUTS = ("act_data_type", "act_dynamic", "act_group_size", "act_sym")
_SKIPPED = "-:"  # before a pattern of `dynamic`: modules that are not quantized


def parse_gptq(file: Path, place: str, value: Any) -> Quantization:
    """The quantization of the object at `place` of config.json. Raises `CheckpointError`: see `of_method`."""
    top = ConfigObject.of_method(file, place, value, METHOD, (*_ELSEWHERE, *OF_AUTO_ROUND))
    bits = top.one_of("bits", (4, 8))
    size = group_size(top, "group_size")
    ordered = top.one_of("desc_act", (True, False), False) and size is not None
    symmetric = top.one_of("sym", (True, False), True)
    storage = _storage(top)
    top.one_of("is_marlin_format", (False, None), None)
    top.one_of("pack_dtype", ("int32", None), None)
    top.one_of("lm_head", (True, False, None), None)
    check_inputs(top)
    ignore = _skipped(top)
    top.close()
    blocks = "channel" if size is None else f"g{size}"
    suffixes = ["asym"] * (not symmetric) + ["order"] * ordered
    scheme = Scheme("_".join([f"int{bits}", blocks, *suffixes]), None, storage)
    return Quantization(file, (Group(METHOD, (parse_target("Linear"),), scheme),), ignore)


def _storage(top: ConfigObject) -> str:
    """How zero points are stored. CheckpointError if both keys that name it do, differently."""
    named = {key: top.one_of(key, (*_FORMATS,), None) for key in ("checkpoint_format", "format")}
    given = {key: name for key, name in named.items() if name is not None}
    if len({*given.values()}) > 1:
        raise top.error("format", f"must be that of `checkpoint_format` (={given['checkpoint_format']!r})")
    return _FORMATS[next(iter(given.values()), None)]


def group_size(entries: ConfigObject, key: str) -> int | None:
    """The size of groups; None for whole rows, which the file says by -1."""
    size = entries.check(
        key, lambda v: type(v) is int and (v == -1 or 0 < v < LARGEST), f"must be positive and below {LARGEST}, or -1"
    )
    return None if size == -1 else size


def _skipped(top: ConfigObject) -> tuple[Target, ...]:
    """Patterns of modules that are not quantized. CheckpointError for other overrides of `dynamic`."""
    overrides = top.object_or_none("dynamic") or {}
    for pattern in overrides:
        if not pattern.startswith(_SKIPPED):
            raise top.error("dynamic", f"must only name modules that are not quantized, {_SKIPPED!r} and a pattern")
    patterns = [f"re:{pattern.removeprefix(_SKIPPED)}" for pattern in overrides]
    return targets_of(top, "dynamic", patterns)


def check_inputs(entries: ConfigObject) -> None:
    """CheckpointError where weights are no integers, or inputs are quantized."""
    entries.one_of("data_type", ("int", None), None)
    entries.one_of("act_bits", (*FLOAT_BITS, None), None)
    entries.ignore(*INPUTS)
