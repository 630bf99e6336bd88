"""What all tests share: the platform, skips with reasons, sampling of cases, and random data that a seed reproduces."""

import collections
import importlib.util
import os
import pathlib
import secrets
import zlib
from collections.abc import Iterator

# jax reads these while it is imported, so they come before the import. A caller's own values win.
CUDA_PLUGIN = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
GPU_HERE = pathlib.Path("/dev/nvidiactl").exists()
if CUDA_PLUGIN and not GPU_HERE:  # compiling for a GPU that is not there needs the plugin, but not cuDNN and the driver
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # pytest-xdist's workers share one card
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # meshes
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # commands would keep programs in this user's directory of caches
    os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "0")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's idle threads spin, on cores that workers share
if not (CUDA_PLUGIN or GPU_HERE):  # most of a run is compiling; `XLA_FLAGS= make test` compiles as users do, for longer
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

# Tests marked `costly` in a drawn run, which more such tests do not lengthen. One takes some five seconds of CPU time.
COSTLY = 30

# Set before pytest-xdist starts its workers, who inherit it.
SEED = int(os.environ.setdefault("JMX_TEST_SEED", str(secrets.randbelow(2**32))))

if os.environ.get("JMX_TEST_SHAPES", "1") == "1":  # before jmx is imported
    import shapes

    shapes.install()

import hypothesis  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

