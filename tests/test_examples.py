"""Each example runs, is short, and prints what it says."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from child_environment import importing

ROOT = Path(__file__).parents[1]
ALL = sorted((ROOT / "examples").glob("*.py"))
PROGRAMS = {"train"}  # take arguments, and have tests of their own
EXAMPLES = [file for file in ALL if file.stem not in PROGRAMS]

# All of them in one process, since starting one costs as much as most of them.
RUN_ALL = """
import contextlib, io, json, pathlib, runpy, sys
found = {}
for file in sys.argv[1:]:
    sys.argv = [file]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(file, run_name="__main__")
    found[pathlib.Path(file).stem] = out.getvalue()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory, selected: list[dict[str, object]]) -> dict[str, str]:
    """What each example of a case that runs prints, run in an empty directory."""
    names = {case["name"] for case in selected if "name" in case}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN_ALL, *(str(file) for file in EXAMPLES if file.stem in names)],
        cwd=tmp_path_factory.mktemp("examples"),
        env=importing(ROOT, JAX_PLATFORMS="cpu", MPLBACKEND="agg"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("file", ALL, ids=lambda file: file.stem)
def test_examples_are_short(file: Path) -> None:
    assert len(file.read_text().splitlines()) < 80


# What is in the output of each, which tests below examine further.
PRINTED = {
    "batch": "tokens in the cache: [11 14  9]",
    "custom_backend": "largest difference from ",
    "custom_routing": "experts 0 and 1 alone: (64, 128)",
    "dense_moe": "% from the dense block",
    "expert_load": "expert_load.svg",
    "fine_tune": "in the last five",
    "generate": "And God said",
    "several_gpus": "largest difference from ",
    "shared_experts": "output: (2, 8, 128)",
}


def test_all_examples_are_tested() -> None:
    assert PRINTED.keys() == {file.stem for file in EXAMPLES}


@pytest.mark.costly
@pytest.mark.parametrize("name", PRINTED)
def test_an_example_runs(name: str, printed: dict[str, str]) -> None:
    assert PRINTED[name] in printed[name]


@pytest.mark.costly
@pytest.mark.parametrize("name", ["dense_moe"])
def test_a_swapped_layer_is_near_the_dense_one(name: str, printed: dict[str, str]) -> None:
    errors = dict(re.findall(r"(\w+): ([\d.]+)% from the dense block", printed[name]))
    assert errors.keys() == {"mxfp4", "nvfp4", "int8_channel"}
    assert 0 < float(errors["int8_channel"]) < float(errors["nvfp4"]) < float(errors["mxfp4"]) < 15
    sizes = re.findall(r"([\d,]+) bytes instead of ([\d,]+)", printed[name])
    assert all(3 * int(size.replace(",", "")) < int(dense.replace(",", "")) for size, dense in sizes)


@pytest.mark.costly
@pytest.mark.parametrize("name", ["several_gpus", "custom_backend"])
def test_results_are_those_of_the_other_way(name: str, printed: dict[str, str]) -> None:
    differences = re.findall(r"largest difference from .*: ([\d.e+-]+)", printed[name])
    assert len(differences) == (3 if name == "several_gpus" else 1)
    assert max(map(float, differences)) <= 1e-5


@pytest.mark.costly
@pytest.mark.parametrize("name", ["several_gpus"])
def test_a_divided_module_is_explained_balanced_and_gathered(name: str, printed: dict[str, str]) -> None:
    text = printed[name]
    assert "experts over ep, their intermediate axis over tp, tokens over ep and tp" in text
    assert re.search(r"copies of experts: \[.*2.*\]", text)
    assert "weights are gathered over ep and tp at each call" in text


@pytest.mark.costly
@pytest.mark.parametrize("name", ["shared_experts"])
def test_tokens_go_elsewhere_when_an_experts_bias_is_lowered(name: str, printed: dict[str, str]) -> None:
    before, after = ([int(count) for count in counts.split()] for counts in re.findall(r".*: \[(.*)\]", printed[name]))
    assert sum(before) == sum(after) == 2 * 8 * 4
    assert after[0] == 0


@pytest.mark.costly
@pytest.mark.parametrize("name", ["custom_routing"])
def test_counts_of_a_custom_routing_add_up(name: str, printed: dict[str, str]) -> None:
    (counts,) = re.findall(r"tokens by expert: \[(.*)\]", printed[name])
    assert sum(map(int, counts.split())) == 64 * 2


@pytest.mark.costly
@pytest.mark.parametrize("name", ["fine_tune"])
def test_adapters_learn_another_text(name: str, printed: dict[str, str]) -> None:
    first, last = map(float, re.findall(r"([\d.]+) in the (?:first|last) five", printed[name]))
    assert last < 0.6 * first
