#!/usr/bin/env python3
"""Downloads the systems that `benchmarks/layer.py --peers DIR` times: python benchmarks/peers/fetch.py DIR

Downloads two wheels from the package index and keeps 50 MB of them in DIR: vLLM's triton_kernels and its library of
MoE operators (which holds Marlin), and Humming. Nothing is installed.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import zipfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from jmx.util import atomic_files

VERSIONS = {"vllm": "0.33.0", "humming-kernels": "0.1.19"}
LIBRARY = "vllm/_moe_C_stable_libtorch.abi3.so"
FOLDERS = ("vllm/third_party/triton_kernels/", "humming/")
_WHEELS = ["--only-binary=:all:", "--python-version=3.12", "--platform=manylinux_2_28_x86_64"]


def main(directory: str) -> None:
    """Creates `directory`, which appears when it is complete. FileExistsError if it exists."""
    with atomic_files.new_path(directory) as target, tempfile.TemporaryDirectory() as downloads:
        target.mkdir()
        wanted = [f"{name}=={version}" for name, version in VERSIONS.items()]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *_WHEELS, "--dest", downloads]
        subprocess.run([*command, *wanted], check=True)
        for wheel in sorted(pathlib.Path(downloads).glob("*.whl")):
            extract(wheel, target)
        (target / "versions.json").write_text(json.dumps(VERSIONS))
        size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    print(f"{directory}: {size / 1e6:.0f} MB")


def extract(wheel: pathlib.Path, target: pathlib.Path) -> None:
    """Extracts the parts of a wheel that the benchmarks use into `target`."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name == LIBRARY:
                (target / "moe_C.so").write_bytes(archive.read(name))
            elif name.startswith(FOLDERS) and not name.endswith("/"):
                file = target / name.removeprefix("vllm/third_party/")
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(archive.read(name))
                file.chmod(0o755 if "/_native/" in name else 0o644)  # Humming starts an executable


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
