"""How blackwell.npz was made: by the functions of flashinfer-python 0.7.2.post1 itself, on a CPU.

They are its Python functions, and those of its C++ ones that take arrays on a CPU: it compiles these when first called,
which needs nvcc 13, the headers of cuBLAS and cuRAND (in CPATH), and a libcuda.so to link with (in LIBRARY_PATH; an
empty one does). No GPU is needed; FlashInfer asks for its compute capability all the same, and gets 10.0 here. With
torch and flashinfer-python in the environment:

    FLASHINFER_CUDA_ARCH_LIST=10.0a python tests/data/make_blackwell.py tests/data/blackwell.npz

In the file, `codes`, `scales` and `bias` of a role are an expert's weight as a checkpoint of gpt-oss has it (rows of
gate and up alternate, gate first; two codes a byte); what FlashInfer made of it has the engine's name in front. Weights
are padded before, which FlashInfer leaves to its callers: values with zeros and scales with 1.0.

Names that begin with `nvfp4_` and `int4_` are of the same in these formats (scales of INT4 as the bits of bfloat16),
and `trtllm_vllm_` is MXFP4 with vLLM's padding. FlashInfer's `prepare_trtllm_fp4_weights` and
`prepare_trtllm_mxint4_weights` made them, whole; they quantize floats first, and that step (for NVFP4 and MXFP4 it
needs a GPU) returns the given codes and scales here. `prepare_cutlass_nvfp4_weights` needs a GPU. What it does besides
quantizing is the order of scales, which `block_scale_interleave` gives on a CPU.
"""
# pyright: reportMissingImports=false

import sys
from typing import Any, NamedTuple

import flashinfer
import flashinfer.fp4_quantization
import numpy as np
import torch
from flashinfer.fused_moe import api, core, prepare
from flashinfer.quantization import fp4_quantization

HIDDEN, INTERMEDIATE = 160, 96
TILE = 128  # the epilogue's, and what all but gate_up's columns is padded to for TensorRT-LLM
TRTLLM_HIDDEN = 512
BLOCK = 32
ONE = 127


def padded(array: np.ndarray, rows: int, columns: int, fill: int) -> np.ndarray:
    widths = [(0, rows - array.shape[0]), (0, columns - array.shape[1])]
    return np.pad(array, widths, constant_values=fill)


def up_then_gate(array: np.ndarray, columns: int, fill: int) -> torch.Tensor:
    halves = (padded(half, TILE, columns, fill) for half in (array[1::2], array[0::2]))
    return torch.from_numpy(np.concatenate([*halves]))


