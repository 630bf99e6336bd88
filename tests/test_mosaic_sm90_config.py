"""What can be tuned of `mosaic`: shared memory and registers, the heuristic at every size, and what is tried."""

import dataclasses
import itertools
import re

import pytest

import jmx
from jmx.pallas.mosaic_sm90.backend import MosaicSm90
from jmx.pallas.mosaic_sm90.config import MAX_STAGES, Config, candidates, deepest, heuristic
from jmx.pallas.sm90.config import SHARED_MEMORY
from jmx.perf.shapes import MODELS

TOKENS = sorted({*range(1, 130), *(2**i + d for i in range(7, 17) for d in (-1, 0, 1)), 300, 1000, 2880, 50000})
TILES = (2048, 2176, 4096, 4864)  # bytes: of 4 and of 8 bits, with and without scales
EXPERTS = (1, 8, 32, 128, 256, 512)


@pytest.mark.parametrize("num_experts", EXPERTS)
@pytest.mark.parametrize("top_k", range(1, 9))
def test_the_heuristic_is_valid_at_every_size(top_k, num_experts):
    for tokens in TOKENS:
        for tile_bytes in TILES:
            config = heuristic(tile_bytes, tokens, min(top_k, num_experts), num_experts)
            config.check(tile_bytes, 1)
            assert config.num_stages >= 2  # else nothing is fetched while something is computed


def test_the_heuristics_blocks_grow_with_an_experts_rows():
    for num_experts in EXPERTS:
        sizes = [heuristic(2176, tokens, 1, num_experts).block_n for tokens in TOKENS if tokens > 16]
        assert sizes == sorted(sizes)
        assert sizes[-1] >= min(192, TOKENS[-1] / num_experts)


def test_an_unknown_number_of_tokens_has_a_configuration():
    problem = jmx.Problem(
        None, 64, 64, 8, 2, "bfloat16", "mxfp4", jmx.SwiGLU(), "interleaved", False, "mosaic_sm90"
    )  # fmt: skip
    here = jmx.Environment.named("h200")
    assert MosaicSm90().heuristic(problem, here) == heuristic(2176, 1, 2, 8)


@pytest.mark.parametrize("num_experts", EXPERTS)
@pytest.mark.parametrize("tokens", [1, 2, 4, 9, 16, 17, 64, 256, 1024, 4096, 32768])
def test_candidates_are_distinct_and_begin_with_the_heuristics_own(tokens, num_experts):
    for top_k, tile_bytes in itertools.product((1, 4, 8), (2176, 4352)):
        found = candidates(tile_bytes, tokens, top_k, num_experts)
        assert found[0] == heuristic(tile_bytes, tokens, top_k, num_experts)
        assert len(found) == len(set(found)) > (4 if tile_bytes < 4096 else 2)
        assert all(config.num_stages >= 2 for config in found)


def test_shared_memory_counts_what_a_block_holds():
    config = Config(24, 1, 3, 5, 2)
    values_and_scales = 64 * 64 // 2 + 64 * 64 // 32
    stage = 15 * (values_and_scales + 24 * 64 * 2)
    sums = 2 * 64 * 24 * 4
    assert 0 <= config.shared_memory(values_and_scales) - 2 * stage - sums <= 4096  # barriers, and what alignment costs
    assert config.partial_sums == sums // 4
    assert Config(64, 4, 1, 3, 2).partial_sums == 0
    assert SHARED_MEMORY == 227 * 1024


@pytest.mark.parametrize("shape", [(8, 1, 1, 1), (8, 1, 3, 5, 3), (40, 5, 1, 3), (192, 3, 1, 2), (256, 2, 1, 1)])
@pytest.mark.parametrize("tile_bytes", TILES)
def test_deepest_leaves_no_space_for_another_stage(tile_bytes, shape):
    config = deepest(tile_bytes, *shape)
    assert (config.block_n, config.warpgroups_m, config.warpgroups_k, config.k_tiles) == shape[:4]
    more = config.shared_memory(tile_bytes) + config.stage_bytes(tile_bytes)
    assert config.num_stages == MAX_STAGES or more > SHARED_MEMORY


