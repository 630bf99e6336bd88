"""Reading a profile of a decoding step: its whole steps, the part of each kernel; and the picture of it."""

import json
import pathlib

import pytest

from benchmarks import kernel_trace, profile_step
from benchmarks.kernel_trace import Kernel

SAVED = sorted((pathlib.Path(__file__).parents[1] / "benchmarks" / "results" / "profiles").glob("*step*.json"))

BEFORE = ["loop_multiply_fusion", "loop_dynamic_slice_fusion"]
WINDOW = ["jmx_heads", "flash_decode_splits1_window128_", "jmx_linear", "jmx_linear__1", "jmx_route", "mosaic_block_n8"]
WHOLE = ["jmx_heads", "flash_decode_splits8", "loop_convert_fusion", *WINDOW[2:]]
AFTER = ["input_multiply_reduce_fusion", "input_reduce_fusion"]
SUM = ["loop_add_fusion"]
NAMES = [*BEFORE, *WINDOW, *SUM, *WHOLE, *SUM, *AFTER]
LAYERS = 2


def kernels_of(names, *, start=0.0, us=10.0, logits=500.0):
    found = []
    for name in names:
        end = start + (logits if name == AFTER[-1] else us)
        found.append(Kernel(start, end, name))
        start = end + (5.0 if name == AFTER[-1] else 0.25)
    return found


def trace_of(kernels):
    stream = {"name": "thread_name", "ph": "M", "pid": 1, "tid": 7, "args": {"name": "Stream #7(Compute)"}}
    launch = {"name": "cuGraphLaunch", "ph": "X", "pid": 2, "tid": 9, "ts": 0, "dur": 1}
    events = [
        {"name": its.name, "ph": "X", "pid": 1, "tid": 7, "ts": its.start, "dur": its.end - its.start}
        for its in kernels
    ]
    return [stream, *[launch] * 4, *events]


def test_whole_steps_are_those_between_two_pauses():
    names = [*NAMES[7:], *NAMES * 3, *NAMES[:9]]  # a trace begins and ends anywhere
    steps = [*profile_step.whole_steps(kernels_of(names), LAYERS)]
    assert [[kernel.name for kernel in step] for step in steps] == [NAMES] * 3


def test_the_longest_pause_of_a_step_may_be_before_its_logits():
    """As with eight users: memory is set before the product of the logits, and the embedding follows the angles."""
    layer = [*(f"jmx_few_tokens_{name}" for name in ("heads", "attention", "out", "router")), *WINDOW[-2:], *SUM]
    names = ["angles", "embedding", *layer * LAYERS, "loop_convert_fusion", "Memset", "nvjet_sm90", *AFTER[:1], "count"]
    pauses = {"angles": 1.4, "embedding": 2.2, "Memset": 1.4, "nvjet_sm90": 3.0}
    found, end = [], 0.0
    for name in 4 * names:
        start = end + pauses.get(name, 0.1)
        end = start + {"nvjet_sm90": 268.0, "mosaic_block_n8": 100.0}.get(name, 12.0)
        found.append(Kernel(start, end, name))
    steps = [*profile_step.whole_steps(found, LAYERS)]
    assert [[kernel.name for kernel in step] for step in steps] == [names] * 2


def test_each_kernel_is_in_its_part():
    embedding, heads, attention, output, router, routing, experts, combined, logits = profile_step.PARTS
    window = [heads, attention, output, router, routing, experts, combined]
    whole = [heads, attention, *window[1:]]
    wanted = [embedding] * 2 + window + whole + [logits] * 2
    assert profile_step.parts_of(kernels_of(NAMES)) == wanted


def test_time_in_which_kernels_overlap_is_that_of_the_first():
    """The four kernels of one token begin when the one before is not done."""
    names = [f"jmx_one_token_{name}" for name in ("heads", "attention", "out", "router")]
    layer = [*names, "jmx_route", "mosaic_block_n8", *SUM]
    found = kernels_of([*BEFORE, *layer * LAYERS, *AFTER] * 4)
    early = [its._replace(start=its.start - 4) if its.name in names[1:] else its for its in found]
    profile = profile_step.summary(trace_of(early), LAYERS)
    assert [*profile["parts"]] == [*profile_step.PARTS]
    got = [part["us"] for part in profile["parts"].values()]
    assert got == [20, 20, 20.5, 20.5, 20.5, 20, 20, 20, 510]


def test_the_product_of_several_tokens_is_that_of_the_output():
    names = ["flash_decode_splits1", "gemm_fusion_dot_12", "loop_add_fusion", "jmx_linear", "jmx_route"]
    _, _, attention, output, router, routing, *_ = profile_step.PARTS
    assert profile_step.parts_of(kernels_of(names)) == [attention, output, output, router, routing]


def test_a_summary_adds_up():
    profile = profile_step.summary(trace_of(kernels_of(NAMES * 4)), LAYERS)
    assert profile["steps"] == 2
    assert profile["graph_launches_per_step"] == 1
    assert sum(part["kernels"] for part in profile["parts"].values()) == len(NAMES)
    spent = sum(part["us"] for part in profile["parts"].values())
    assert spent + profile["idle_us"] == pytest.approx(profile["recorded_step_us"], abs=1)
    assert spent == pytest.approx(10 * (len(NAMES) - 1) + 500)


@pytest.mark.parametrize("names", [[], ["loop_add_fusion"], WINDOW[1:2], WINDOW * 20], ids=str)
def test_a_trace_without_steps_is_an_error(names):
    with pytest.raises(RuntimeError, match=r"no step was recorded that has 2 kernels named .*is this a Hopper GPU"):
        profile_step.summary(trace_of(kernels_of(names)), LAYERS)


def test_kernels_of_a_trace_are_those_on_streams_in_order():
    kernels = kernels_of(NAMES)
    assert kernel_trace.kernels(trace_of(kernels[::-1])) == kernels


@pytest.mark.parametrize("saved", SAVED, ids=lambda path: path.stem)
def test_a_saved_profile_has_every_part_and_is_drawn(saved, tmp_path):
    profile = json.loads(saved.read_text())
    assert [*profile["parts"]] == [*profile_step.PARTS]
    assert profile["parts"]["experts"]["kernels"] == profile["layers"]
    profile_step.draw(profile, str(tmp_path / "picture.png"))
    assert (tmp_path / "picture.png").stat().st_size > 1000
