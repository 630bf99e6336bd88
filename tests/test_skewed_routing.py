"""benchmarks/skewed_routing.py: its command line, its routings, and the fields of its file."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import skewed_routing

FIELDS = {
    *("routing", "tokens", "spare_experts", "us_before", "us_after", "fullest_before", "fullest_after"),
    *("balance_ms", "move_ms", "bytes_a_device", "relative_error"),
}


def test_routings_use_the_experts_that_they_name() -> None:
    logits = jax.random.normal(jax.random.key(0), (32, 8))
    chosen = {
        name: np.unique(jax.lax.top_k(change(logits), 2)[1] // 2) for name, change in skewed_routing.routings(2).items()
    }
    assert chosen["one device gets all"].tolist() == [0]
    assert chosen["one device is idle"].tolist() == [1, 2, 3]
    assert chosen["uniform"].tolist() == [0, 1, 2, 3]
    assert jnp.array_equal(skewed_routing.routings(2)["uniform"](logits), logits)


@pytest.mark.costly
@pytest.mark.devices(2)
def test_the_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "rows.json"
    flags = ["small", "--mesh", "ep=2", "--tokens", "16", "--layers", "1", "--repeats", "1", "--json", str(file)]
    monkeypatch.setattr("sys.argv", ["skewed_routing.py", *flags])
    assert skewed_routing.main() == 0
    values = json.loads(file.read_text())
    assert values["mesh"] == {"ep": 2}
    rows = values["rows"]
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows
    assert [row["routing"] for row in rows] == [*skewed_routing.routings(0)]
    for row in rows:
        assert {*row} == FIELDS
        assert row["fullest_after"] <= row["fullest_before"]
        assert row["relative_error"] < 2e-2
        assert row["bytes_a_device"] == rows[0]["bytes_a_device"]
    assert rows[2]["fullest_before"] == rows[3]["fullest_before"] == 2
    assert rows[2]["fullest_after"] < 1.5
