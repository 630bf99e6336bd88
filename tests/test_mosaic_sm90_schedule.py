"""The schedule of the Hopper kernel by brute force: every work item once, and nothing read that is not written."""

import dataclasses
import itertools
from collections import Counter

import numpy as np
import pytest

from jmx.pallas.mosaic_sm90.config import Config
from jmx.pallas.mosaic_sm90.scheduler import schedules
from jmx.pallas.sm90.tiles import GATED_ROWS, TILE

CONFIGS = [
    Config(8, 1, 3, 5, 2, split_k=3),
    Config(8, 1, 2, 1, 2, split_k=2),
    Config(8, 2, 1, 1, 2, split_k=3),  # ungated, a step gives columns of two parts at times
    Config(8, 2, 2, 1, 2, split_k=2),
    Config(8, 3, 1, 2, 2, split_k=7),  # more parts than columns
    Config(40, 5, 1, 3, 2),
]
SIZES = [(1, 1), (2, 3), (5, 2), (7, 9), (45, 45)]  # tiles of 64 along the intermediate and the hidden size
CORES = [1, 3, 132]


def work_of(schedule, num_blocks):
    """Every (block, tile along the rows, part)."""
    return itertools.product(range(num_blocks), range(schedule.m_tiles), range(schedule.num_parts))


def items_of(schedule, num_blocks):
    """The fields of all items."""
    items = np.arange(schedule.num_items(num_blocks), dtype=np.int32)
    return [np.broadcast_to(np.asarray(field), items.shape) for field in schedule.work_item(items, num_blocks)]


def make(config, sizes, gated, max_blocks, num_ctas=132):
    intermediate, hidden = sizes
    gate_up = (-(-intermediate * TILE // (GATED_ROWS if gated else TILE)), hidden)
    columns = GATED_ROWS if gated else TILE
    return schedules(config, gate_up, (hidden, intermediate), columns, max_blocks, num_ctas)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("num_ctas", CORES)
def test_every_piece_of_work_is_one_item(config, sizes, gated, num_ctas):
    for num_blocks in (1, 2, 4, 33):
        for schedule in make(config, sizes, gated, max_blocks=num_blocks, num_ctas=num_ctas):
            block, tile, part, section, tiles = items_of(schedule, num_blocks)
            places = [(tile + i, i < tiles) for i in range(config.warpgroups_m)]
            inside = [(block[its], place[its], part[its]) for place, its in places]
            found = Counter(its for arrays in inside for its in zip(*(a.tolist() for a in arrays), strict=True))
            found = Counter({its: times for its, times in found.items() if its[1] < schedule.m_tiles})
            assert found == Counter(work_of(schedule, num_blocks))
            assert (tile < schedule.m_tiles).all()
            assert (np.diff(section) >= 0).all()
            assert section.max() < schedule.num_sections


@pytest.mark.parametrize("num_blocks", [1, 5, 8, 32, 33, 128])
@pytest.mark.parametrize("warpgroups_m", [2, 3, 5])
def test_narrow_items_take_no_further_turn(num_blocks, warpgroups_m):
    """Each CTA has as many items as without them, and the items before them are the same."""
    config, num_ctas = Config(40, warpgroups_m, 1, 2, 2), 132
    first, second = make(config, (45, 45), True, num_blocks, num_ctas)
    wide = dataclasses.replace(second, num_ctas=None)
    before = first.num_items(num_blocks)
    turns, fewest = (-(-(before + int(its.num_items(num_blocks))) // num_ctas) for its in (second, wide))
    assert turns == fewest
    narrow, all_wide = items_of(second, num_blocks), items_of(wide, num_blocks)
    count = int((narrow[-1] == warpgroups_m).sum())
    assert (narrow[-1][:count] == warpgroups_m).all()
    for its, of_wide in zip(narrow, all_wide, strict=True):
        np.testing.assert_array_equal(its[:count], of_wide[:count])
    if num_blocks == 32 and warpgroups_m == 5:  # 6.55 turns of each CTA
        assert {*narrow[-1][count:].tolist()} == {3}


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("max_blocks", [1, 4])
def test_an_item_waits_for_all_the_columns_it_reads_and_for_no_more_than_there_are(config, sizes, gated, max_blocks):
    intermediate, _ = sizes
    columns_of_tile = GATED_ROWS if gated else TILE
    first, second = make(config, sizes, gated, max_blocks)
    num_blocks = max_blocks
    counted, writers = Counter(), {}
    for item in range(first.num_items(num_blocks)):
        at = first.work_item(np.int32(item), num_blocks)
        counter = int(first.counter(at))
        assert 0 <= counter < max_blocks
        counted[counter] += config.warpgroups_m
        for tile in range(int(at.tile), int(at.tile) + config.warpgroups_m):
            for column in range(tile * columns_of_tile, (tile + 1) * columns_of_tile, 32):
                writers[int(at.block), column] = counter
    for item in range(second.num_items(num_blocks)):
        at = second.work_item(np.int32(item), num_blocks)
        counter, value = (int(number) for number in first.needed(at, num_blocks))
        assert value == counted[counter]
        tiles = int(second.first_tile(at.part, 0)), int(second.first_tile(at.part, second.item_stages))
        for column in range(tiles[0] * TILE, min(tiles[1], intermediate) * TILE, 32):
            assert writers[int(at.block), column] == counter


@pytest.mark.parametrize("num_cores", CORES)
def test_past_the_end_there_is_some_item(num_cores):
    for schedule in make(CONFIGS[0], (45, 45), True, 4):
        for num_blocks in (0, 1, 4):
            end = schedule.num_items(num_blocks)
            for item in (end, end + num_cores, end + 1000):
                at = schedule.work_item(np.int32(item), num_blocks)
                assert 0 <= at.block < max(num_blocks, 1)
                assert 0 <= at.tile < schedule.m_tiles
                assert 0 <= at.part < schedule.num_parts


def test_sections_are_parts_where_steps_along_the_rows_meet_their_ends():
    for config, sections in zip(CONFIGS, (3, 2, 3, 2, 1, 1), strict=True):
        first, second = make(config, (45, 45), True, 4)
        assert (first.num_sections, second.num_sections) == (sections, config.split_k)
