"""The times of whole models, of a tiny one on a CPU."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import whole_models
from jmx.checkpoint.gpt_oss import read_config

TINY = Path(__file__).resolve().parents[1] / "tests" / "data" / "gpt_oss_tiny"


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.costly
def test_times_of_decoding_and_of_prompts_are_saved(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(whole_models, "PUBLISHED", {"tiny": read_config(TINY)})
    monkeypatch.setattr(whole_models, "PROMPT", 4)
    file = tmp_path / "times.json"
    options = ["--models", "tiny", "--users", "2", "--prefill", "3,5", "--samples", "3", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["whole_models.py", *options])
    assert whole_models.main() == 0
    found = json.loads(file.read_text())["models"]["tiny"]
    decode = found["decode"]["2"]
    assert len(decode["step_us"]["samples"]) == 3
    assert decode["tokens_per_s"] == pytest.approx(2e6 / decode["step_us"]["median"], rel=1e-3)
    assert sorted(found["prefill"]) == ["3", "5"]
    assert all(its["ms"]["median"] > 0 for its in found["prefill"].values())
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.parametrize("option", ["--models=none", "--users=0", "--prefill=1,x", "--samples=0"])
def test_a_wrong_option_is_named(option, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["whole_models.py", option])
    with pytest.raises(SystemExit):
        whole_models.main()
    assert option.split("=")[0] in capsys.readouterr().err
