"""The configurations of published models against copies of their config.json, which other public projects have."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jmx.models import FAMILIES

# By model: "config", the entries of config.json that decide what the model computes, "generation_config" where a copy
# was found, "source", where the copies are, and "eos_ids_not_seen", the ids that no copy has.
COPIES: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "published_configs.json").read_text())
PUBLISHED = {name: family for family in FAMILIES.values() for name in family.published}


def test_each_published_model_has_a_copy() -> None:
    assert COPIES.keys() == PUBLISHED.keys()
    assert all(copy["source"] for copy in COPIES.values())


@pytest.mark.parametrize("name", PUBLISHED)
def test_constants_are_those_of_the_copy(name: str, tmp_path: Path) -> None:
    family, copy = PUBLISHED[name], COPIES[name]
    for part in ("config", "generation_config"):
        if part in copy:
            (tmp_path / f"{part}.json").write_text(json.dumps(copy[part]))
    read, ours = family.read_config(tmp_path), family.published[name]
    unseen = copy.get("eos_ids_not_seen", [])
    assert {*read.eos_token_ids, *unseen} == {*ours.eos_token_ids}
    assert dataclasses.replace(read, eos_token_ids=ours.eos_token_ids) == ours
