"""dense.py: the source is what the recipe says, and q/k rows come back in transformers' order."""

from __future__ import annotations

import numpy as np
import pytest

from freetoken.demo.dense import Array, DenseModel, unpermute
from freetoken.demo.recipe import SMOLLM2_135M
from freetoken.errors import ConfigError


def permute(weight: Array, num_heads: int) -> Array:
    """As llama.cpp's convert_hf_to_gguf.py stores q and k."""
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def test_the_source_has_the_shape_that_disk_space_is_computed_from(dense: DenseModel) -> None:
    assert dense.shape == SMOLLM2_135M


@pytest.mark.parametrize("num_heads", [1, 3, 9])
def test_unpermute_undoes_llama_cpps_row_order(num_heads: int) -> None:
    weight = np.random.default_rng(0).standard_normal((num_heads * 8, 5)).astype(np.float32)
    assert np.array_equal(unpermute(permute(weight, num_heads), num_heads), weight)
    assert not np.array_equal(permute(weight, num_heads), weight)


def test_a_missing_fact_is_named(dense: DenseModel) -> None:
    with pytest.raises(ConfigError, match=r"no llama\.expert_count"):
        dense.fact("llama.expert_count")