# Tracing and compiling make the first example slow and the clock meaningless.
hypothesis.settings.register_profile(
    "jmx", deadline=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("jmx")


def pytest_report_header() -> str:
    return f"jax {jax.__version__} on {jax.default_backend()}, JMX_TEST_SEED={SEED}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--drawn",
        action="store_true",
        help="run one case of each test and backend, some of the costly tests, others in every run, and fewer examples "
        "of properties",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--drawn"):
        hypothesis.settings.register_profile("drawn", hypothesis.settings.get_profile("jmx"), max_examples=10)
        hypothesis.settings.load_profile("drawn")


def _left_out(items: list[pytest.Item], drawn: bool) -> set[pytest.Item]:
    """The cases of `items` that do not run: all but n, drawn by the seed, of each backend of a test that is `sampled`.

    If tests are `drawn`: all but one case of each backend of every test that is not marked `every_case`. The format
    drawn least so far is preferred.
    """
    alike: dict[tuple[str, str, int], list[pytest.Item]] = {}
    for item in items:
        marker = item.get_closest_marker("sampled")
        one = drawn and not item.get_closest_marker("every_case")
        if one or marker:
            count = 1 if one or not marker else marker.args[0]
            alike.setdefault((item.nodeid.partition("[")[0], _param(item, "backend"), count), []).append(item)
    left_out: set[pytest.Item] = set()
    taken: collections.Counter[str] = collections.Counter()
    for (name, backend, count), cases in alike.items():
        order = np.random.default_rng([SEED, zlib.crc32(f"{name} {backend}".encode())]).permutation(len(cases))
        shuffled = [cases[i] for i in order]
        if drawn:
            shuffled.sort(key=lambda case: taken[_param(case, "format")])
            taken.update(_param(case, "format") for case in shuffled[:count])
        left_out.update(shuffled[count:])
    return left_out


def _costly_left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """The cases of the tests marked `costly` that a drawn run leaves out.

    Of each file it takes a third of these tests, and of all files together `COSTLY`: one of each file first.
    """
    tests: dict[pathlib.Path, dict[str, list[pytest.Item]]] = {}
    for item in items:
        if item.get_closest_marker("costly"):
            name = item.nodeid.partition("[")[0]
            tests.setdefault(item.path, {}).setdefault(name, []).append(item)
    in_turn: list[tuple[int, float, str]] = []  # of each file the first one, then the second one, ...
    for path, cases in tests.items():
        rng = np.random.default_rng([SEED, zlib.crc32(path.name.encode())])
        order = rng.permutation(sorted(cases))[: -(-len(cases) // 3)]
        in_turn.extend((turn, rng.random(), name) for turn, name in enumerate(order))
    taken = {name for *_, name in sorted(in_turn)[:COSTLY]}
    return {case for cases in tests.values() for name in cases.keys() - taken for case in cases[name]}


def _param(item: pytest.Item, name: str) -> str:
    """The value of a parameter of a test's case, "" where it has none of that name."""
    return str(item.callspec.params.get(name, "")) if hasattr(item, "callspec") else ""  # pyright: ignore[reportAttributeAccessIssue]


def pytest_itemcollected(item: pytest.Item) -> None:
    """For `--dist loadgroup`: cases of one file that share a backend and a format run in one process.

    They share kernels, too, which a process compiles once.
    """
    backend = _param(item, "backend")
    if backend and item.config.pluginmanager.hasplugin("xdist"):
        case = item.callspec.params.get("case")  # pyright: ignore[reportAttributeAccessIssue]
        format = _param(item, "format") or str(getattr(case, "format", ""))
        item.add_marker(pytest.mark.xdist_group(f"{item.path.name} {backend} {format}".rstrip()))


def _skip_reason(item: pytest.Item) -> str | None:
    """Why `item` cannot run on this machine, if it cannot."""
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        return f"needs an NVIDIA GPU; jax runs on {jax.default_backend()} here"
    if item.get_closest_marker("aot") and not CUDA_PLUGIN:
        return "needs the CUDA plugin of jax, which the `aot` extra installs"
    needed = max((marker.args[0] for marker in item.iter_markers("devices")), default=1)
    return f"needs {needed} devices; there are {jax.device_count()}" if needed > jax.device_count() else None


@pytest.hookimpl(trylast=True)  # after -k: a case that is selected alone always runs
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if reason := _skip_reason(item):
            item.add_marker(pytest.mark.skip(reason=reason))
    drawn = bool(config.getoption("--drawn"))
    if drawn or (jax.default_backend() == "cpu" and not os.environ.get("JMX_TEST_ALL")):
        left_out: set[pytest.Item] = set()
        for skipped in False, True:  # a skipped case does not take the place of one that runs
            alike = [item for item in items if bool(_skip_reason(item)) is skipped]
            left_out |= _left_out(alike, drawn) | (_costly_left_out(alike) if drawn else set())
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="module", autouse=True)
def _programs_of_one_file() -> Iterator[None]:
    """Frees the programs that a file's tests compiled. Those of all files are more mappings than a process may have."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def selected(request: pytest.FixtureRequest) -> list[dict[str, object]]:
    """The parameters of each case of this file that runs, for fixtures that prepare these in one process."""
    items = [item for item in request.session.items if item.path == request.path]
    return [dict(item.callspec.params) for item in items if hasattr(item, "callspec")]  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """Computes on a CPU, also on a machine with a GPU, and also in threads, unlike `jax.default_device`."""
    before = jax.config.jax_default_device
    jax.config.update("jax_default_device", jax.devices("cpu")[0])
    yield
    jax.config.update("jax_default_device", before)


@pytest.fixture
def peer_by_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices that seem to write into each other's memory: `peer` runs, whose lowering is XLA's collectives on CPUs."""
    from jmx.parallel import peer

    if jax.default_backend() == "gpu" and (fault := peer.fault(1)):  # it loads the kernels, the lowering there
        pytest.skip(f"the kernels of `peer` do not run here: {fault}")
    monkeypatch.setattr(peer, "fault", lambda *_: None)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """This test's random numbers: new in every run, reproduced by setting the JMX_TEST_SEED that a failure prints."""
    print(f"JMX_TEST_SEED={SEED}")
    group = request.node.get_closest_marker("xdist_group")  # which pytest-xdist may append to the name
    name = request.node.nodeid.removesuffix(f"@{group.args[0]}" if group else "")
    return np.random.default_rng([SEED, zlib.crc32(name.encode())])
