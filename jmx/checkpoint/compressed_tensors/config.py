"""`quantization_config` of a compressed-tensors checkpoint: the scheme of each module.

Its meaning is defined by the package that writes it (https://github.com/vllm-project/compressed-tensors, in
QuantizationConfig, QuantizationScheme and QuantizationArgs). Some keys do not concern a loader (such as how scales were
observed), and some would change the model: every key is checked, and an unknown one is an error.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jmx.checkpoint.compressed_tensors.targets import Target, targets_of
from jmx.checkpoint.config_object import ConfigObject
from jmx.checkpoint.shards import CheckpointError
from jmx.numerics.formats import fp8_in_blocks
from jmx.numerics.input_formats import INPUT_FORMATS

FILE = "config.json"
METHOD = "compressed-tensors"
FLOAT_QUANTIZED = "float-quantized"
MXFP8_QUANTIZED = "mxfp8-quantized"
MIXED = "mixed-precision"  # instead of one storage for all groups: each group names its own

_BLOCK = re.compile(r"([1-9][0-9]{0,8})x([1-9][0-9]{0,8})")
_TORCH_DTYPE = re.compile(r"torch\.[a-z]+[0-9]+(_[a-z0-9]+)?")
_FLOAT_SCALES = (None, "torch.bfloat16", "torch.float16", "torch.float32")  # `scale_dtype` of integers and FP8

LARGEST = 10**9  # sizes of groups and blocks are below

# How files store weights (the package's `format`) -> the kinds of weights that can be stored so.
STORAGES: dict[str, tuple[str, ...]] = {
    "nvfp4-pack-quantized": ("nvfp4",),
    "mxfp4-pack-quantized": ("mxfp4",),
    MXFP8_QUANTIZED: ("mxfp8",),
    "pack-quantized": ("int",),
    "int-quantized": ("int",),
    FLOAT_QUANTIZED: ("fp8",),
    "naive-quantized": ("int", "fp8"),
}

# How files of other tools than compressed-tensors store weights.
MODELOPT, QUARK, FP8, FP8_UE8M0 = "modelopt", "quark", "fp8", "fp8_ue8m0"
GPTQ, GPTQ_V2, AWQ = "gptq", "gptq_v2", "awq"
AUTO_ROUND, AUTO_ROUND_V2 = "auto_round", "auto_round_v2"  # as GPTQ's, without g_idx
DEEPSEEK_FP4 = "deepseek_fp4"  # of DeepSeek-V4's experts

# Input formats with a static scale, and the tensor that holds it, by compressed-tensors' name.
GLOBAL = "input_global_scale"  # divides in compressed-tensors' files, unlike `input_scale`
STATIC_SCALES = {"fp8_static": "input_scale", "nvfp4": GLOBAL}

# (type, num_bits, strategy, group_size, dynamic, scale_dtype) of inputs -> input format.
INPUTS: dict[tuple[Any, ...], str] = {
    ("float", 8, "tensor", None, False, None): "fp8_static",
    ("float", 8, "tensor", None, True, None): "fp8_tensor",
    ("float", 8, "token", None, True, None): "fp8_token",
    ("float", 8, "group", 128, True, None): "fp8_block",
    ("float", 8, "group", 32, True, "torch.uint8"): "mxfp8",
    ("float", 4, "group", 32, True, "torch.uint8"): "mxfp4",
    ("float", 4, "tensor_group", 16, "local", "torch.float8_e4m3fn"): "nvfp4",
    ("int", 8, "token", None, True, None): "int8_token",
}


@dataclass(frozen=True)
class Scheme:
    """How a module is quantized.

    Args:
        weights: name of the weights' format, a key of `jmx.numerics.formats.FORMATS`.
        inputs: name of the inputs' format in `jmx.numerics.input_formats.INPUT_FORMATS`; None if activations are not
            quantized. For any other format of inputs, a description of the config's entry.
        storage: how files store the weights: a key of `STORAGES`, or the constant of another tool, such as `MODELOPT`.
    """

    weights: str
    inputs: str | None
    storage: str

    def __str__(self) -> str:
        inputs = "inputs as they are" if self.inputs is None else f"inputs in {self.inputs}"
        return f"{self.weights}, {inputs}, stored as {self.storage!r}"

    @property
    def reads_inputs(self) -> bool:
        """Whether the tensors of the inputs are known."""
        return self.inputs is None or self.inputs in INPUT_FORMATS

    @property
    def static_scale(self) -> str | None:
        """The tensor that holds the inputs' static scale; None if they have none."""
        return STATIC_SCALES.get(self.inputs) if self.inputs is not None else None


