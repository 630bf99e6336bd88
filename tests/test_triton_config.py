"""What can be tuned of `triton`: the rules of a configuration, the heuristic at every size, and what is tried."""

import dataclasses
import re
from itertools import product

import pytest

import jmx
from jmx.backends import registered_backends
from jmx.pallas.triton.backend import Triton
from jmx.pallas.triton.config import (
    FEW_TOKENS,
    SHARED_MEMORY,
    Config,
    candidates,
    check,
    copies_tokens,
    decodes_once,
    heuristic,
)
from jmx.selection.tuning import Tunable

TOKENS = sorted({*range(1, 130), *(2**i + d for i in range(7, 17) for d in (-1, 0, 1)), 300, 1000, 2880, 50000})
EXPERTS = (1, 8, 32, 128, 256, 512)
GOOD = {"block_m": 16, "block_n": 64, "block_k": 128, "num_warps": 4, "num_stages": 4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_m": 4}, "`block_m` (=4) must be a power of two in 8..256"),
        ({"block_m": 24}, "`block_m` (=24) must be a power of two in 8..256"),
        ({"block_n": 16}, "`block_n` (=16) must be a power of two in 32..256"),
        ({"block_k": 32}, "`block_k` (=32) must be a power of two in 64..512"),
        ({"block_k": 1024}, "`block_k` (=1024) must be a power of two in 64..512"),
        ({"num_warps": 3}, "`num_warps` (=3) must be a power of two in 1..16"),
        ({"num_stages": 0}, "`num_stages` (=0) must be in 1..8"),
        ({"products": 2}, "`products` (=2) must be 1 or 4"),
        ({"split_k": 0}, "`split_k` (=0) must be in 1..64"),
        ({"narrow_m": 4}, "`narrow_m` (=4) must be 0 or a power of two in 8..8 (half `block_m`)"),
        ({"narrow_m": 16}, "`narrow_m` (=16) must be 0 or a power of two in 8..8 (half `block_m`)"),
        ({"block_m": 64, "narrow_m": 24}, "`narrow_m` (=24) must be 0 or a power of two in 8..32 (half `block_m`)"),
        ({"block_m": 128, "block_n": 256}, "`num_warps` (=4) must be at least 8, so that a thread has at most 128 of"),
    ],
)
def test_a_configuration_that_no_problem_can_run_with_cannot_be_made(change, message):
    Config(**GOOD)
    with pytest.raises(ValueError, match=re.escape(message)):
        Config(**GOOD | change)


def test_shared_memory_is_that_of_the_machine():
    config = Config(128, 128, 128, 8, 3)
    blocks = 128 * 128 // 32
    assert config.shared_memory == 3 * (128 * (2 * 128 + 128 // 2) + 5 * blocks) + 6 * blocks
    assert Config(128, 128, 64, 8, 1).shared_memory == 4 * 128 * 128  # the sums, on their way out
    check(config, (8, 0))
    with pytest.raises(ValueError, match=re.escape("`num_stages` (=3) must be lower: ")):
        check(config, (8, 9))


@pytest.mark.parametrize(
    ("config", "narrower"),
    [
        (Config(128, 128, 128, 4, 2, products=1, narrow_m=32), [(64, 4, 3), (32, 4, 4)]),
        (Config(256, 128, 128, 8, 3, products=1, narrow_m=64), [(128, 4, 2), (64, 4, 3)]),
        (Config(64, 64, 64, 2, 4, narrow_m=32), [(32, 2, 5)]),
        (Config(64, 64, 64, 2, 4), []),
    ],
)
def test_narrower_tiles_have_fewer_warps_and_their_share_of_shared_memory(config, narrower):
    first, *others = config.tiles
    assert first == dataclasses.replace(config, narrow_m=0)
    assert [(tile.block_m, tile.num_warps, tile.num_stages) for tile in others] == narrower
    assert all(tile.shared_memory * config.num_warps <= config.shared_memory * tile.num_warps for tile in others)


def test_a_thread_has_more_sums_where_wgmma_adds_them_up():
    check(Config(128, 128, 128, 4, 2), (9, 0))
    with pytest.raises(ValueError, match=re.escape("`num_warps` (=4) must be higher: ")):
        check(Config(128, 128, 128, 4, 2), (8, 0))


@pytest.mark.parametrize("num_experts", EXPERTS)
@pytest.mark.parametrize("top_k", range(1, 9))
def test_the_heuristic_runs_on_every_machine_at_every_size(top_k, num_experts):
    for tokens, capability in product(TOKENS, SHARED_MEMORY):
        config = heuristic(tokens, min(top_k, num_experts), num_experts, capability)
        assert config.num_stages >= 2  # else nothing is fetched while something is computed
        assert decodes_once(config, capability)
        assert copies_tokens(config)
        check(config, capability)


def test_the_heuristics_blocks_grow_with_an_experts_rows():
    for num_experts in EXPERTS:
        sizes = [heuristic(tokens, 1, num_experts, (8, 0)).block_m for tokens in TOKENS if tokens > FEW_TOKENS]
        assert sizes == sorted(sizes)
        assert sizes[-1] >= min(128, TOKENS[-1] / num_experts)


def test_an_unknown_number_of_tokens_has_a_configuration():
    problem = jmx.Problem(None, 64, 64, 8, 2, "bfloat16", "mxfp4", jmx.SwiGLU(), "interleaved", False, "packed")
    assert Triton().heuristic(problem, jmx.Environment.named("a100")) == heuristic(1, 2, 8, (8, 0))


@pytest.mark.parametrize("capability", SHARED_MEMORY)
@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 64, 256, 1024, 4096, 32768])
def test_candidates_are_distinct_and_begin_with_the_heuristics_own(tokens, capability):
    for num_experts in EXPERTS:
        for top_k in (1, 4, 8):
            found = candidates(tokens, top_k, num_experts, capability)
            assert found[0] == heuristic(tokens, top_k, num_experts, capability)
            assert len(found) == len(set(found)) > 4
            for config in found:
                check(config, capability)


def test_the_engine_can_be_tuned():
    (engine,) = (backend for backend in registered_backends() if backend.name == "triton")
    assert isinstance(engine, Tunable)
    assert engine.config_type is Config
