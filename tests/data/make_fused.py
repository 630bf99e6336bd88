"""How fused.json was made: by torch 2.13 and transformers 5.23, on a CPU.

    python tests/data/make_fused.py tests/data

Of each golden checkpoint, what `save_pretrained(save_original_format=False)` writes that the checkpoint has not under
the same name: dtype, shape and SHA-256 by tensor name. All other tensors are the same bits.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

FOLDERS = (
    *("deepseek_v2/lite", "deepseek_v2/plain", "deepseek_v3/published", "families/glm4_moe", "families/mixtral"),
    *("families/olmoe", "families/qwen2_moe", "qwen3_moe/bf16"),
)


def described(tensor: torch.Tensor) -> list[Any]:
    digest = hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
    return [str(tensor.dtype).removeprefix("torch."), [*tensor.shape], digest]


def main(path: str) -> None:
    data, found = Path(path), {}
    for name in FOLDERS:
        before = load_file(data / name / "model.safetensors")
        with tempfile.TemporaryDirectory() as folder:
            model = AutoModelForCausalLM.from_pretrained(data / name, dtype=torch.bfloat16)
            model.save_pretrained(folder, save_original_format=False)
            after = load_file(Path(folder, "model.safetensors"))
        same = before.keys() & after.keys()
        assert all(described(before[its]) == described(after[its]) for its in same)
        assert not [its for its in before.keys() - same if "experts" not in its and "gate" not in its]
        found[name] = {its: described(after[its]) for its in sorted(after.keys() - same)}
    (data / "fused.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