@dataclass(frozen=True)
class Group:
    """A group of modules with one scheme: its name, the targets that select modules, and the scheme.

    `names`: of modules that are selected too, with all modules inside them, as their own names do.
    """

    name: str
    targets: tuple[Target, ...]
    scheme: Scheme
    names: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Quantization:
    """The schemes of a checkpoint.

    Args:
        file: of the config.
        groups: in the order of the file.
        ignore: modules that are not quantized, even if a group selects them.
        kv_cache: whether attention's cached keys and values are quantized, which matters to code that runs the whole
            model.
    """

    file: Path
    groups: tuple[Group, ...]
    ignore: tuple[Target, ...]
    kv_cache: bool = False

    def scheme(self, module: str, module_class: str = "Linear") -> Scheme | None:
        """The scheme of a module, by its name and its class; None if it is not quantized.

        A target that equals the module's name precedes regular expressions, and these precede its class.

        Raises:
            CheckpointError: targets of the same rank give it different schemes. (One library takes the first in
                alphabetical order, another the first in the file.)
        """
        if any(target.rank(module, module_class) is not None for target in self.ignore):
            return None
        found: dict[int, dict[Scheme, str]] = {}
        for group in self.groups:
            if group.names and not group.names.isdisjoint(_with_outer(module)):
                found.setdefault(0, {}).setdefault(group.scheme, group.name)
            for target in group.targets:
                rank = target.rank(module, module_class)
                if rank is not None:
                    found.setdefault(rank, {}).setdefault(group.scheme, group.name)
        if not found:
            return None
        best = found[min(found)]
        if len(best) > 1:
            raise CheckpointError(self.file, f"module {module!r} must be of one group, but is of {[*best.values()]}")
        return next(iter(best))


def _with_outer(module: str) -> Iterator[str]:
    """The module's name, and those of all that it is inside of."""
    while module:
        yield module
        module = module.rpartition(".")[0]


def parse_quantization(file: Path, place: str, value: Any) -> Quantization:
    """The quantization of the object at `place` of config.json. Raises `CheckpointError`: see `of_method`."""
    top = ConfigObject.of_method(file, place, value, METHOD)
    top.one_of("quantization_status", ("compressed", "frozen", None), None)  # "frozen" in files of older versions
    top.check("sparsity_config", _no_sparsity, "must be empty: sparse weights are not read", None)
    for key in ("transform_config", "moe_sparsity_config"):
        top.check(key, lambda value: value in (None, {}), "must be empty: it would change the model", None)
    for key in ("version", "global_compression_ratio"):  # do not concern the tensors
        top.check(key, lambda value: not isinstance(value, dict | list), "must be a number or a string", None)
    kv_cache = top.object_or_none("kv_cache_scheme")
    storage = top.one_of("format", (*STORAGES, MIXED))
    ignore = targets_of(top, "ignore", top.strings("ignore", []))
    groups = top.object("config_groups")
    top.close()
    if not groups.entries:
        raise CheckpointError(file, f"`{groups.place}` must hold a group, but is empty")
    parsed = tuple(_group(groups, name, storage, place) for name in groups.entries)
    return Quantization(file, parsed, ignore, bool(kv_cache))


def _no_sparsity(value: Any) -> bool:
    return value in (None, {}) or (isinstance(value, dict) and value.get("format") == "dense")


