"""Reading a profile: kernels of the last call, scopes of one CTA; and the picture of it."""

import json
import pathlib

import pytest

from benchmarks import profile_layer

ROOT = pathlib.Path(__file__).parents[1]
SAVED = ROOT / "benchmarks" / "results" / "profiles" / "h200.json"


def test_kernels_are_those_of_the_last_call():
    stream = {"name": "thread_name", "ph": "M", "pid": 1, "tid": 7, "args": {"name": "Stream #7(Compute)"}}
    host = {"name": "a python call", "ph": "X", "pid": 2, "tid": 7, "ts": 900, "dur": 5}
    first = {"name": "product", "ph": "X", "pid": 1, "tid": 7, "ts": 10, "dur": 2}
    late = {"name": "combine", "ph": "X", "pid": 1, "tid": 7, "ts": 904.5, "dur": 1}
    second = {"name": "product", "ph": "X", "pid": 1, "tid": 7, "ts": 902.0, "dur": 2, "args": {"tf_op": "products"}}
    kernels = profile_layer.kernel_events([stream, host, late, first, second])
    assert [(kernel["name"], kernel["start"], kernel["end"]) for kernel in kernels] == [
        ("product", 0, 2),
        ("combine", 2.5, 3.5),
    ]
    assert kernels[0]["scope"] == "products"


def test_scopes_are_nested_as_they_were_entered():
    def event(name, phase, time, thread=3, processor=5):
        return {"name": name, "ph": phase, "ts": time, "tid": thread, "pid": processor}

    trace = [event("consumer", "B", 20, processor=6), event("consumer", "E", 30, processor=6)]
    trace += [event("consumer", "B", 10), event("wait", "B", 11), event("wait", "E", 12), event("consumer", "E", 15)]
    trace += [event("producer", "B", 10.5, 4), event("producer", "E", 13, 4)]
    scopes = {(scope["name"], scope["thread"]): scope for scope in profile_layer.scope_events(trace)}
    assert {name: (scope["start"], scope["end"], scope["depth"]) for name, scope in scopes.items()} == {
        ("wait", 0): (1, 2, 1),
        ("consumer", 0): (0, 5, 0),
        ("producer", 1): (0.5, 3, 0),
    }


@pytest.mark.parametrize("name", ["picture.svg", "picture.png"])
def test_the_saved_profile_is_drawn(name, tmp_path):
    profile_layer.draw(json.loads(SAVED.read_text()), str(tmp_path / name))
    assert (tmp_path / name).stat().st_size > 1000


def test_the_saved_profile_has_every_stage():
    profile = json.loads(SAVED.read_text())
    assert {scope["name"] for scope in profile["scopes"]} >= profile_layer.COLORS.keys()
    assert any(profile_layer.is_ours(kernel, profile) for kernel in profile["kernels"])
