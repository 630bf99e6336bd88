"""The `cuda12` extra: kernels for compute capability 8.0, 8.9 and 9.0 compile with jax's plugin for CUDA 12.

They run in an environment of their own, as the plugins of CUDA 12 and 13 exclude each other: `make test-cuda12` makes
it, or JMX_CUDA12 names one in which `pip install -e '.[cuda12,test]'` was run.
"""

import json
import os
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[1]
ENVIRONMENT = pathlib.Path(os.environ.get("JMX_CUDA12", ROOT / ".venv-cuda12"))
PYTHON = ENVIRONMENT / "bin" / "python"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON.exists(), reason=f"needs an environment with the `cuda12` extra in {ENVIRONMENT}: make test-cuda12"
    ),
]

# Tests that compile ahead of time, by what they compile for; those that read machine code need another tool, nvdisasm.
COMPILED = {
    "8.0, triton": (
        "test_aot_triton.py::test_every_activation_compiles",
        "test_aot_triton.py::test_every_configuration_of_the_heuristic_compiles[a100-gpt-oss-20b-64]",
        "test_aot_triton.py::test_every_configuration_of_the_heuristic_compiles[a100-gpt-oss-20b-1024]",
    ),
    "8.9, triton": (
        "test_aot_triton.py::test_every_configuration_of_the_heuristic_compiles[l4-gpt-oss-20b-1]",
        "test_aot_triton.py::test_every_configuration_of_the_heuristic_compiles[l4-gpt-oss-20b-1024]",
    ),
    "9.0, mosaic": (
        "test_aot_mosaic.py::test_one_token_takes_memory_that_does_not_grow_with_experts",
        "test_aot_mosaic.py::test_layers_are_launched_as_one_cuda_graph",
    ),
    "9.0, mosaic_fp8": ("test_aot_mosaic_fp8.py::test_kernels_compute_in_32_bits_where_jax_has_64",),
}


def run(*arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "XLA_"))}
    environment |= {"JMX_TEST_ALL": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [PYTHON, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3000, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_environment_has_the_plugin_of_cuda_12_alone():
    code = (
        "import importlib.metadata, json; print(json.dumps({d.name.lower(): d.version for d in "
        "importlib.metadata.distributions()}))"
    )
    versions = json.loads(run("-c", code).splitlines()[-1])
    plugins = {name: version for name, version in versions.items() if re.fullmatch(r"jax[-_]cuda\d+[-_]plugin", name)}
    assert [re.sub("_", "-", name) for name in plugins] == ["jax-cuda12-plugin"]
    assert versions["jax"] in plugins.values()
    assert versions["nvidia-cuda-nvcc-cu12"].startswith("12.")


@pytest.mark.parametrize("kind", COMPILED)
def test_kernels_compile(kind):
    out = run("-m", "pytest", "-q", "-n", "0", "-m", "aot and not slow", *(f"tests/{test}" for test in COMPILED[kind]))
    passed, skipped = (re.search(rf"(\d+) {word}", out) for word in ("passed", "skipped"))
    assert passed is not None, out
    assert int(passed[1]) >= len(COMPILED[kind])
    assert skipped is None, out