def _group(groups: ConfigObject, name: str, storage: str, place: str) -> Group:
    group = groups.object(name)
    targets = targets_of(group, "targets", group.strings("targets"))
    if not targets:
        raise group.error("targets", "must name a module")
    group.one_of("output_activations", (None,), None)
    its_storage = group.one_of("format", (*STORAGES, None), None) or storage
    if its_storage == MIXED:
        raise CheckpointError(groups.file, f"`{group.place}.format` is missing, which {MIXED!r} leaves to each group")
    if storage not in (MIXED, its_storage):
        raise group.error("format", f"must be {storage!r}, as in `{place}.format`")
    weights = group.object("weights")
    its_weights, kind = _weights(weights)
    group.object_or_none("input_activations")
    given = group.entries.get("input_activations")
    inputs = None if given is None else _inputs(group.object("input_activations"))
    group.close()
    if kind not in STORAGES[its_storage]:
        raise CheckpointError(
            groups.file, f"`{weights.place}` is {its_weights}, which must not be stored as {its_storage!r}"
        )
    return Group(name, targets, Scheme(its_weights, inputs, its_storage))


@dataclass(frozen=True)
class _Args:
    """The arguments that weights and inputs share."""

    type: str
    num_bits: int
    strategy: str
    group_size: int | None
    block: tuple[int, int] | None
    symmetric: bool
    dynamic: bool | str
    scale_dtype: str | None

    def __str__(self) -> str:
        size = "" if self.group_size is None else f" of {self.group_size}"
        size = size if self.block is None else f" of {self.block[0]} x {self.block[1]}"
        sign = "" if self.symmetric else "asymmetric "
        dtype = "" if self.scale_dtype is None else f", {self.scale_dtype} scales"
        dynamic = f"dynamic={self.dynamic!r}" if isinstance(self.dynamic, str) else ("static", "dynamic")[self.dynamic]
        return f"{sign}{self.type}{self.num_bits} by {self.strategy}{size}, {dynamic}{dtype}"


def _args(entries: ConfigObject) -> _Args:
    """The arguments of an entry, with the checks and the defaults of the package."""
    type_ = entries.one_of("type", ("int", "float"), "int")
    num_bits = entries.check("num_bits", lambda v: type(v) is int and v > 0, "must be a positive whole number", 8)
    group_size = entries.check(
        "group_size",
        lambda v: v is None or (type(v) is int and (v == -1 or 0 < v < LARGEST)),
        f"must be positive and below {LARGEST}, or -1",
        None,
    )
    inferred = "tensor" if group_size is None else "channel" if group_size == -1 else "group"
    known = ("tensor", "channel", "group", "block", "token", "tensor_group")
    strategy = entries.one_of("strategy", (*known, None), None) or inferred
    group_size = None if group_size == -1 else group_size
    if (strategy in ("group", "tensor_group")) != (group_size is not None):
        rule = "must be given" if group_size is None else "must not be given"
        raise CheckpointError(entries.file, f"`{entries.place}.group_size` {rule} for strategy {strategy!r}")
    block = block_of(entries, "block_structure", None)
    if (strategy == "block") != (block is not None):
        rule = "must be [rows, columns] for strategy 'block' alone"
        raise CheckpointError(entries.file, f"`{entries.place}.block_structure` (={block}) {rule}")
    entries.check("observer", lambda v: v is None or isinstance(v, str), "must be a string", None)
    entries.object_or_none("observer_kwargs")
    _dtype(entries, "zp_dtype")
    symmetric = entries.one_of("symmetric", (True, False), True)
    dynamic = _dynamic(entries, strategy)
    return _Args(type_, num_bits, strategy, group_size, block, symmetric, dynamic, _dtype(entries, "scale_dtype"))


def block_of(entries: ConfigObject, key: str, *default: Any) -> tuple[int, int] | None:
    """The rows and columns of a block, "128x128" or a list of two; None if the entry is null.

    Raises:
        CheckpointError: another value, or none and no `default`.
    """

    def fits(value: Any) -> bool:
        if isinstance(value, str):
            return _BLOCK.fullmatch(value) is not None
        is_pair = isinstance(value, list) and len(value) == 2
        return value is None or (is_pair and all(type(size) is int and 0 < size < LARGEST for size in value))

    value = entries.check(key, fits, "must be two positive whole numbers, the rows and columns of a block", *default)
    if value is None:
        return None
    rows, columns = value.split("x") if isinstance(value, str) else value
    return int(rows), int(columns)


