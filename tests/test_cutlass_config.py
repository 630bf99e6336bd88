"""Tiles and configurations of the backend `cutlass`."""

import dataclasses

import pytest
from backend_cases import Case

from jmx.backends import registered_backends
from jmx.ffi.cutlass import config as cutlass_config
from jmx.ffi.cutlass import source as cutlass_source
from jmx.ffi.cutlass.config import TILES, Config, Tile
from jmx.selection import tuning

GPT_OSS_SIZES = Case(tokens=1, hidden=2880, intermediate=2880, num_experts=128, top_k=4, dtype="bfloat16").problem()
SIZES = [(2880, 2880, 128, 4), (7168, 2048, 256, 8), (4096, 14336, 8, 2), (32, 32, 1, 1), (160, 96, 3, 2)]


def problem(tokens, hidden, intermediate, num_experts, top_k, order="interleaved"):
    return dataclasses.replace(
        GPT_OSS_SIZES, num_tokens=tokens, hidden_size=hidden, intermediate_size=intermediate, num_experts=num_experts,
        top_k=top_k, gate_up_order=order,
    )  # fmt: skip


def test_tiles_have_names_of_their_own():
    assert len({tile.name for tile in TILES}) == len(TILES)
    assert Tile(64, 16, 128, True).name == "64x16x128-Pingpong-1x1"
    assert Tile(128, 128, 128, False, cluster_tokens=2).macro == "TILE(128, 128, 128, Cooperative, 1, 2)"
    assert Tile(128, 64, 128, False, cluster_rows=2).name == "128x64x128-Cooperative-2x1"


def test_every_tile_is_in_the_header():
    lines = cutlass_source.tiles_header().splitlines()
    assert [line.split(" ", 2)[2] for line in lines[1:-1]] == [tile.macro for tile in TILES]
    assert lines[-1].split() == ["#define", "JMX_TILES", *(line.split()[1] for line in lines[1:-1])]


@pytest.mark.parametrize("order", ["interleaved", None])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_what_is_chosen_and_tried_can_run(sizes, order):
    hidden, intermediate, num_experts, top_k = sizes
    for tokens in (1, 2, 16, 64, 300, 1024, 8192, 1 << 17):
        asked = problem(tokens, hidden, intermediate, num_experts, top_k, order)
        found = cutlass_config.candidates(asked)
        assert found[0] == cutlass_config.heuristic(asked)
        assert len({*found}) == len(found) <= 32
        assert {config.overlap for config in found} == {True, False}
        for config in found:
            cutlass_config.check(config, asked)


def test_more_tokens_take_larger_tiles():
    chosen = [cutlass_config.heuristic(problem(t, 2880, 2880, 32, 4)).down.tokens for t in (1, 129, 512, 4096)]
    assert chosen == [16, 64, 64, 64]
    assert cutlass_config.heuristic(dataclasses.replace(GPT_OSS_SIZES, num_tokens=None)).down.tokens == 16


def test_what_a_tile_does_not_divide_is_refused():
    wide = Tile(64, 16, 256, True)
    cutlass_config.check(Config(wide, wide), problem(1, 7168, 2048, 256, 8))
    with pytest.raises(ValueError, match=r"`gate_up.columns` \(=256\) must divide the weight's 2944"):
        cutlass_config.check(Config(wide, TILES[0]), GPT_OSS_SIZES)
    with pytest.raises(ValueError, match=r"`down.columns` \(=256\)"):
        cutlass_config.check(Config(TILES[0], wide), GPT_OSS_SIZES)


def test_a_tile_that_is_not_compiled_is_refused():
    with pytest.raises(ValueError, match=r"`down` \(=Tile\(rows=256"):
        Config(TILES[0], Tile(256, 128, 128, False))


def test_a_table_holds_configurations(tmp_path):
    (engine,) = (backend for backend in registered_backends() if backend.name == "cutlass")
    assert isinstance(engine, tuning.Tunable)
    config = Config(TILES[1], TILES[-1], overlap=False)
    key = tuning.Key(tuning.shape_class(GPT_OSS_SIZES), 64)
    tuning.save(tmp_path / "table.json", engine, "NVIDIA H200", {key: tuning.Entry(config, 1.0, None)})
    assert tuning.load(tmp_path / "table.json", engine, "NVIDIA H200")[key].config == config