@pytest.mark.parametrize("block_n", range(8, 257, 8))
def test_widths_hold_every_count_of_rows(block_n):
    found = Config(block_n, 1, 1, 1, 1).widths
    assert found[-1] == block_n
    assert list(found) == sorted(set(found))
    assert all(width % 8 == 0 for width in found)
    if block_n <= 64:
        assert found == tuple(range(8, block_n + 1, 8))
    half = [width for width in found if width >= block_n / 2]
    steps = [b - a for a, b in itertools.pairwise(half)]
    assert max(steps, default=0) <= 16  # near-equal blocks are halves and more


def test_the_largest_widths_of_large_blocks_are_by_eight():
    assert Config(144, 3, 1, 2, 4).widths == (32, 64, 80, 96, 112, 120, 128, 136, 144)
    assert Config(192, 3, 1, 2, 3).widths == (32, 64, 96, 112, 128, 144, 160, 176, 192)  # or there would be 15


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Config(8, 0, 1, 1, 1), "`warpgroups_m` (=0) must be 1 or more"),
        (lambda: Config(8, 1, -1, 1, 1), "`warpgroups_k` (=-1) must be 1 or more"),
        (lambda: Config(8, 1, 1, 0, 1), "`k_tiles` (=0) must be 1 or more"),
        (lambda: Config(8, 1, 1, 1, 0), "`num_stages` (=0) must be 1 or more"),
        (lambda: Config(8, 1, 1, 1, 33), "`num_stages` (=33) must be at most 32"),
        (lambda: Config(8, 1, 1, 1, 1, 0), "`split_k` (=0) must be 1 or more"),
        (lambda: Config(8, 3, 2, 1, 1), "`warpgroups_m * warpgroups_k` (=6) must be at most 5"),
        (lambda: Config(0, 1, 1, 1, 2), "`block_n` (=0) must be a multiple of 8 in 8..256"),
        (lambda: Config(12, 1, 1, 1, 2), "`block_n` (=12) must be a multiple of 8 in 8..256"),
        (lambda: Config(264, 1, 1, 1, 2), "`block_n` (=264) must be a multiple of 8 in 8..256"),
        (
            lambda: Config(256, 3, 1, 1, 2),
            "`block_n` (=256) must be at most 192, for which 3 warpgroups have registers",
        ),
        (
            lambda: Config(136, 2, 2, 1, 2),
            "`block_n` (=136) must be at most 128, for which 4 warpgroups have registers",
        ),
        (lambda: Config(104, 5, 1, 1, 2), "`block_n` (=104) must be at most 96, for which 5 warpgroups have registers"),
        (
            lambda: Config(256, 1, 1, 4, 2).check(2176, 45),
            "`num_stages` (=2) must be such that 232448 bytes of shared memory hold them",
        ),
        (
            lambda: Config(8, 1, 1, 1, 2, 2).check(2176, 1),
            "`split_k` (=2) must be 1 where a row of `down` has one tile",
        ),
        (lambda: deepest(2176, 256, 1, 1, 8), "`num_stages` (=1) must be such that 232448 bytes"),
    ],
)
def test_a_refusal_names_the_field_its_value_and_the_rule(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_sums_and_what_else_there_is_fit_the_registers_of_a_launch():
    for num_warpgroups in range(1, 6):
        config = Config(8, num_warpgroups, 1, 1, 2)
        threads = 128 * (num_warpgroups + 1)
        assert threads * (config.max_block_n // 2 + 30) <= 65536
        assert 128 * (num_warpgroups * config.registers + 40) <= 65536  # as they are dealt out after the launch


def test_stages_are_whole_where_four_tiles_divide_rows_and_three_do_not():
    def of(hidden, intermediate, tokens=1024):
        problem = MODELS["deepseek-v3"].problem(tokens, "packed")
        problem = dataclasses.replace(problem, hidden_size=hidden, intermediate_size=intermediate)
        return MosaicSm90().heuristic(problem, jmx.Environment.named("h200"))

    assert (of(7168, 2048).k_tiles, of(7168, 2048).num_stages) == (4, 3)
    assert of(7168, 2048, 256).k_tiles == 3  # few rows, where it makes no difference
    assert of(7168, 768).k_tiles == of(7168, 2112).k_tiles == 3
