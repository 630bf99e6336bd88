"""Checks an installed wheel beside the running jax: its library loads, `cpu` is chosen and right, and models of every
family generate and chat.

    PYTHONPATH=FOLDER python tests/wheel.py [--pure] [--layer] FOLDER [LIBRARY]

FOLDER is where the wheel was installed. With `--pure` it must have no library: `xla` is chosen, and `explain` states
why. With `--layer` no models run. LIBRARY is one that `jmx build cutlass` compiled: its handlers are registered, too,
on the CPU, since XLA checks their API version without a GPU. `make test-wheel` runs this with the oldest and the newest
jax.
"""

import contextlib
import io
import json
import pathlib
import sys
import tempfile
import warnings
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import text_checkpoints

# The finder of an editable install would find the source tree first.
sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]

import jmx  # noqa: E402
from jmx import cli  # noqa: E402
from jmx.ffi.cpu import library as cpu  # noqa: E402
from jmx.ffi.cutlass import library as cutlass  # noqa: E402
from jmx.ffi.cutlass import source  # noqa: E402
from jmx.ffi.library import LibraryWarning, load, register  # noqa: E402


def check_layer(chosen: str) -> None:
    """The backend `chosen` is chosen and agrees with `xla`."""
    keys = jax.random.split(jax.random.key(0), 3)
    experts = jmx.Experts.random(keys[0], 8, 128, 64, gate_up_order="interleaved")
    x = jax.random.normal(keys[1], (20, 128), jnp.bfloat16)
    routing = jmx.route(jmx.Logits(jax.random.normal(keys[2], (20, 8)), jmx.TopKSoftmax(2)))
    explanation = jmx.explain(x, routing, experts, activation="swiglu")
    assert explanation.chosen == chosen
    assert chosen == "cpu" or "installed without its kernels in C++" in str(explanation)
    results = [jmx.moe(x, routing, experts, activation="swiglu", backend=name) for name in (None, "xla")]
    ours, reference = (np.asarray(y, np.float64) for y in results)
    error = np.linalg.norm(ours - reference) / np.linalg.norm(reference)
    assert error < 1e-2, error


def check_kernels() -> None:
    """On a processor with AVX2 a kernel is selected that uses it: a compiler's runtime may report no features."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists() and " avx2 " in cpuinfo.read_text():
        assert "avx2" in cpu.library().kernels, cpu.library()


def run_command(*arguments: str | pathlib.Path, given: str = "") -> str:
    """What `jmx` with these arguments, and a text on stdin, prints on stdout."""
    out, err = io.StringIO(), io.StringIO()
    streams = (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch("sys.stdin", io.StringIO(given)),
    )
    with contextlib.ExitStack() as stack:
        for stream in streams:
            stack.enter_context(stream)
        code = cli.main([*map(str, arguments), "--max-new-tokens", "5", "--no-compilation-cache"])
    assert code == 0, err.getvalue()
    return out.getvalue()


def check_models() -> None:
    """`jmx generate` and `jmx chat` on a small checkpoint of every family, which answer a message alike."""
    for name in text_checkpoints.CHECKPOINTS:
        with tempfile.TemporaryDirectory() as directory:
            folder = text_checkpoints.write(pathlib.Path(directory) / name, name)
            generated = json.loads(run_command("generate", folder, "Hello", "--chat", "--json"))
            assert generated["ids"], generated
            chatted = run_command("chat", folder, given="Hello\n")
            assert chatted == ("\n" if name == "gpt_oss" else generated["text"] + "\n"), chatted
        print(f"{name}: generates and chats", flush=True)


def check_headers() -> None:
    """The headers that `jmx build cutlass` compiles with are in the wheel."""
    assert (source.JAX_HEADERS / "xla/ffi/api/ffi.h").is_file(), source.JAX_HEADERS


def check_cutlass(path: pathlib.Path) -> None:
    """This jax accepts the handlers of a library."""
    register(load(path, {}), (cutlass.TARGET, cutlass.INTERLEAVE), "cpu")


def main() -> None:
    pure, layer_alone = "--pure" in sys.argv, "--layer" in sys.argv
    folder, *libraries = (pathlib.Path(word) for word in sys.argv[1:] if word not in ("--pure", "--layer"))
    assert pathlib.Path(jmx.__file__).is_relative_to(folder.resolve()), jmx.__file__
    warnings.simplefilter("error", LibraryWarning)
    if pure:
        check_layer("xla")
    else:
        check_headers()
        check_kernels()
        check_layer("cpu")
    if not layer_alone:
        check_models()
    for path in libraries:
        check_cutlass(path)
    print(f"jax {jax.__version__}: {'xla' if pure else 'cpu'} runs and is right")


if __name__ == "__main__":
    main()
