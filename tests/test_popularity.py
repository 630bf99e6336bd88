"""jmx/models/sources/popularity.py: routers of random weights that prefer experts by Zipf's law."""

import dataclasses
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from jmx.models import FAMILIES, MoERecord, from_source, random_source
from jmx.models.sources.popularity import zipf_lengths

DATA = pathlib.Path(__file__).parent / "data"
EXPERTS, TOP_K = 32, 4


def zipf(rng: np.random.Generator, top_k: int, num_experts: int) -> np.ndarray:
    """The share of tokens of each expert, drawn one after the other."""
    weights = 1 / np.arange(1, num_experts + 1)
    counts = np.zeros(num_experts)
    for _ in range(2000):
        counts[rng.choice(num_experts, top_k, replace=False, p=weights / weights.sum())] += 1
    return counts / 2000


@pytest.mark.parametrize(("num_experts", "top_k"), [(128, 4), (128, 8), (32, 4), (8, 1)])
def test_experts_are_chosen_by_zipfs_law(num_experts: int, top_k: int, rng: np.random.Generator) -> None:
    lengths = zipf_lengths(num_experts, top_k)
    logits = rng.standard_normal((4000, num_experts)) * lengths
    found = np.bincount(np.argsort(-logits)[:, :top_k].ravel(), minlength=num_experts) / len(logits)
    wanted = zipf(rng, top_k, num_experts)
    rest = wanted < 0.3
    np.testing.assert_allclose(found[rest], wanted[rest], atol=0.03 + 0.15 * wanted[rest].max())
    assert (found[~rest] > 0.28).all()
    assert lengths.dtype == np.float32
    np.testing.assert_allclose(np.mean(lengths**2), 1, rtol=1e-5)


def test_all_experts_are_equal_where_all_are_chosen() -> None:
    np.testing.assert_allclose(zipf_lengths(4, 4), 1)


@pytest.mark.parametrize(("num_experts", "top_k"), [(3, 4), (0, 0), (4, 0), (2.5, 1)])
def test_wrong_numbers_are_errors(num_experts: int, top_k: int) -> None:
    with pytest.raises((TypeError, ValueError), match=r"`num_experts`|`top_k`"):
        zipf_lengths(num_experts, top_k)


@pytest.mark.costly
@pytest.mark.parametrize("routing", ["uniform", "zipf"])
def test_a_random_models_experts_are_as_popular(routing: str, rng: np.random.Generator) -> None:
    config = FAMILIES["qwen3_moe"].read_config(DATA / "qwen3_moe" / "other")
    config = dataclasses.replace(config, num_experts=EXPERTS, top_k=TOP_K)
    model = from_source(random_source(config, format="int8_channel", routing=routing), dtype=jnp.float32)
    tokens = jnp.asarray(rng.integers(config.vocab_size, size=(1, 384)))
    records: list[MoERecord] = []
    model(tokens, None, model.empty_cache(1, 384).layers, records=records)
    chosen = [np.argsort(-np.asarray(record.logits[0]))[:, :TOP_K] for record in records]
    counts = np.asarray([np.bincount(its.ravel(), minlength=EXPERTS) for its in chosen])
    first = np.sort(counts, axis=-1)[:, ::-1][:, :4].sum(axis=-1) / counts.sum(axis=-1)
    shares = np.sort(zipf(rng, TOP_K, EXPERTS))[::-1] / TOP_K
    if routing == "zipf":
        assert (first > 0.65 * shares[:4].sum()).all()
    else:
        assert (first < 0.65 * shares[:4].sum()).all()
