"""The pages of the API reference, which mkdocstrings writes from docstrings."""

import re

SECTION = "Reference"  # of docs/index.md

# Page -> its first sentence, and the names on it. A test checks that each public name is on one of them.
PAGES: dict[str, tuple[str, list[str]]] = {
    "Layer": (
        "The layer as a function, and as a module of Flax NNX and of Linen.",
        ["jmx.moe", "jmx.nnx.MoE", "jmx.nnx.Quantized", "jmx.linen.MoE", "jmx.batched_moe"],
    ),
    "Experts": (
        "The quantized weights of a layer.",
        ["jmx.Experts", "jmx.ShardedExperts", "jmx.quantize", "jmx.dequantize"],
    ),
    "Formats": (
        "Formats of weights, and the bits of their elements.",
        [
            *("jmx.Format", "jmx.BlockScaled", "jmx.FORMATS", "jmx.MXFP4", "jmx.MXINT4", "jmx.NVFP4"),
            *("jmx.pack", "jmx.unpack", "jmx.pad", "jmx.unpad", "jmx.from_offset_binary"),
        ],
    ),
    "Input formats": (
        "What activations are rounded to, before a product.",
        [
            *("jmx.numerics.input_formats.InputFormat", "jmx.numerics.input_formats.QuantizedInputs"),
            *("jmx.numerics.input_formats.quantize", "jmx.numerics.input_formats.dequantize"),
            *("jmx.numerics.input_formats.resolve", "jmx.numerics.input_formats.reduce_static_scales"),
        ],
    ),
    "Activations": (
        "Activations between an expert's two products.",
        [
            *(
                "jmx.Activation",
                "jmx.ACTIVATIONS",
                "jmx.SwiGLU",
                "jmx.SwiGLUPerExpert",
                "jmx.SwiGLUStep",
                "jmx.SiLUAndMul",
                "jmx.GELUAndMul",
            ),
            *("jmx.SiLU", "jmx.GELU", "jmx.ReLU", "jmx.ReLU2"),
        ],
    ),
    "Routing": (
        "From router logits to the experts of each token.",
        [
            *("jmx.route", "jmx.Routing", "jmx.Logits", "jmx.NOWHERE", "jmx.token_counts", "jmx.ROUTING_METHODS"),
            *(
                "jmx.TopKSoftmax",
                "jmx.SoftmaxTopK",
                "jmx.SigmoidTopK",
                "jmx.SqrtSoftplusTopK",
                "jmx.GroupedTopK",
                "jmx.Custom",
            ),
            *("jmx.group", "jmx.Groups"),
        ],
    ),
    "Selection": (
        "Which backend runs a call, and why.",
        [
            *("jmx.explain", "jmx.Explanation", "jmx.select", "jmx.Selection", "jmx.use_backend"),
            *("jmx.Problem", "jmx.Environment", "jmx.Rejection", "jmx.Reason", "jmx.NoBackendError"),
        ],
    ),
    "Backends": (
        "What a backend of one's own implements, its layouts, and its tunable configurations.",
        [
            *("jmx.register_backend", "jmx.backends.registered_backends", "jmx.selection.backend.Backend"),
            *("jmx.selection.requirements.Limits", "jmx.numerics.layouts.Layout", "jmx.numerics.layouts.WeightSpec"),
            *("jmx.numerics.layouts.gather", "jmx.selection.tuning.Tunable", "jmx.selection.tuning.config"),
            *("jmx.selection.tuning.override", "jmx.selection.tuning.reload", "jmx.selection.tuning.describe"),
        ],
    ),
    "Many devices": (
        "Layers that are divided over the devices of a mesh, and balanced experts.",
        [
            *("jmx.Split", "jmx.parallel.Placement", "jmx.parallel.PlacedExperts", "jmx.parallel.balance"),
            *("jmx.parallel.compare", "jmx.parallel.Comparison", "jmx.parallel.rank_loads", "jmx.parallel.imbalance"),
            *("jmx.parallel.rebalance", "jmx.parallel.move", "jmx.parallel.choose_policy", "jmx.parallel.POLICIES"),
            *(
                "jmx.parallel.Exchange",
                "jmx.parallel.EXCHANGES",
                "jmx.parallel.expert_map",
                "jmx.parallel.local_routing",
                "jmx.parallel.layer_counts",
            ),
        ],
    ),
    "Models": (
        "Whole models in Flax NNX: loading, running, sampling, saving.",
        [
            *("jmx.models.load", "jmx.models.find", "jmx.models.Runner", "jmx.models.Cache", "jmx.models.Generation"),
            *("jmx.models.Sampler", "jmx.models.TokenCounts", "jmx.models.LogProbabilities", "jmx.models.ModelSplit"),
            *("jmx.models.ProgramStore", "jmx.models.save", "jmx.models.restore", "jmx.models.Model"),
            *("jmx.models.MoERecord", "jmx.models.Family", "jmx.models.FAMILIES", "jmx.models.family_of"),
            *("jmx.models.GptOss", "jmx.models.Qwen2MoE", "jmx.models.Qwen3MoE", "jmx.models.Mixtral"),
            *("jmx.models.OLMoE", "jmx.models.Glm4MoE", "jmx.models.DeepseekV3"),
            *("jmx.models.from_source", "jmx.models.random_source"),
            *("jmx.models.memory.needed", "jmx.models.memory.Needs", "jmx.models.memory.available"),
        ],
    ),
    "Text": (
        "From messages to tokens and back: tokenizers, chat templates, answers, conversations.",
        [
            *("jmx.models.text.stream.read_tokenizer", "jmx.models.text.stream.TextStream"),
            *("jmx.models.text.chat_template.ChatTemplate", "jmx.models.text.continuation.Continuation"),
            *("jmx.models.text.dialog.Dialog", "jmx.models.text.dialog.Piece", "jmx.models.text.harmony.Channels"),
        ],
    ),
    "Training": (
        "Losses that spread tokens over experts, master weights, adapters beside frozen weights, and runs in a folder.",
        [
            *("jmx.training.load_balancing_loss", "jmx.training.sequence_balance_loss"),
            *("jmx.training.router_z_loss", "jmx.training.updated_correction_bias"),
            *("jmx.training.QAT", "jmx.training.MasterExperts", "jmx.training.rounded", "jmx.training.export"),
            *("jmx.training.Run", "jmx.training.Text", "jmx.training.next_token_losses"),
            *("jmx.training.bits_per_byte", "jmx.training.in_dtype", "jmx.training.unrounded"),
            *("jmx.training.check_finite", "jmx.training.GATE_UP"),
            *("jmx.training.refuse_frozen", "jmx.lora.LoRA", "jmx.lora.Adapters", "jmx.lora.Adapter"),
            *("jmx.lora.merge", "jmx.lora.requantize", "jmx.lora.Requantized"),
        ],
    ),
    "Pictures": (
        "Pictures of loads, errors and speed, by matplotlib.",
        [
            f"jmx.plot.{name}"
            for name in (
                *("expert_load", "rank_load", "quantization_error", "roofline", "kernels", "serving"),
                "training_loss",
            )
        ],
    ),
    "Checkpoints": (
        "Reading, writing and quantizing checkpoints.",
        [
            *("jmx.checkpoint.CheckpointError", "jmx.checkpoint.Reader", "jmx.checkpoint.ExpertLayer"),
            *("jmx.checkpoint.gpt_oss", "jmx.checkpoint.compressed_tensors", "jmx.checkpoint.quantizing"),
            *("jmx.checkpoint.orbax", "jmx.checkpoint.peft", "jmx.checkpoint.model_configs", "jmx.checkpoint.shards"),
        ],
    ),
}


def page_of(name: str) -> str:
    """The path of a page of the reference on the site."""
    return f"api/{name.lower().replace(' ', '_')}.md"


def markdown(name: str) -> str:
    """A page of the reference, in which each `:::` is replaced by mkdocstrings."""
    first, names = PAGES[name]
    return "\n\n".join([f"# {name}", first, *map(_entry, names)]) + "\n"


def _entry(public: str) -> str:
    """The directive of mkdocstrings for a name, whose label in the table of contents fits beside the page."""
    _, *parts = public.split(".")
    label = ".".join(parts) if len(parts) < 3 else parts[-1]
    return f"::: {public}\n    options:\n      toc_label: {label}"


def with_links_to_pages(html: str) -> str:
    """The HTML of a page of the reference, in which pages that docstrings name are links."""
    return re.sub(r"\bdocs/([\w/]+)\.md\b", r'<a href="../\1.html">\1</a>', html)