def weights(rng: np.random.Generator) -> dict[str, np.ndarray]:
    found = {}
    for role, rows, columns in (("gate_up", 2 * INTERMEDIATE, HIDDEN), ("down", HIDDEN, INTERMEDIATE)):
        found[f"{role}_codes"] = rng.integers(0, 256, (rows, columns // 2), np.uint8)
        found[f"{role}_scales"] = rng.integers(0, 255, (rows, columns // BLOCK), np.uint8)
        found[f"{role}_bias"] = rng.standard_normal(rows).astype(np.float32)
    return found


def cutlass(given: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Rows as its API wants them, [up; gate]; scales by FlashInfer."""
    hidden = 2 * TILE
    gate_up = up_then_gate(given["gate_up_scales"], hidden // BLOCK, ONE)
    down = torch.from_numpy(padded(given["down_scales"], hidden, TILE // BLOCK, ONE))
    return {
        "cutlass_gate_up_codes": up_then_gate(given["gate_up_codes"], hidden // 2, 0),
        "cutlass_gate_up_scales": flashinfer.block_scale_interleave(gate_up),
        "cutlass_down_codes": torch.from_numpy(padded(given["down_codes"], hidden, TILE // 2, 0)),
        "cutlass_down_scales": flashinfer.block_scale_interleave(down),
    }


def trtllm(given: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Codes, scales and biases by FlashInfer's indices, and the first two by its functions for whole matrices, too."""
    rows = 2 * TILE  # H padded
    whole = {
        "gate_up": (
            up_then_gate(given["gate_up_codes"], TRTLLM_HIDDEN // 2, 0),
            up_then_gate(given["gate_up_scales"], TRTLLM_HIDDEN // BLOCK, ONE),
            up_then_gate(given["gate_up_bias"][:, None], 1, 0),
        ),
        "down": (
            torch.from_numpy(padded(given["down_codes"], rows, TILE // 2, 0)),
            torch.from_numpy(padded(given["down_scales"], rows, TILE // BLOCK, ONE)),
            torch.from_numpy(padded(given["down_bias"][:, None], rows, 1, 0)),
        ),
    }
    indices = {
        "gate_up": core._maybe_get_cached_w3_w1_permute_indices,
        "down": core.get_w2_permute_indices_with_cache,
    }
    made = {}
    for role, (codes, scales, bias) in whole.items():
        index = indices[role]({}, codes, TILE)
        scale_index = indices[role]({}, scales, TILE, num_elts_per_sf=16)
        made[f"trtllm_{role}_codes"] = codes[index]
        made[f"trtllm_{role}_scales"] = flashinfer.block_scale_interleave(scales[scale_index].contiguous())
        made[f"trtllm_{role}_bias"] = bias[index][:, 0]
        if role == "gate_up":
            codes, scales = (flashinfer.reorder_rows_for_gated_act_gemm(array) for array in (codes, scales))
        assert torch.equal(flashinfer.shuffle_matrix_a(codes, TILE), made[f"trtllm_{role}_codes"])
        assert torch.equal(flashinfer.shuffle_matrix_sf_a(scales, TILE), made[f"trtllm_{role}_scales"])
    return made


class Format(NamedTuple):
    """A format of the weights: columns that share a scale, the scale of padding, and what all sizes are padded to."""

    block: int
    one: int
    multiple: int


NVFP4 = Format(16, 0x38, TILE)
INT4 = Format(BLOCK, 0x3F80, 2 * TILE)
MXFP4_BY_VLLM = Format(BLOCK, ONE, 2 * TILE)
INT4_HIDDEN = 288  # more than one slice of 256 columns


def weights_of(rng: np.random.Generator, hidden: int, format: Format, scales: np.ndarray) -> dict[str, np.ndarray]:
    """Random codes, and scales among `scales`."""
    found = {}
    for role, rows, columns in (("gate_up", 2 * INTERMEDIATE, hidden), ("down", hidden, INTERMEDIATE)):
        found[f"{role}_codes"] = rng.integers(0, 256, (rows, columns // 2), np.uint8)
        found[f"{role}_scales"] = rng.choice(scales, (rows, columns // format.block))
    return found


def whole(given: dict[str, np.ndarray], format: Format) -> dict[str, torch.Tensor]:
    """Gate and up with rows [up; gate], all padded as the format wants it."""

    def size(number: int) -> int:
        return -(-number // format.multiple) * format.multiple

    found = {}
    for name, array in given.items():
        role, what = name.rsplit("_", 1)
        fill = 0 if what == "codes" else format.one
        per_column = {"codes": 2, "scales": format.block}[what]
        columns = size(array.shape[1] * per_column) // per_column
        parts = [array[1::2], array[0::2]] if role == "gate_up" else [array]
        found[name] = torch.from_numpy(np.concatenate([padded(part, size(len(part)), columns, fill) for part in parts]))
    return found


def by_flashinfer(given: dict[str, torch.Tensor], quant: tuple[str, str] | None) -> dict[str, torch.Tensor]:
    """What its functions make of an expert whose quantized weights are `given`; None: INT4."""
    rows, columns = given["gate_up_codes"].shape
    sizes = {"num_local_experts": 1, "hidden_size": 2 * columns, "intermediate_size": rows // 2}
    floats = [torch.zeros(1, *shape, dtype=torch.bfloat16) for shape in ((rows, 2 * columns), (2 * columns, rows // 2))]
    results = iter([(given[f"{role}_codes"][None], given[f"{role}_scales"]) for role in ("gate_up", "down")])

    def quantized(*_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return next(results)

    if quant is None:
        prepare._mxint4_quantize = quantized
        made = prepare.prepare_trtllm_mxint4_weights(*floats, **sizes)
    else:
        flashinfer.fp4_quantization.fp4_quantize = quantized
        pair = api.QuantConfig(*(api.QuantFormat[name] for name in quant))
        made = prepare.prepare_trtllm_fp4_weights(*floats, quant=pair, **sizes)
    names = {"gate_up": "gemm1_weights", "down": "gemm2_weights"}
    codes = {f"{role}_codes": made[name][0] for role, name in names.items()}
    return codes | {f"{role}_scales": made[f"{name}_scale"][0].flatten() for role, name in names.items()}


def other_formats(rng: np.random.Generator, mxfp4: dict[str, np.ndarray]) -> dict[str, Any]:
    """NVFP4 and INT4, given and made, and MXFP4 with vLLM's padding."""
    nvfp4 = weights_of(rng, HIDDEN, NVFP4, np.arange(1, 0x7F, dtype=np.uint8))
    bits = rng.uniform(1e-3, 2, 500).astype(np.float32).view(np.uint32) >> 16
    int4 = weights_of(rng, INT4_HIDDEN, INT4, bits.astype(np.int16))
    padded_nvfp4, padded_int4 = whole(nvfp4, NVFP4), whole(int4, INT4)
    scales = {name: array for name, array in padded_nvfp4.items() if name.endswith("scales")}
    cutlass = padded_nvfp4 | {name: flashinfer.block_scale_interleave(array) for name, array in scales.items()}
    as_bfloat16 = {n: a.view(torch.bfloat16) if n.endswith("scales") else a for n, a in padded_int4.items()}
    both = {name: mxfp4[name] for name in mxfp4 if not name.endswith("bias")}
    trtllm = by_flashinfer(padded_nvfp4, ("NVFP4", "NVFP4"))
    by_vllm = by_flashinfer(whole(both, MXFP4_BY_VLLM), ("MXFP4", "MXFP8"))
    made_int4 = by_flashinfer(as_bfloat16, None)
    return (
        {f"nvfp4_{name}": array for name, array in nvfp4.items()}
        | {f"int4_{name}": array for name, array in int4.items()}
        | {f"nvfp4_cutlass_{name}": array for name, array in cutlass.items()}
        | {f"nvfp4_trtllm_{name}": array.view(torch.uint8) for name, array in trtllm.items()}
        | {f"trtllm_vllm_{name}": array.view(torch.uint8) for name, array in by_vllm.items()}
        | {f"int4_trtllm_{n}": a.view(torch.int16) if n.endswith("scales") else a for n, a in made_int4.items()}
    )


def activations(rng: np.random.Generator) -> np.ndarray:
    """float32 (128, 256) that bfloat16 holds: every scale code, each block's largest magnitude just below 448 times a
    power of two, that, or just above it; random neighbours; zeros."""
    shape = (TILE, 8, BLOCK)
    x = rng.standard_normal(shape) * rng.choice([1e-3, 0.1, 1.0], shape)
    x /= np.abs(x).max(axis=-1, keepdims=True)
    x[..., 0] = rng.choice([-1, 1], shape[:2])
    exponents = np.linspace(-140, 119, shape[0] * shape[1]).round().reshape(shape[:2])  # below -126: code 0
    largest = rng.choice([446, 448, 450, 300, 256], shape[:2])
    with np.errstate(under="ignore"):
        x = (x * np.ldexp(largest, exponents.astype(int))[..., None]).reshape(TILE, -1)
        x[-1, :BLOCK] = 0
        x[rng.random(x.shape) < 0.02] = 0
        return torch.from_numpy(x).to(torch.bfloat16).to(torch.float32).numpy()


def mxfp8(x: np.ndarray) -> dict[str, torch.Tensor]:
    given = torch.from_numpy(x)
    codes, linear = flashinfer.mxfp8_quantize(given, is_sf_swizzled_layout=False, enable_pdl=False)
    again, tiled = flashinfer.mxfp8_quantize(given, is_sf_swizzled_layout=True, enable_pdl=False)
    assert torch.equal(codes, again)
    return {"mxfp8_codes": codes, "mxfp8_scales": linear, "mxfp8_tiled_scales": tiled}


def main(path: str) -> None:
    fp4_quantization.get_compute_capability = lambda device: (10, 0)
    rng = np.random.default_rng(20)
    given = weights(rng)
    x = activations(rng)
    made = cutlass(given) | trtllm(given) | mxfp8(x) | other_formats(rng, given)
    arrays = given | {"x": x} | {name: np.asarray(array) for name, array in made.items()}
    np.savez_compressed(path, allow_pickle=False, **arrays)
    print(flashinfer.__version__, {name: (array.dtype.name, array.shape) for name, array in arrays.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
