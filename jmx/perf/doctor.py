"""The findings of `jmx doctor`: versions, devices, and what each backend lacks here, with the remedy."""

import importlib.metadata
import pathlib
import platform
from typing import Any

from jmx._version import __version__
from jmx.util.tables import FoldingTable, words

# Distributions that jmx needs, and by extra what its distributions are for.
NEEDED = (
    "jax",
    "jaxlib",
    "flax",
    "jaxtyping",
    "ml_dtypes",
    "numpy",
    "orbax-checkpoint",
    "safetensors",
    "rich",
    "scipy",
)
EXTRAS = {
    "hf": ("whole models from the Hugging Face Hub, and their text", ("huggingface_hub", "minijinja", "tokenizers")),
    "serve": ("`jmx serve`", ("llguidance", "prometheus-client", "starlette", "uvicorn")),
    "bench": ("pictures", ("matplotlib",)),
    "completion": ("completion in a shell", ("shtab",)),
}


def examine() -> dict[str, Any]:
    """All findings as plain values. `healthy`: all that jmx needs is installed, and a backend runs."""
    optional = [name for _, names in EXTRAS.values() for name in names]
    versions = {name: _version_of(name) for name in (*NEEDED, *optional)} | {
        entry.dist.name: entry.dist.version
        for entry in importlib.metadata.entry_points(group="jax_plugins")
        if entry.dist is not None
    }
    advice = [f"{name} is missing: pip install jmx-moe" for name in NEEDED if versions[name] is None]
    advice += [
        f"for {what}, without {', '.join(missing)}: pip install 'jmx-moe[{extra}]'"
        for extra, (what, names) in EXTRAS.items()
        if (missing := [name for name in names if versions[name] is None])
    ]
    devices, backends, layout, cache, mesh = [], [], None, None, None
    if versions["jax"] is not None:
        import jax

        cache = jax.config.jax_compilation_cache_dir
        try:
            devices = _examine_devices()
            layout, backends = _examine_backends()
            mesh = _examine_mesh(devices)
        except RuntimeError as e:  # an installed plugin that does not start
            advice.append(f"jax finds no device: {' '.join(str(e).split())}")
    advice += _examine_build(backends)
    if pathlib.Path("/dev/nvidiactl").exists() and not any(device["platform"] == "gpu" for device in devices):
        advice.append("an NVIDIA GPU is here and jax does not use it: pip install 'jmx-moe[cuda13]', or [cuda12]")
    return {
        "healthy": all(versions[name] for name in NEEDED) and any(found["runs"] for found in backends),
        "versions": {"jmx": __version__, "python": platform.python_version()} | versions,
        "devices": devices,
        "layout": layout,
        "backends": backends,
        "mesh": mesh,
        "compilation_cache": cache,
        "advice": advice,
    }


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _examine_devices() -> list[dict[str, Any]]:
    import jax

    from jmx.perf.machine import memory_limit

    return [
        {
            "id": device.id,
            "platform": device.platform,
            "kind": device.device_kind,
            "compute_capability": getattr(device, "compute_capability", None),
            "memory_bytes": memory_limit(device),
        }
        for device in jax.devices()
    ]


def _examine_backends() -> tuple[str, list[dict[str, Any]]]:
    """The default layout here, and each backend's answer for one token of a gpt-oss layer, in a layout it reads."""
    from jmx.backends import registered_backends, resolve_layout
    from jmx.perf.bench import usable_layout
    from jmx.perf.shapes import MODELS
    from jmx.selection.environment import Environment
    from jmx.selection.select import NoBackendError

    environment = Environment.probe()
    layout = resolve_layout("auto", environment)
    problem = MODELS["gpt-oss-20b"].problem(1, layout)
    found = []
    for backend in registered_backends():
        answer: dict[str, Any] = {"name": backend.name, "summary": backend.summary, "runs": True}
        try:
            answer["layout"] = usable_layout(problem, environment, backend.name)
        except NoBackendError:
            no = backend.supports(problem, environment)
            assert no is not None
            answer |= {"runs": False, "reason": no.reason.value, "detail": no.detail, "remedy": no.remedy}
        found.append(answer)
    return layout, found


def _examine_mesh(devices: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The exchanges of a gpt-oss layer over these devices, a token each; None if they are one, or do not divide it."""
    from jmx.parallel import Split
    from jmx.parallel.division import Division
    from jmx.perf.shapes import MODELS
    from jmx.selection.costs import PEAKS

    count, problem = len(devices), MODELS["gpt-oss-20b"].problem(len(devices), "packed")
    if count < 2 or problem.num_experts % count:
        return None
    division = Division.of(problem, Split(expert="ep", tokens="ep"), {"ep": count})
    peak = PEAKS.get(devices[0]["kind"])
    exchanges = [
        {"name": name, "summary": summary, "runs": no is None, "chosen": name == division.chosen, "reason": no}
        for name, summary, no in division.trail
    ]
    return {"axes": dict(division.sizes), "link_bytes_s": peak and peak.links, "exchanges": exchanges}


def _examine_build(backends: list[dict[str, Any]]) -> list[str]:
    """What `jmx build cutlass` lacks, if not being built is the only reason against the backend here."""
    from jmx.selection.backend import Reason

    if not any(found["name"] == "cutlass" and found.get("reason") == Reason.NOT_BUILT.value for found in backends):
        return []
    from jmx.ffi.cutlass import build

    found = build.find()
    return [f"for `jmx build cutlass`, {missing}" for missing in found] if isinstance(found, list) else []


def tables(findings: dict[str, Any]) -> list[FoldingTable]:
    """The findings of `examine`, to print; without the advice."""
    versions = FoldingTable(words("package", "version"), title="versions")
    for name, version in findings["versions"].items():
        versions.add_row(name, version or "missing")
    devices = FoldingTable(words("id", "platform", "kind", "capability", "memory"), title="devices")
    for device in findings["devices"]:
        memory = "unknown" if device["memory_bytes"] is None else f"{device['memory_bytes'] / 1e9:.1f} GB"
        capability = str(device["compute_capability"] or "-")
        devices.add_row(str(device["id"]), device["platform"], device["kind"], capability, memory)
    title = f"backends (new weights get layout {findings['layout']!r} here)"
    backends = FoldingTable(words("backend", "runs", "why"), title=title)
    for found in findings["backends"]:
        if found["runs"]:
            layout = "" if found["layout"] == findings["layout"] else f" (in layout {found['layout']!r})"
            backends.add_row(found["name"], "yes", found["summary"] + layout)
        else:
            backends.add_row(found["name"], "no", f"{found['reason']}: {found['detail']}; {found['remedy']}")
    return [versions, devices, backends, *_mesh_tables(findings["mesh"])]


def _mesh_tables(found: dict[str, Any] | None) -> list[FoldingTable]:
    if found is None:
        return []
    mesh = ",".join(f"{name}={size}" for name, size in found["axes"].items())
    rate = found["link_bytes_s"]
    links = "links: no figure" if rate is None else f"links: {rate / 1e9:.0f} GB/s a device"
    table = FoldingTable(words("exchange", "runs", "why"), title=f"exchanges between devices (mesh {mesh}, {links})")
    for its in found["exchanges"]:
        runs = "yes, by default" if its["chosen"] else "yes" if its["runs"] else "no"
        table.add_row(its["name"], runs, its["reason"] or its["summary"])
    return [table]