def _dynamic(entries: ConfigObject, strategy: str) -> bool | str:
    """When scales are computed: False, in calibration; True, as the model runs; "local", as True but for a global one.

    CheckpointError for a value that the strategy does not allow. So a missing strategy of NVFP4 inputs, which would be
    inferred from the group size alone, is an error too.
    """
    dynamic = entries.one_of("dynamic", (False, True, "local"), False)
    allowed = {
        False: ("tensor", "channel", "group", "block", "tensor_group"),
        True: ("tensor", "token", "group", "tensor_group"),
        "local": ("tensor_group",),
    }[dynamic]
    if strategy not in allowed:
        problem = f"`{entries.place}.dynamic` (={dynamic!r}) must not be given for strategy {strategy!r}"
        raise CheckpointError(entries.file, problem)
    return dynamic


def _dtype(entries: ConfigObject, key: str) -> str | None:
    def fits(value: Any) -> bool:
        return value is None or (isinstance(value, str) and _TORCH_DTYPE.fullmatch(value) is not None)

    return entries.check(key, fits, "must be a dtype, such as 'torch.uint8'", None)


def _weights(entries: ConfigObject) -> tuple[str, str]:
    """The weights' format, and its kind, as in `STORAGES`."""
    args = _args(entries)
    # "group" ("dynamic" or true in older files) stores each column's group; "weight" ("static") stores nothing.
    order = entries.one_of("actorder", (None, False, True, "group", "dynamic", "weight", "static"), None)
    ordered = order in (True, "group", "dynamic")
    entries.close()
    if args.num_bits not in (4, 8):
        raise entries.error("num_bits", "must be one of [4, 8]")
    unknown = CheckpointError(entries.file, f"`{entries.place}` ({args}) must be weights of a format that is known")
    is_mxfp8 = (args.type, args.num_bits, args.strategy, args.group_size) == ("float", 8, "group", 32)
    if is_mxfp8 and args.symmetric and args.dynamic is False and args.scale_dtype in ("torch.uint8", None):
        return "mxfp8", "mxfp8"
    has_float_scales = args.type == "int" or args.num_bits == 8
    if args.dynamic is not False or (has_float_scales and args.scale_dtype not in _FLOAT_SCALES):
        raise unknown
    if ordered and (args.type != "int" or args.strategy != "group"):
        raise entries.error("actorder", "must be of integers in groups")
    if args.type == "int":
        if args.strategy == "group":
            blocks = f"g{args.group_size}"
        elif args.strategy == "channel":
            blocks = "channel"
        else:
            raise unknown
        suffixes = ["asym"] * (not args.symmetric) + ["order"] * ordered
        return "_".join([f"int{args.num_bits}", blocks, *suffixes]), "int"
    if args.symmetric:
        four_bits = {
            ("tensor_group", 16, "torch.float8_e4m3fn"): "nvfp4",
            ("tensor_group", 16, None): "nvfp4",  # from older versions
            ("group", 32, "torch.uint8"): "mxfp4",
            ("group", 32, None): "mxfp4",
        }
        key = (args.strategy, args.group_size, args.scale_dtype)
        if args.num_bits == 4 and key in four_bits:
            return four_bits[key], four_bits[key]
        if args.num_bits == 8 and args.strategy in ("tensor", "channel"):
            return f"fp8_{args.strategy}", "fp8"
        if args.num_bits == 8 and args.block is not None:
            return fp8_in_blocks(*args.block).name, "fp8"
    raise unknown


def _inputs(entries: ConfigObject) -> str:
    """The inputs' format, or a description of the config's entry, if it is no known format."""
    args = _args(entries)
    if args.strategy in ("channel", "block"):
        raise CheckpointError(
            entries.file, f"`{entries.place}.strategy` must not be {args.strategy!r}, which is of weights"
        )
    entries.one_of("actorder", (None, False), None)
    entries.close()
    dtype = args.scale_dtype
    if dtype is None and args.num_bits == 4:  # from older versions
        dtype = {"group": "torch.uint8", "tensor_group": "torch.float8_e4m3fn"}.get(args.strategy)
    key = (args.type, args.num_bits, args.strategy, args.group_size, args.dynamic, dtype)
    return INPUTS.get(key, str(args)) if args.symmetric else str(args)
