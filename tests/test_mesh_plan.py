"""benchmarks/mesh_plan.py: its table is that of docs/many_gpus.md, and how many GPUs a token is sent to."""

import itertools
import pathlib

import numpy as np
import pytest

from benchmarks import mesh_plan
from benchmarks.mesh_plan import MODELS, Model, Plan, plan, remote_ranks

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "many_gpus.md"


def test_the_page_has_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["mesh_plan.py"])
    mesh_plan.main()
    assert capsys.readouterr().out in PAGE.read_text()
    for model in MODELS.values():
        assert f"{remote_ranks(model, 8):.2f}" in PAGE.read_text()


@pytest.mark.parametrize(("ranks", "groups", "top_groups"), [(1, 1, 1), (2, 1, 1), (4, 1, 1), (4, 4, 2), (4, 4, 4)])
def test_ranks_that_a_token_reaches(ranks: int, groups: int, top_groups: int) -> None:
    """Beside all draws of 3 of 8 experts."""
    model = Model(64, 8, 3, 1.0, groups, top_groups)
    reached = []
    for chosen in itertools.combinations(range(groups), top_groups):
        pool = [expert for expert in range(8) if expert * groups // 8 in chosen]
        reached += [len({e * ranks // 8 for e in draw}) for draw in itertools.combinations(pool, 3)]
    assert np.isclose(remote_ranks(model, ranks), np.mean(reached) * (ranks - 1) / ranks)


def test_costs() -> None:
    its = plan(MODELS["gpt-oss-120b"], 8, 1024, "gather", link_gb_s=100, latency_us=5)
    assert its.sent == 2 * 1024 * 2880 * 2 * 7
    assert np.isclose(its.exchange_us, its.sent / 1e5 + 2 * 5)
    coded = plan(MODELS["deepseek-v3"], 8, 1024, "gather", link_gb_s=100, latency_us=5, fp8=True)
    assert coded.sent == 1024 * (7168 * 3 + 2 * 56) * 7
    for tokens, copies in ((64, 7), (1024, remote_ranks(MODELS["gpt-oss-120b"], 8))):
        needed = plan(MODELS["gpt-oss-120b"], 8, tokens, "peer", link_gb_s=100, latency_us=5)
        assert np.isclose(needed.sent, 2 * tokens * 2880 * 2 * copies)
    assert np.isclose(Plan(0, 50, 100).efficiency, 2 / 3)
